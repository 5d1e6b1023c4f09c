"""Layers with a sliding window in a pack: windows within samples, and images whose tokens see each other.

A token of such a layer sees itself and the ``window - 1`` tokens before it in its sample. In models that have images
see each other in both directions, a token of an image also sees the later tokens of its image.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch

from vlmdata.batch import PackedBatch

#: [begin, end) of tokens of a pack.
type Span = tuple[int, int]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor from the host to a device, without waiting for the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def image_spans(batch: PackedBatch) -> list[Span]:
    """Returns the tokens of each image of a pack, ascending."""
    host = batch.host
    counts = batch.family.token_counts(host.image_grid_thw)
    return [(start, start + count) for start, count in zip(host.image_starts.tolist(), counts.tolist(), strict=True)]


def spans_of_tokens(marked: torch.Tensor) -> list[Span]:
    """Returns the runs of marked tokens. It waits for the device of a tensor that is not on the host.

    Args:
        marked: bool (T,).
    """
    edges = np.diff(marked.cpu().numpy().astype(np.int8), prepend=0, append=0).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def runs_within(spans: Iterable[Span], bounds: Sequence[int]) -> tuple[Span, ...]:
    """Returns the runs of images' tokens that see each other.

    As in transformers, images with no other token between them are one run. A run ends with its segment.

    Args:
        spans: Tokens of each image, ascending.
        bounds: Start of each segment, and the end of the last.
    """
    joined: list[list[int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    return tuple(
        (max(begin, start), min(end, stop))
        for begin, end in joined
        for start, stop in pairwise(bounds)
        if max(begin, start) < min(end, stop)
    )


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """The tokens of images as queries, with copies of all keys that they see, for kernels of sequences of any lengths.

    The last query and the last key of a run are the same token, so a window counts from the same end for both.
    """

    queries: torch.Tensor  # int64 (Q,), tokens
    keys: torch.Tensor  # int64 (K,), tokens; those before an image may also be before another
    query_bounds: torch.Tensor  # int32 (runs + 1,)
    key_bounds: torch.Tensor  # int32 (runs + 1,)
    longest_query: int
    longest_key: int


@dataclass(frozen=True, eq=False)
class SlidingWindows:
    """What the layers with a window of one size need of a pack. It is made once per forward pass.

    Attributes:
        size: Tokens that a token sees, itself included.
        lengths: Tokens of each segment.
        runs: Runs of tokens that see each other in both directions, ascending, each within a segment.
        device: Where tensors go.
    """

    size: int
    lengths: tuple[int, ...]
    runs: tuple[Span, ...]
    device: torch.device

    @property
    def left(self) -> int:
        """Tokens that a token sees before itself; -1 if no segment is longer than the window."""
        return self.size - 1 if max(self.lengths) > self.size else -1

    @cached_property
    def masks(self) -> list[torch.Tensor | None]:
        """Which keys each query sees: bool (1, 1, length, length) per segment; None if that is plainly causal."""
        found: list[torch.Tensor | None] = []
        for start, stop in pairwise([0, *accumulate(self.lengths)]):
            own = [(begin - start, end - start) for begin, end in self.runs if start <= begin < stop]
            found.append(self._mask(stop - start, own) if own or stop - start > self.size else None)
        return found

    def _mask(self, length: int, runs: Sequence[Span]) -> torch.Tensor:
        run = np.full(length, -1, np.int32)  # number of the run of each token
        for number, (begin, end) in enumerate(runs):
            run[begin:end] = number
        numbers, tokens = to_device(torch.from_numpy(run), self.device), torch.arange(length, device=self.device)
        query, key = tokens[:, None], tokens[None]
        together = (numbers[:, None] == numbers[None]) & (numbers[:, None] >= 0)
        return (((key <= query) | together) & (key > query - self.size))[None, None]

    @cached_property
    def seen_keys(self) -> SeenKeys | None:
        """The tokens of runs with what they see; None if there are no runs."""
        if not self.runs:
            return None
        starts = [0, *accumulate(self.lengths)]
        keys = [(max(starts[bisect(starts, begin) - 1], begin - self.size + 1), end) for begin, end in self.runs]
        counts = [[end - begin for begin, end in spans] for spans in (self.runs, keys)]
        return SeenKeys(
            queries=self._tokens_of(self.runs),
            keys=self._tokens_of(keys),
            query_bounds=self._bounds_of(counts[0]),
            key_bounds=self._bounds_of(counts[1]),
            longest_query=max(counts[0]),
            longest_key=max(counts[1]),
        )

    def _tokens_of(self, spans: Iterable[Span]) -> torch.Tensor:
        return to_device(torch.from_numpy(np.concatenate([np.arange(*span) for span in spans])), self.device)

    def _bounds_of(self, counts: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), self.device)
