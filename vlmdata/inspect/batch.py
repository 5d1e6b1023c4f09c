"""One packed batch: its segments, padding and cost, and the share of each context-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.context_parallel import chunk_ranges
from vlmdata.errors import NotFoundError
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.loader.loader import StreamingLoader
from vlmdata.packing.arrays import IntArray
from vlmdata.packing.cost import CostModel
from vlmdata.packing.item_runs import pack_runs
from vlmdata.packing.plan.epoch import EMPTY_PACK
from vlmdata.wording import counted


@dataclass(frozen=True)
class Segment:
    """A sample in a pack, or the padded tail, which has key "" and -1 as dataset, index and source row."""

    key: str
    dataset: int  # number of its dataset
    index: int  # position in the dataset
    source_row: int
    start: int
    stop: int  # one past its last token, padding included
    length: int  # true tokens
    padding: int  # padding tokens after them
    targets: int  # tokens with a label in this segment
    images: int
    patches: int
    cost: int  # in units of 2**20 FLOP
    cost_share: float  # share of the pack's cost


@dataclass(frozen=True)
class BatchImage:
    """An image or a video of a pack."""

    segment: int  # number of its segment
    start: int  # first of its tokens in the pack
    tokens: int
    grid: tuple[int, int, int]  # patches along t, h, w
    patches: int
    ranks: tuple[int, ...]  # context-parallel ranks that encode it: several of a video that is split
    shares: tuple[int, ...]  # patches that each of them encodes


@dataclass(frozen=True)
class RankShare:
    """The share of one context-parallel rank in a pack."""

    rank: int
    ranges: tuple[tuple[int, int], ...]  # token ranges [start, stop) of the pack that it owns, ascending
    tokens: int  # in these ranges
    true_tokens: int  # tokens that are not padding
    targets: int  # tokens with a label
    images: int  # images that the rank encodes
    patches: int  # patches of these images


@dataclass(frozen=True)
class BatchDescription:
    """A packed batch. Units: tokens, patches; the cost is in units of 2**20 FLOP."""

    number: int | None  # among the rank's batches of the epoch, from 0; None if not given
    epoch: int
    step: int
    micro_batch: int
    pack: int  # number within the epoch; -1 for an empty pack
    capacity: int | None  # largest number of tokens in a pack; None if unknown
    total_tokens: int  # padding included
    true_tokens: int
    padding: int
    targets: int  # tokens with a label
    max_seqlen: int  # longest segment, padding included
    cu_seqlens: tuple[int, ...]  # running sum of true lengths
    cu_seqlens_padded: tuple[int, ...]  # start of each segment
    cost: int
    segments: tuple[Segment, ...]  # the samples, and the padded tail if there is one
    images: tuple[BatchImage, ...]
    context_parallel: int  # ranks that share the pack
    ranks: tuple[RankShare, ...]


def describe_batch(
    batch: PackedBatch,
    *,
    cost: CostModel,
    context_parallel: int = 1,
    capacity: int | None = None,
    number: int | None = None,
) -> BatchDescription:
    """Describes a packed batch of a loader.

    Args:
        batch: A whole pack (no context-parallel slice), with labels; pixels are not needed.
        cost: Cost model for the shares of the samples.
        context_parallel: Number of ranks to split the batch over.
        capacity: Capacity of the loader, for the description.
        number: Number of the batch, for the description.

    Raises:
        ValueError: If the batch is a slice or has no labels, or a segment does not divide over the ranks.
    """
    if batch.context_parallel is not None or batch.labels is None:
        raise ValueError("describe_batch needs a whole pack with labels: load it without context_parallel_rank")
    bounds = _numpy(batch.cu_seqlens_padded)
    lengths = np.diff(_numpy(batch.cu_seqlens))
    targets = batch.labels[0].cpu().numpy() != IGNORE_INDEX
    real = ~batch.padding_mask[0].cpu().numpy()
    images = _images(batch, bounds, context_parallel)
    segments = _segments(batch, bounds, lengths, targets, images, cost)
    return BatchDescription(
        number=number,
        epoch=batch.epoch,
        step=batch.step,
        micro_batch=batch.micro_batch,
        pack=batch.pack,
        capacity=capacity,
        total_tokens=batch.total_tokens,
        true_tokens=batch.true_tokens,
        padding=batch.total_tokens - batch.true_tokens,
        targets=int(targets.sum()),
        max_seqlen=batch.max_seqlen,
        cu_seqlens=tuple(batch.cu_seqlens.tolist()),
        cu_seqlens_padded=tuple(bounds.tolist()),
        cost=sum(segment.cost for segment in segments),
        segments=segments,
        images=images,
        context_parallel=context_parallel,
        ranks=tuple(
            _rank_share(rank, context_parallel, bounds, targets, real, images) for rank in range(context_parallel)
        ),
    )


def batch_at(loader: StreamingLoader, number: int, epoch: int = 0) -> PackedBatch:
    """Loads the ``number``-th batch of a loader's rank in an epoch. Moves the loader's position to after it.

    Raises:
        NotFoundError: If the epoch has no such batch for this rank.
    """
    total = num_batches(loader, epoch)
    if not 0 <= number < total:
        has = f"rank {loader.dp_rank} gets {counted(total, 'batch')} in epoch {epoch}"
        raise NotFoundError(f"no batch {number}: {has}, numbered from 0")
    step, micro_batch = divmod(number, loader.plan_config.global_batch // loader.dp_size)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "step": step, "micro_batch": micro_batch})
    return next(iter(loader))


def num_batches(loader: StreamingLoader, epoch: int = 0) -> int:
    """Returns the number of batches per rank in an epoch, including empty ones that complete the last step."""
    return loader.plan(epoch).micro_batches(loader.dp_size)


def _segments(
    batch: PackedBatch,
    bounds: IntArray,
    lengths: IntArray,
    targets: npt.NDArray[np.bool_],
    images: tuple[BatchImage, ...],
    cost: CostModel,
) -> tuple[Segment, ...]:
    count = len(lengths)
    patches, squared, counts = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    for image in images:
        frame = image.grid[1] * image.grid[2]
        counts[image.segment] += 1
        patches[image.segment] += image.patches
        squared[image.segment] += image.grid[0] * frame * frame  # attention is within a frame
    costs = np.zeros(count, np.int64)
    per_segment = np.add.reduceat(targets.astype(np.int64), bounds[:-1])
    if batch.pack != EMPTY_PACK:
        costs = cost.sample_costs(np.diff(bounds), per_segment, patches, squared)
    total = max(int(costs.sum()), 1)
    segments = []
    for i, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        origin = batch.origins[i] if i < batch.num_samples else None
        segments.append(
            Segment(
                key=batch.sample_keys[i] if origin else "",
                dataset=origin.dataset if origin else -1,
                index=origin.index if origin else -1,
                source_row=origin.row if origin else -1,
                start=start,
                stop=stop,
                length=int(lengths[i]),
                padding=stop - start - int(lengths[i]),
                targets=int(per_segment[i]),
                images=int(counts[i]),
                patches=int(patches[i]),
                cost=int(costs[i]),
                cost_share=int(costs[i]) / total,
            )
        )
    return tuple(segments)


def _images(batch: PackedBatch, bounds: IntArray, context_parallel: int) -> tuple[BatchImage, ...]:
    grids, starts = batch.host.items.grids, batch.host.items.starts
    runs = pack_runs(grids, context_parallel)
    first = np.searchsorted(runs.items, np.arange(len(grids) + 1)).tolist()
    owners, shares = runs.owners.tolist(), runs.grids(grids).prod(axis=1).tolist()
    segments = (np.searchsorted(bounds, starts, side="right") - 1).tolist()
    found = []
    columns = zip(grids.tolist(), starts.tolist(), segments, batch.host.items.are_videos.tolist(), strict=True)
    for number, ((t, h, w), start, segment, is_video) in enumerate(columns):
        patches, own = t * h * w, slice(first[number], first[number + 1])
        tokens = int(batch.family.item_tokens(VIDEO if is_video else IMAGE, [(t, h, w)])[0])
        found.append(BatchImage(segment, start, tokens, (t, h, w), patches, tuple(owners[own]), tuple(shares[own])))
    return tuple(found)


def _rank_share(
    rank: int,
    size: int,
    bounds: IntArray,
    targets: npt.NDArray[np.bool_],
    real: npt.NDArray[np.bool_],
    images: tuple[BatchImage, ...],
) -> RankShare:
    ranges = _joined(chunk_ranges(bounds, size, rank).reshape(-1, 2).tolist())
    mine = [share for image in images for of, share in zip(image.ranks, image.shares, strict=True) if of == rank]
    return RankShare(
        rank=rank,
        ranges=ranges,
        tokens=sum(stop - start for start, stop in ranges),
        true_tokens=sum(int(real[start:stop].sum()) for start, stop in ranges),
        targets=sum(int(targets[start:stop].sum()) for start, stop in ranges),
        images=len(mine),
        patches=sum(mine),
    )


def _joined(ranges: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Merges adjacent ranges."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start:
            joined.append((start, stop))
    return tuple(joined)


def _numpy(tensor: torch.Tensor) -> IntArray:
    return tensor.cpu().numpy().astype(np.int64)
