"""Where the samples of a packed row begin and end, for the layers that must keep them apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Never, Self

import torch

from vlmdata.batch import PackedBatch
from vlmdata.integrations.windows import SlidingWindows, Span, to_device

#: The keyword by which a decoder's layers get the segments of a pack.
SEGMENTS = "vlmdata_segments"
#: The pack of the running ``packed_forward``: the host knows its boundaries and grids.
PACK: ContextVar[PackedBatch | None] = ContextVar("PACK", default=None)
#: What a layer says that gets segments without being prepared for them.
LATE = (
    "A layer got a pack, but is not prepared for packs. If gradient checkpointing is on, call backward() before "
    "`with packed(model)` ends, because it computes layers again."
)


class SegmentsMask(torch.Tensor):
    """Stands where an attention mask would, so that attention that knows no segments fails, instead of mixing them.

    Empty, with four dimensions: transformers hands such a tensor to the layers as it is.
    """

    @classmethod
    def make(cls, device: torch.device) -> Self:
        """Returns a mask: bool (1, 1, 0, 0)."""
        return torch.zeros(1, 1, 0, 0, dtype=torch.bool, device=device).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises if it is used as a mask."""
        if func in (torch.nn.functional.scaled_dot_product_attention, torch.Tensor.add, torch.Tensor.__add__):
            raise RuntimeError(LATE)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class Segments:
    """The boundaries of a packed row.

    Linear-attention layers get it in the place of their attention mask. A layer that does not know it fails, instead
    of carrying its state from sample to sample: see :meth:`__getitem__`.
    """

    lengths: tuple[int, ...]  # tokens of each segment
    #: int32 (segments + 1,), start of each segment, and the end of the last, on the device of the row.
    cu_seqlens: torch.Tensor
    #: Runs of images' tokens that see each other in both directions, in layers with a sliding window.
    runs: tuple[Span, ...] = ()
    _windows: dict[int, SlidingWindows] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, positions: torch.Tensor) -> Self | None:
        """Finds the segments of a row as transformers does for its attention mask: positions in them rise by one.

        Args:
            positions: int64 (T,), from 0 in each segment.

        Returns:
            None if the row is a single segment.
        """
        starts = (positions.diff() != 1).nonzero().flatten() + 1
        # To read them waits for the device, once per forward pass.
        return cls.of_bounds([0, *starts.tolist(), len(positions)], positions.device)

    @classmethod
    def of_bounds(cls, bounds: Sequence[int], device: torch.device, *, least: int = 2) -> Self | None:
        """Makes the segments of boundaries that the host knows: nothing waits for the device.

        Args:
            bounds: Start of each segment, and the end of the last. Empty segments are left out.
            device: Where the boundaries go.
            least: Segments of a pack; a row with fewer is computed by transformers' own attention.

        Returns:
            None if there are fewer segments.
        """
        bounds = [bounds[0], *(end for start, end in pairwise(bounds) if end > start)]
        if len(bounds) <= least:
            return None
        lengths = tuple(end - start for start, end in pairwise(bounds))
        return cls(lengths, to_device(torch.tensor(bounds, dtype=torch.int32), device))

    def with_runs(self, runs: tuple[Span, ...]) -> Self:
        """The same segments with runs of images' tokens."""
        return replace(self, runs=runs, _windows={})

    def windows(self, size: int | None) -> SlidingWindows | None:
        """What layers with a sliding window of a size need: the same object each time; None without a window."""
        if size is None:
            return None
        if size not in self._windows:
            self._windows[size] = SlidingWindows(size, self.lengths, self.runs, self.cu_seqlens.device)
        return self._windows[size]

    @cached_property
    def long(self) -> torch.Tensor:
        """``cu_seqlens`` in int64. The same tensor each time: kernels prepare themselves once for it."""
        return self.cu_seqlens.long()

    @cached_property
    def on_host(self) -> torch.Tensor:
        """:attr:`long` on the CPU."""
        return torch.tensor([0, *accumulate(self.lengths)])

    def apart(self, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lays the segments out with a gap after each.

        Args:
            gap: Length of each gap in tokens.

        Returns:
            int64 (T,), the new place of each token, and int64 (segments + 1,), the new boundaries; a gap belongs to
            the segment before it.
        """
        bounds = self.long
        shifts = gap * torch.arange(len(bounds), device=bounds.device)
        total = sum(self.lengths)
        by_token = shifts[:-1].repeat_interleave(bounds.diff(), output_size=total)
        return torch.arange(total, device=bounds.device) + by_token, bounds + shifts

    def __getitem__(self, key: Any) -> Never:
        """Raises: transformers' own code takes a slice of what it believes to be a mask."""
        raise RuntimeError(LATE)
