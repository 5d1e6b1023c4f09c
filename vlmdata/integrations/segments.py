"""Where the samples of a packed row begin and end, for the layers that must keep them apart."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Never, Self

import torch


@dataclass(frozen=True, eq=False)
class Segments:
    """The boundaries of a packed row.

    Linear-attention layers get it in the place of their attention mask. A layer that does not know it fails, instead
    of carrying its state from sample to sample: see :meth:`__getitem__`.
    """

    lengths: tuple[int, ...]  # tokens of each segment
    #: int32 (segments + 1,), start of each segment, and the end of the last, on the device of the row.
    cu_seqlens: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor) -> Self | None:
        """Finds the segments of a row as transformers does for its attention mask: positions in them rise by one.

        Args:
            positions: int64 (T,), from 0 in each segment.

        Returns:
            None if the row is a single segment.
        """
        starts = (positions.diff() != 1).nonzero().flatten() + 1
        bounds = [0, *starts.tolist(), len(positions)]  # waits for the device once per forward pass
        if len(bounds) == 2:
            return None
        lengths = tuple(end - start for start, end in pairwise(bounds))
        return cls(lengths, torch.tensor(bounds, dtype=torch.int32).to(positions.device))

    def apart(self, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lays the segments out with a gap after each.

        Args:
            gap: Length of each gap in tokens.

        Returns:
            int64 (T,), the new place of each token, and int64 (segments + 1,), the new boundaries; a gap belongs to
            the segment before it.
        """
        bounds = self.cu_seqlens.long()
        shifts = gap * torch.arange(len(bounds), device=bounds.device)
        total = sum(self.lengths)
        by_token = shifts[:-1].repeat_interleave(bounds.diff(), output_size=total)
        return torch.arange(total, device=bounds.device) + by_token, bounds + shifts

    def __getitem__(self, key: Any) -> Never:
        """Raises: transformers' own code takes a slice of what it believes to be a mask."""
        raise RuntimeError(
            "A linear-attention layer got a pack, but is not prepared for packs. If gradient checkpointing is on, call "
            "backward() before `with packed(model)` ends, because it computes layers again."
        )
