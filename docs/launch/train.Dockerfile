# Training on NVIDIA GPUs (CUDA 13). Transformer Engine compiles its torch extension here.
#   docker build -f docs/launch/train.Dockerfile -t vlmdata:train .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" vlmdata:train --nproc-per-node 8 -m vlmdata.train --data data/cord …
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04 AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-dev python3-venv g++ ninja-build \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/vlmdata/bin:$PATH NVTE_FRAMEWORK=pytorch
WORKDIR /src
COPY requirements/lock.txt pyproject.toml README.md LICENSE ./
COPY vlmdata vlmdata
COPY preprocess preprocess
COPY model model
# What Transformer Engine is compiled against comes first.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/vlmdata \
 && pip install --no-cache-dir --constraint lock.txt setuptools wheel packaging pybind11 torch \
 && pip install --no-cache-dir --constraint lock.txt --no-build-isolation ".[train,gpu,s3,http]"

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
# Triton compiles what launches its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-dev gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home vlmdata \
 && install --directory --owner 10001 --group 10001 /cache /work
COPY --from=build /opt/vlmdata /opt/vlmdata
ENV PATH=/opt/vlmdata/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["torchrun", "--master-addr", "127.0.0.1"]
CMD ["-m", "vlmdata.train", "--help"]
