"""The CPU mode: megatron-core's training code on machines without CUDA.

Much of it asks ``torch.cuda`` for the current device, streams and random states, and allocates with ``device="cuda"``.
:func:`cpu_as_cuda` answers for the CPU. While it is active, it changes ``torch.cuda``, the dispatch of torch functions,
and the sizes that ``all_to_all_single`` accepts, in this process. It changes no attribute of megatron-core. Enter it
once, around building and training.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_NOTHING = contextlib.nullcontext()


def needed() -> bool:
    """True if this machine needs the CPU mode."""
    return not torch.cuda.is_available()


@contextlib.contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Redirects CUDA requests to the CPU; see the module docstring.

    Raises:
        RuntimeError: If the machine has CUDA.
    """
    if not needed():
        raise RuntimeError("cpu_as_cuda is for machines without CUDA, this one has CUDA: use nccl and the device")
    stream = _Stream()
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "Stream": _Stream,  # classes, since annotations of libraries imported later name them
        "Event": _Stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "empty_cache": lambda: None,
    }
    saved = {name: getattr(torch.cuda, name) for name in answers}
    saved_random, saved_exchange = torch.cuda.random.get_rng_state, dist.all_to_all_single
    try:
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
        # megatron-core's recompute reads the state under this second name.
        torch.cuda.random.get_rng_state = answers["get_rng_state"]
        dist.all_to_all_single = _with_sizes_as_lists(saved_exchange)
        with _CudaToCpu(), _uncompiled():
            yield
    finally:
        for name, original in saved.items():
            setattr(torch.cuda, name, original)
        torch.cuda.random.get_rng_state = saved_random
        dist.all_to_all_single = saved_exchange


def cpu_mode_if_needed() -> contextlib.AbstractContextManager[None]:
    """Returns :func:`cpu_as_cuda` on machines without CUDA, otherwise a null context."""
    return cpu_as_cuda() if needed() else contextlib.nullcontext()


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Disables compilation of the small functions that megatron-core marks; on a CPU it costs more than it gains.

    After :func:`vlmdata.model.parallel.environment.before_megatron` no functions are marked. Disabling would then
    import torch's compiler for nothing, which takes seconds.
    """
    jit = sys.modules.get("megatron.core.jit")
    return torch.compiler.set_stance("force_eager") if jit is None or jit.jit_fuser is torch.compile else _NOTHING


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _with_sizes_as_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``all_to_all_single`` to accept token counts as tensors; on CPU, the dispatcher does not convert them."""

    def exchange_lists(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return exchange(*args, **kwargs)

    return exchange_lists


def _frobenius(arguments: dict[str, Any]) -> bool:
    """Whether ``torch.norm`` with these arguments is the norm of the whole tensor, in its own type."""
    return arguments.get("p", "fro") == "fro" and all(arguments.get(name) is None for name in ("dim", "out", "dtype"))


#: Functions that differ without named arguments, too.
_CHANGED = frozenset({"cuda", "type", "norm", "to"})


class _CudaToCpu(TorchFunctionMode):
    """Rewrites the device of torch calls, and reports tensor types and norms as CUDA would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not kwargs and name not in _CHANGED:  # by far the most calls
            return func(*args)
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name == "cuda":
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by type name and know only the CUDA names.
            kind: str = func(*args)
            return kind if "cuda" in kind else kind.replace("torch.", "torch.cuda.", 1)
        if name == "norm" and len(args) == 1 and args[0].dtype == torch.float32 and _frobenius(kwargs):
            # On a CPU, torch sums the squares of a large float32 tensor to four digits; CUDA's kernels do better.
            return torch.linalg.vector_norm(args[0], dtype=torch.float64).float()
        if name == "to":
            args = (args[0], *(_on_cpu(arg) for arg in args[1:]))
        return func(*args, **kwargs)


class _Stream:
    """A stream and an event of a synchronous device."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = wait

    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__
