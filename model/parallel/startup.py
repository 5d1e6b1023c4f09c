"""What a process must do before megatron-core, and with it Transformer Engine, is imported."""

from __future__ import annotations

import ctypes
import logging
import os
import warnings
from pathlib import Path

import torch

from vlmdata.errors import ResourceError


def before_megatron() -> None:
    """Settles which cuDNN is meant and in which order CUDA takes work; lets only errors of megatron-core through."""
    # Overlap of tensor-parallel messages and matrix products relies on the order in which they were started.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _load_bundled_cudnn()
    # Remarks on deprecated and absent parts are for their developers.
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("megatron", "transformer_engine", "torch.distributed.checkpoint"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=SyntaxWarning)


def require_one_cudnn() -> None:
    """Refuses to compute where two versions of cuDNN meet.

    A machine may have another cuDNN beside the one that PyTorch brings. cuDNN is a thin library that loads its parts by
    name when they are first needed. Transformer Engine starts the system's, and then PyTorch's thin library runs
    with the system's parts. Nothing fails: forward results are right, but gradients of attention are wrong by 20 % or
    not finite (seen with 9.19 over 9.14; docs/decisions/0025). :func:`before_megatron` loads PyTorch's parts first.

    Raises:
        ResourceError: If another cuDNN is at work.
    """
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        raise ResourceError(
            "two versions of cuDNN meet in this process, which gives wrong gradients. Call "
            "model.parallel.startup.before_megatron() before megatron or transformer_engine is imported, or put "
            f"{_cudnn_folder()} first in LD_LIBRARY_PATH. PyTorch says: {error}"
        ) from error


def _load_bundled_cudnn() -> None:
    # The thin library first. Builds of PyTorch that have cuDNN elsewhere have no such folder, nor this trouble.
    files = sorted(_cudnn_folder().glob("libcudnn*.so.9"), key=lambda file: (file.name != "libcudnn.so.9", file.name))
    for file in files if torch.cuda.is_available() else []:
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _cudnn_folder() -> Path:
    return Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib"
