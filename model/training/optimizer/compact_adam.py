"""AdamW whose moments may have half the bytes, or lie in host memory.

torch's function computes each step, from moments that are brought to the device in float32 a piece at a time. Pieces
from host memory take turns on two streams, so that one comes while the one before goes back.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

#: State of AdamW in addition to the weights.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Elements that are brought to the device at a time: 256 MB of float32 for each moment.
PIECE = 2**26


class CompactAdamW(torch.optim.Optimizer):
    """AdamW on float32 parameters; ``step`` counts in its parameter groups, as in Transformer Engine's.

    Moments are kept in ``dtype``, in host memory if wanted. With CUDA it is page-locked, so that it is copied at full
    speed.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], dtype: torch.dtype, on_host: bool) -> None:
        super().__init__([{**group, "step": 0} for group in groups], {})
        self._dtype, self._on_host = dtype, on_host
        self._lanes: list[torch.cuda.Stream] = []  # for good: PyTorch's allocator keeps memory for each stream

    def initialize_state(self, *_: Any) -> None:
        """Creates the moments of all parameters, if there are none."""
        missing = [each for group in self.param_groups for each in group["params"] if not self.state[each]]
        if not missing:
            return
        if not self._on_host:
            for each in missing:
                self.state[each] |= {name: torch.zeros_like(each, dtype=self._dtype) for name in MOMENTS}
            return
        total = sum(each.numel() for each in missing)
        for name in MOMENTS:
            parts = host_memory(total, self._dtype, missing[0].is_cuda).split([each.numel() for each in missing])
            for each, part in zip(missing, parts, strict=True):
                self.state[each][name] = part.view(each.shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have gradients."""
        assert closure is None
        self.initialize_state()
        if self._on_host and not self._lanes and any(x.is_cuda for group in self.param_groups for x in group["params"]):
            self._lanes = [torch.cuda.Stream() for _ in range(2)]
        for lane in self._lanes:
            lane.wait_stream(torch.cuda.current_stream())
        turns = itertools.cycle(self._lanes or [None])
        for group in self.param_groups:
            group["step"] += 1
            for rows in group["params"]:
                if rows.grad is not None:
                    for piece in _pieces(rows, rows.grad, *(self.state[rows][name] for name in MOMENTS)):
                        turn = next(turns)
                        with contextlib.nullcontext() if turn is None else torch.cuda.stream(turn):
                            _update(group, *piece)
        for lane in self._lanes:
            lane.synchronize()  # a checkpoint reads host memory without asking the device


def host_memory(count: int, dtype: torch.dtype, page_locked: bool) -> Tensor:
    """Allocates zeros that processes forked later do not have.

    A fork would copy all page-locked pages, for each worker of the loader. Page-locking goes by pages, and torch's own
    allocator would round each tensor up to a power of two: so moments share one allocation.
    """
    block = _HostBlock(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux's; elsewhere, forked workers merely count the pages as theirs, too
        block.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(AttributeError, OSError):  # a kernel may have none
        block.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    memory = torch.frombuffer(block, dtype=dtype, count=count)
    if page_locked:
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        block.locked = memory.data_ptr()
    return memory


class _HostBlock(mmap.mmap):
    """Memory that is unlocked before it is unmapped.

    Otherwise CUDA takes whatever is mapped at these addresses next for page-locked. PyTorch then copies it to the
    device asynchronously from where it lies, and the process changes it before it is read.
    """

    locked: int | None = None

    def __del__(self) -> None:
        # Runs before mmap's own deallocation; a weak reference's callback would run after it.
        if self.locked is not None and not sys.is_finalizing():  # a process that ends unlocks all
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(self.locked)


def _pieces(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yields pieces of equally shaped tensors, flat, in the same memory."""
    return map(list, zip(*(tensor.detach().view(-1).split(PIECE) for tensor in tensors), strict=True))


def _update(group: dict[str, Any], weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """Computes a step of a piece; moments return to where they are kept."""
    beta1, beta2 = group["betas"]
    wide = [each.to(weights.device, non_blocking=True).float() for each in (first, second)]
    adamw(
        [weights],
        [gradient],
        [wide[0]],
        [wide[1]],
        [],
        [torch.full((), float(group["step"] - 1), device=weights.device)],  # torch.tensor would wait for the device
        foreach=False,
        fused=weights.is_cuda,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for kept, found in zip((first, second), wide, strict=True):
        if kept.data_ptr() != found.data_ptr():
            kept.copy_(found, non_blocking=True)
