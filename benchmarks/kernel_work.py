"""The work of a step's launches: bytes that each moves, and FLOP of matrix products and attention.

`kernel_limits.py` compares it with the time of kernels. Noted are Triton's launches, Transformer Engine's C++
functions, FlashAttention 4 in the tower, and torch's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What kernels do, by their name in a profile and by the name under which their work is noted; the first that matches.
GROUPS = {
    "communication": r"nccl",
    "attention of the tower": r"^tower attention|[Ff]lash_?[Aa]ttn",
    "attention of the decoder": r"^decoder attention",
    "matrix products": r"aten::(add|b|badd|_scaled_)?mm|nvjet|gemm|cublas|cutlass|splitKreduce",
    "sums, copies and others of torch": r"at::native|aten::|Memcpy|Memset|at_cuda_detail|CatArray",
    "delta rule": r"chunk_|prepare_wy|recompute_w_u|merge_16x16|solve_tril",
    "before the delta rule": r"_delta_|causal_conv1d|l2norm_(fwd|bwd)",
    "norm and gate after the delta rule": r"_norm_and_gate",
    "norm and rotation before attention": r"_split_norm_rotate",
    "SwiGLU and gates": r"^_gate",
    "tower: split and rotation": r"_split_and_rotate",
    "tower: GELU": r"_gelu_with_bias",
    "tower: sums and norms": r"_sum_and_norm",
    "decoder: sums and norms": r"_sum_and_rms_norm",
    "sums of gradients over programs": r"_sum_of_parts",
    "norms of Transformer Engine": r"(rms|layer)_?norm|normalization",
    "cross-entropy": r"cross_entropy|softmax",
    "AdamW": r"(?i)adam",
    "gradients: norm and scaling": r"(?i)multi_tensor",
}
#: Functions of Transformer Engine's C++ library whose calls are noted.
ENGINE = r"^(generic_gemm|(rms|layer)norm_(fwd|bwd)|multi_tensor_\w+|fused_attn_(fwd|bwd))$"
#: torch's functions that move nothing, and those that take only some rows of their largest tensor.
IDLE = r"^(empty|new_empty|detach|alias|lift|_local_scalar|set_|resize_|_unsafe_view|_pin|record_stream|is_)"
ROWS_READ, ROWS_WRITTEN = r"^(embedding$|index_select|index$|gather)", r"^(index_(put|add|copy)|scatter|masked_scatter)"
#: Functions that write without reading what was there.
OVERWRITES = r"^(_foreach_)?(copy|fill|zero)_"


class Call(NamedTuple):
    """Work of a launch."""

    name: str
    bytes: int
    flops: float


def group(name: str) -> str:
    return next((each for each, pattern in GROUPS.items() if re.search(pattern, name)), "other")


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors among values, also in lists of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; an expanded one has only those in memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def distinct_bytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors among values, each counted once. Those on the host do not count beside some on a GPU."""
    found = list(tensors_in(values))
    on_device = [each for each in found if each.is_cuda] or found
    return sum({(each.data_ptr(), size(each)): size(each) for each in on_device if each.numel()}.values())


