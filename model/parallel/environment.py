"""Prepares a process for importing megatron-core and, with it, Transformer Engine.

Only functions import torch, so an invalid configuration is reported before that import, which takes seconds.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.model.kernels.flash_cache import flash_attention_4_is_installed, keep_compiled

_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


def before_megatron(launch_order: bool = True, compiled: bool = True, open_cuda: bool = False) -> None:
    """Sets up cuDNN, device memory, the order of CUDA work and the kernel cache, and silences megatron-core's warnings.

    With ``launch_order``, CUDA work runs in the order in which it is launched. The overlap of tensor-parallel messages
    with matrix products relies on it. It holds up messages of other streams, such as those that gather sharded weights.
    With ``compiled``, torch may compile functions of megatron-core on GPUs. With ``open_cuda``, the CUDA context of
    this process's GPU is created meanwhile, if there is one. A VlmdataError if megatron-core is not installed.
    """
    if not _is_installed("megatron.core"):
        raise VlmdataError(
            "this needs megatron-core, which is not installed: pip install 'vlmdata[train]', or -e '.[train]' in a "
            "checkout"
        )
    if launch_order:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    let_memory_grow()
    if open_cuda:
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it opens CUDA
        threading.Thread(target=_open_cuda, daemon=True).start()
    if flash_attention_4_is_installed():
        keep_compiled()  # Transformer Engine imports the package too, which reads the environment only once
    _load_bundled_cudnn()
    # Warnings about deprecated and missing parts are for megatron-core's developers.
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # In CPU mode, megatron-core's calls to torch pass through it, so warnings name its module.
    for module in ("megatron", "transformer_engine", "torch.distributed.checkpoint", "vlmdata.model.parallel.cpu_mode"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    _need_no_triton()
    import torch

    if not (compiled and torch.cuda.is_available()):
        _import_uncompiled()


def adopt_slurm_ranks() -> None:
    """Takes rank and number of processes from ``srun`` if torchrun has not set them.

    Each task of ``srun`` is then one process, and Slurm's signals reach each process directly. ``MASTER_ADDR`` (the
    host of the first task) and ``MASTER_PORT`` must be exported before; see ``docs/launch/slurm.sh``. A VlmdataError if
    srun started several processes that cannot find each other.
    """
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    # A batch script has the task counts but no Slurm step: a process started there runs alone.
    if "RANK" in os.environ or tasks == 1 or "SLURM_STEP_ID" not in os.environ:
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise VlmdataError(
            f"srun started {tasks} processes, but {' and '.join(missing)} is not set: export the first host and a free "
            "port before srun, as docs/launch/slurm.sh does, or start only one task"
        )
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], str(tasks)
    import torch

    # If Slurm shows each task only its own GPU, its number is 0.
    alone = torch.cuda.is_available() and torch.cuda.device_count() == 1
    os.environ["LOCAL_RANK"] = "0" if alone else os.environ["SLURM_LOCALID"]


def require_one_cudnn() -> None:
    """Raises an error if two versions of cuDNN are mixed.

    A machine may have another cuDNN in addition to the one in PyTorch. cuDNN is a thin library that loads its parts by
    name on first use. Transformer Engine starts the system's version, and then PyTorch's thin library runs with the
    system's parts. Nothing fails: forward results are right, but gradients of attention are wrong by 20 % or not finite
    (seen with 9.19 over 9.14; docs/decisions/0025). :func:`before_megatron` loads PyTorch's parts first. A
    ResourceError if another cuDNN is active.
    """
    import torch

    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        raise ResourceError(
            "two versions of cuDNN are mixed in this process, which gives wrong gradients. Call "
            "vlmdata.model.parallel.environment.before_megatron() before importing megatron or transformer_engine, or "
            f"put {_cudnn_folder()} first in LD_LIBRARY_PATH. PyTorch says: {error}"
        ) from error


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def let_memory_grow() -> None:
    """Has PyTorch extend its blocks of device memory, unless the user has set the allocator.

    Packs differ in their images, and so do the tensors of the tower. Blocks of fixed size then fit less and less, until
    steps free and allocate blocks again, for which the device waits (docs/decisions/0065).
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def _open_cuda() -> None:
    """Creates the CUDA context that torch will use. Python's imports go on while it waits for the driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), int(os.environ.get("LOCAL_RANK", "0"))):
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _need_no_triton() -> None:
    """Puts empty kernels in place of the one module of megatron-core that cannot be imported without Triton.

    It moves activations of experts out of GPU memory. A Mac has no Triton, and nothing of CUDA.
    """
    if importlib.util.find_spec("triton") is None:
        empty: Any = types.ModuleType(_PAGED_STASH)
        empty.GLOBAL_BLOCK_SIZE = 1024
        empty.paged_stash_copy_kernel = empty.paged_stash_pop_kernel = None
        sys.modules.setdefault(_PAGED_STASH, empty)


def _import_uncompiled() -> None:
    """Imports megatron-core without torch's compiler, which the first of its marked functions would import.

    That takes seconds, and nobody calls these functions (Triton kernels compute them on GPUs), or the CPU mode runs
    them uncompiled.
    """
    import torch

    original = torch.compile
    uncompiled: Any = lambda function=None, **_: function or (lambda given: given)  # noqa: E731
    torch.compile = uncompiled
    try:
        importlib.import_module("megatron.core.jit")  # also imports megatron.core, which imports most of it
    finally:
        torch.compile = original


def _load_bundled_cudnn() -> None:
    import torch

    # The thin library comes first. PyTorch builds with cuDNN elsewhere have neither this folder nor this problem.
    files = sorted(_cudnn_folder().glob("libcudnn*.so.9"), key=lambda file: (file.name != "libcudnn.so.9", file.name))
    for file in files if torch.cuda.is_available() else []:
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _cudnn_folder() -> Path:
    import torch

    return Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib"
