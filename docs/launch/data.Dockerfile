# The data side: preprocess, verify, inspect, serve. As another user than root, on a root file system that is read-only.
#   docker build -f docs/launch/data.Dockerfile -t vlmdata:data .
#   docker run --read-only --tmpfs /tmp -v "$PWD/data:/data" -v vlmdata-cache:/cache vlmdata:data preprocess demo --out /data/demo
# torch's CPU build saves 3.5 GB: --build-arg PIP_EXTRA_INDEX_URL=… with its index (https://pytorch.org/get-started/locally/).
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRAS=service,s3,http
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY requirements/lock.txt pyproject.toml README.md LICENSE ./
COPY vlmdata vlmdata
COPY preprocess preprocess
COPY model model
RUN python -m venv /opt/vlmdata \
 && /opt/vlmdata/bin/pip install --no-cache-dir --constraint lock.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/vlmdata /opt/vlmdata
RUN useradd --uid 10001 --no-create-home vlmdata \
 && install --directory --owner 10001 --group 10001 /cache /data
# All that is written outside of --out goes to /cache and /tmp.
ENV PATH=/opt/vlmdata/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["vlmdata"]
CMD ["--help"]
