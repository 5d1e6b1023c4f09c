"""What a process must do before megatron-core, and with it Transformer Engine, is imported.

torch itself is imported within functions only: a configuration is refused before that, without its seconds.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from model.kernels.flash_cache import flash_attention_4_is_installed, keep_compiled
from vlmdata.errors import ResourceError, VlmdataError


def before_megatron() -> None:
    """Settles which cuDNN is meant, in which order CUDA takes work, and where kernels are kept; quietens megatron-core.

    Raises:
        VlmdataError: If megatron-core is not installed.
    """
    if not _is_installed("megatron.core"):
        raise VlmdataError(
            "this needs megatron-core, which is not installed: pip install 'vlmdata[train]', or -e '.[train]' in a "
            "checkout"
        )
    # Overlap of tensor-parallel messages and matrix products relies on the order in which they were started.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if flash_attention_4_is_installed():
        keep_compiled()  # Transformer Engine imports it, too, and the package looks only then
    _load_bundled_cudnn()
    # Remarks on deprecated and absent parts are for their developers.
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # What megatron-core asks of torch goes through the CPU mode, where there is one, and counts as its doing.
    for module in ("megatron", "transformer_engine", "torch.distributed.checkpoint", "model.parallel.cpu_mode"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    _import_uncompiled_without_cuda()


def adopt_slurm_ranks() -> None:
    """Takes rank and number of processes from ``srun`` where torchrun has not set them.

    One task of ``srun`` is one process then, and Slurm's signals reach each of them directly. ``MASTER_ADDR`` (the host
    of the first task) and ``MASTER_PORT`` must be exported before; see ``docs/launch/slurm.sh``.

    Raises:
        VlmdataError: If srun started several processes that cannot find each other.
    """
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    # A batch script has the numbers of tasks to come, but no step: what runs in it is alone.
    if "RANK" in os.environ or tasks == 1 or "SLURM_STEP_ID" not in os.environ:
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise VlmdataError(
            f"srun started {tasks} processes, but {' and '.join(missing)} is not set: export the first host and a free "
            "port before srun, as docs/launch/slurm.sh does, or start one task only"
        )
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], str(tasks)
    import torch

    # Where Slurm shows each task its own GPU only, that one is number 0.
    alone = torch.cuda.is_available() and torch.cuda.device_count() == 1
    os.environ["LOCAL_RANK"] = "0" if alone else os.environ["SLURM_LOCALID"]


def require_one_cudnn() -> None:
    """Refuses to compute where two versions of cuDNN meet.

    A machine may have another cuDNN beside the one that PyTorch brings. cuDNN is a thin library that loads its parts by
    name when they are first needed. Transformer Engine starts the system's, and then PyTorch's thin library runs
    with the system's parts. Nothing fails: forward results are right, but gradients of attention are wrong by 20 % or
    not finite (seen with 9.19 over 9.14; docs/decisions/0025). :func:`before_megatron` loads PyTorch's parts first.

    Raises:
        ResourceError: If another cuDNN is at work.
    """
    import torch

    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        raise ResourceError(
            "two versions of cuDNN meet in this process, which gives wrong gradients. Call "
            "model.parallel.environment.before_megatron() before megatron or transformer_engine is imported, or put "
            f"{_cudnn_folder()} first in LD_LIBRARY_PATH. PyTorch says: {error}"
        ) from error


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package it is in
        return False


def _import_uncompiled_without_cuda() -> None:
    """Imports megatron-core without torch's compiler where only CPUs are.

    It marks small functions to be compiled, and with the first mark all of the compiler is imported: seconds of every
    start, for functions that the CPU mode runs as they are.
    """
    import torch

    if torch.cuda.is_available():
        return
    original = torch.compile
    uncompiled: Any = lambda function=None, **_: function or (lambda given: given)  # noqa: E731
    torch.compile = uncompiled
    try:
        importlib.import_module("megatron.core.jit")  # and with it megatron.core, which imports most
    finally:
        torch.compile = original


def _load_bundled_cudnn() -> None:
    import torch

    # The thin library first. Builds of PyTorch that have cuDNN elsewhere have no such folder, nor this trouble.
    files = sorted(_cudnn_folder().glob("libcudnn*.so.9"), key=lambda file: (file.name != "libcudnn.so.9", file.name))
    for file in files if torch.cuda.is_available() else []:
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _cudnn_folder() -> Path:
    import torch

    return Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib"
