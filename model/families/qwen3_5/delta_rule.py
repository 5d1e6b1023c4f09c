"""The gated delta rule and the convolution before it in plain torch, over the segments of a pack.

Mirrors transformers' ``torch_chunk_gated_delta_rule`` and ``causal_conv1d_fn``.

Shapes: tokens T, heads h, key width k, value width v, channels c, chunks m of n tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens of a chunk, and of one where keys have fewer columns than that: the systems within chunks then take most of
#: the time, not the states between them. On a CPU, heads of 16 take half the time so, and heads of 128 a third more.
CHUNK, SHORT_CHUNK = 64, 32


def l2_normalised(x: Tensor) -> Tensor:
    """Scales the last axis to unit length, in at least float32: transformers' ``l2norm``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def causal_convolution(x: Tensor, taps: Tensor, bounds: Sequence[int]) -> Tensor:
    """Depthwise causal convolution within segments: ``causal_conv1d_fn`` on each segment.

    Args:
        x: (T, c).
        taps: (c, K), the last tap applies to the token itself.
        bounds: Segment boundaries, from 0 to T.

    Returns:
        (T, c), without activation.
    """
    offset = _offsets(bounds, x.device)
    width = taps.shape[1]
    out = x * taps[:, -1]
    for back in range(1, width):
        earlier = F.pad(x[:-back], (0, 0, min(back, x.shape[0]), 0)) * (offset >= back)[:, None]
        out = out + earlier * taps[:, width - 1 - back]
    return out


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, bounds: Sequence[int]
) -> Tensor:
    """The gated delta rule over the segments of a pack, chunk by chunk: ``torch_chunk_gated_delta_rule``.

    Per head the state S (k x v) starts at zero in every segment and is updated by ``S <- exp(decay) S``, then
    ``S <- S + beta key (value - key' S)'``; the output is ``query' S / sqrt(k)``. The updates within a chunk are
    solved together as a triangular system (Yang et al. 2024, "Parallelizing linear transformers with the delta
    rule"; with decay: "Gated delta networks", 2025). Only states cross chunks. Segments run in parallel, so the
    sequential part is as long as the longest segment, not the pack.

    Args:
        query: (T, h, k), of unit length.
        key: (T, h, k), of unit length.
        value: (T, h, v).
        decay: (T, h), logarithm of the decay, at most 0.
        beta: (T, h), in 0..1.
        bounds: Segment boundaries, from 0 to T.

    Returns:
        (T, h, v) in value's dtype; computed in at least float32.
    """
    size = SHORT_CHUNK if query.shape[-1] < CHUNK else CHUNK
    slots, chunk_counts = _chunk_slots(bounds, size, query.device)
    wide = torch.promote_types(value.dtype, torch.float32)

    def chunked(x: Tensor) -> Tensor:
        """(T, h, …) to (m, h, n, …), with zeros after the end of a segment in its last chunk."""
        padded = x.new_zeros((sum(chunk_counts) * size, *x.shape[1:]), dtype=wide).index_copy(0, slots, x.to(wide))
        chunks: Tensor = padded.unflatten(0, (-1, size)).transpose(1, 2)
        return chunks

    q, k, v = chunked(query) * query.shape[-1] ** -0.5, chunked(key), chunked(value)
    b, g = chunked(beta).unsqueeze(-1), chunked(decay).cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    pairwise = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    g = g.unsqueeze(-1)
    system = ((k * b) @ k.transpose(-1, -2)) * pairwise
    right = torch.cat([v * b, k * b * g.exp()], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * pairwise
    last = g[..., -1:, :]
    out = _scan(q * g.exp(), k * (last - g).exp(), last.exp(), new_values, reads, within, chunk_counts)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, slots).to(value.dtype)


def _scan(
    queries: Tensor,
    keys: Tensor,
    decays: Tensor,
    new_values: Tensor,
    reads: Tensor,
    within: Tensor,
    chunk_counts: Sequence[int],
) -> Tensor:
    """Carries the states across the chunks of each segment. Arguments are (m, h, …); returns (m, h, n, v)."""
    counts = torch.tensor(chunk_counts, device=queries.device)
    first = counts.cumsum(0) - counts
    longest_first = torch.argsort(counts, descending=True, stable=True)
    first, counts = first[longest_first], counts[longest_first]
    state = queries.new_zeros(len(chunk_counts), queries.shape[1], queries.shape[-1], new_values.shape[-1])
    outs, places = [], []
    for step in range(max(chunk_counts)):
        active = sum(count > step for count in chunk_counts)
        state = state[:active]
        at = first[:active] + step
        updates = new_values[at] - reads[at] @ state
        outs.append(queries[at] @ state + within[at] @ updates)
        places.append(at)
        state = state * decays[at] + keys[at].transpose(-1, -2) @ updates
    order = torch.argsort(torch.cat(places))
    return torch.cat(outs).index_select(0, order)


def _offsets(bounds: Sequence[int], device: torch.device) -> Tensor:
    """Returns the offset of each token in its segment, int64 (T,)."""
    edges = torch.tensor(bounds, device=device)
    lengths = edges.diff()
    return torch.arange(bounds[-1], device=device) - torch.repeat_interleave(edges[:-1], lengths)


def _chunk_slots(bounds: Sequence[int], size: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Returns the slot of each token if segments are padded to whole chunks, and each segment's number of chunks."""
    edges = torch.tensor(bounds, device=device)
    lengths = edges.diff()
    chunks = (lengths + size - 1) // size
    first = (chunks.cumsum(0) - chunks) * size
    slots = _offsets(bounds, device) + torch.repeat_interleave(first, lengths)
    counts = [(stop - start + size - 1) // size for start, stop in itertools.pairwise(bounds)]
    return slots, counts