class Recorder(TorchDispatchMode):
    """Notes the work of torch's functions while it is entered, and of others by :meth:`note`.

    Attributes:
        calls: Number of calls by their work.
        squares: Sums of squared lengths: of a pack's images, and of its samples (halved, for causal attention).
        patches: Patches of the pack; a query with as many rows is the tower's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self.squares = {"tower": 0.0, "decoder": 0.0}
        self.patches, self.on = 0, False

    def __enter__(self) -> Any:
        self.on = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.on = False
        super().__exit__(*error)

    def takes(self, bounds: Any, patches: Any) -> None:
        """Sets the pack whose work is noted: bounds of its samples (n + 1,), patches of its images (N,)."""
        lengths = (bounds[1:] - bounds[:-1]).astype(float)
        self.patches = int(patches.sum())
        self.squares = {"tower": float((patches.astype(float) ** 2).sum()), "decoder": float((lengths**2).sum()) / 2}

    def note(self, name: str, moved: int, flops: float = 0.0) -> None:
        if self.on:
            self.calls[Call(name, moved, flops)] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if getattr(func, "is_view", False) or re.search(IDLE, name):
            return out
        given, made = list(tensors_in([*args, *kwargs.values()])), list(tensors_in([out]))
        moved, flops = distinct_bytes([*given, *made]), 0.0
        if re.search(ROWS_READ, name):
            moved = 2 * distinct_bytes(made)
        elif re.search(ROWS_WRITTEN, name):
            moved = 3 * distinct_bytes(given[-1:])
        elif func._schema.is_mutable and not re.search(OVERWRITES, name):
            moved += distinct_bytes(args[:1])
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            flops = 2.0 * made[0].numel() * list(tensors_in(args))[-2].shape[-1]
        self.note(f"aten::{name}", moved, flops)
        return out

    def engine(self, name: str, args: Any, out: Any) -> None:
        """Notes a call of one of Transformer Engine's C++ functions."""
        given = list(tensors_in(args))
        if name == "generic_gemm":
            a, turned, b = args[:3]
            inner = a.shape[-1] if turned else a.numel() // a.shape[-1]
            made = next(tensors_in([out]))
            self.note(name, distinct_bytes([a, b, made]), 2.0 * made.numel() * inner)
        elif name.startswith("fused_attn"):
            query = next(each for each in given if each.dim() > 2)
            self.attention(query, name.endswith("bwd"), distinct_bytes([*given, *tensors_in([out])]))
        else:
            self.note(name, distinct_bytes([args, out]) + distinct_bytes(_changed(name, args)))

    def attention(self, query: torch.Tensor, backward: bool, moved: int) -> None:
        """Notes attention with a query (tokens, heads, width)."""
        rows, heads, width = query.numel() // query.shape[-1] // query.shape[-2], *query.shape[-2:]
        part = "tower" if rows == self.patches else "decoder"
        forward = 4.0 * heads * width * self.squares[part]
        self.note(f"{part} attention, {'backward' if backward else 'forward'}", moved, forward * (1 + 1.5 * backward))


def watch_launches(recorder: Recorder) -> None:
    """Has Triton and Transformer Engine tell what they launch. Call it before the model is built."""
    with contextlib.suppress(ImportError):
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.on and not kwargs.get("warmup"):
                recorder.note(kernel.__name__, distinct_bytes([*args, *kwargs.values()]))
            return run(kernel, *args, **kwargs)

        JITFunction.run = noted
    with contextlib.suppress(ImportError):
        import transformer_engine.pytorch  # noqa: F401  # loads the library
        import transformer_engine_torch as engine

        for name in [each for each in dir(engine) if re.search(ENGINE, each)]:
            original = getattr(engine, name)
            for module in [each for key, each in list(sys.modules.items()) if key.startswith("transformer_engine")]:
                if module is not None and vars(module).get(name) is original:
                    setattr(module, name, _told(name, original, recorder))


def _changed(name: str, args: Any) -> list[Any]:
    """Lists of tensors that a function on many tensors reads and writes."""
    if not name.startswith("multi_tensor"):
        return []
    lists = args[2]
    if "adam" in name:
        return list(lists[1:])  # weights and moments, not gradients
    in_place = len(lists) > 1 and lists[0] and lists[0][0].data_ptr() == lists[1][0].data_ptr()
    return list(lists[:1]) if in_place else []


def _told(name: str, function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if recorder.on:
            recorder.engine(name, [*args, *kwargs.values()], out)
        return out

    return noted


def watch_flash(recorder: Recorder, model: torch.nn.Module) -> None:
    """Notes FlashAttention 4 in the tower, whose kernels neither Triton nor Transformer Engine launches."""

    def noted(module: Any, given: Any, out: torch.Tensor) -> None:
        query = out.unflatten(-1, given[0].shape[1:2] + given[0].shape[-1:])
        recorder.attention(query, False, 4 * size(out))
        if torch.is_grad_enabled():
            recorder.attention(query, True, 8 * size(out))

    for module in model.modules():
        if type(module).__name__ == "FlashAttention":
            module.register_forward_hook(noted)
