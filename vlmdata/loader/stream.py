"""One rank's batches as a stream: which packs, in which order, and a filled buffer as a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vlmdata.batch import HostLayout, PackedBatch, SampleOrigin, Slice
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.assemble import layout_of
from vlmdata.loader.plans import EpochPlans
from vlmdata.loader.request import Part, build_request
from vlmdata.loader.state import Position
from vlmdata.loader.workers import Filled, Job
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.plan import EMPTY_PACK, EpochPlan


@dataclass(frozen=True)
class Tag:
    """Where a batch stands, where the one after it stands, and its pack."""

    position: Position
    following: Position
    pack: int


@dataclass(frozen=True, eq=False)
class RankStream:
    """What one rank loads.

    Attributes:
        plans: The plans by epoch.
        datasets: The datasets by number.
        config: The plan's configuration.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel ranks.
        context_parallel: Slice of every pack; None for whole packs.
        parts: What is read.
    """

    plans: EpochPlans
    datasets: Sequence[VlmDataset]
    config: PlanConfig
    dp_rank: int
    dp_size: int
    context_parallel: Slice | None
    parts: Part

    def jobs(self, start: Position) -> Iterator[Job[Tag]]:
        """This rank's batches from a position on, epoch after epoch, without end."""
        epoch, step, micro_batch = start.epoch, start.step, start.micro_batch
        while True:
            plan = self.plans[epoch]
            while step < plan.num_steps:
                packs = plan.assignment(step, self.dp_size)[:, self.dp_rank].tolist()
                for number in range(micro_batch, len(packs)):
                    following = _following(epoch, step, number, len(packs), plan.num_steps)
                    yield self._job(plan, Tag(Position(epoch, step, number), following, packs[number]))
                step, micro_batch = step + 1, 0
            epoch, step = epoch + 1, 0

    def _job(self, plan: EpochPlan, tag: Tag) -> Job[Tag]:
        request = build_request(
            None if tag.pack == EMPTY_PACK else plan.pack(tag.pack),
            self.datasets,
            empty_tokens=self.config.capacity if self.config.pad_to_capacity else self.config.alignment,
            parts=self.parts,
            pad_id=self.datasets[0].manifest.tokenizer.pad,
            cp_rank=self.context_parallel.rank if self.context_parallel else None,
            cp_size=self.context_parallel.size if self.context_parallel else 1,
        )
        return Job(request, tag)

    def batch_of(self, filled: Filled[Tag]) -> PackedBatch:
        """A filled buffer as a batch whose tensors look into it."""
        request, tag = filled.job.request, filled.job.tag
        base = filled.lease.array()
        fields = {name: torch.from_numpy(view) for name, view in layout_of(request).views(base).items()}
        bounds = request.cu_seqlens_padded
        samples, images = request.samples, request.images
        origins = (column.tolist() for column in (samples.dataset, samples.shard, samples.row, samples.index))
        return PackedBatch(
            input_ids=fields.get("input_ids"),
            labels=fields.get("labels"),
            loss_mask=fields.get("loss_mask"),
            loss_weights=fields.get("loss_weights"),
            position_ids=fields["position_ids"],
            padding_mask=fields["padding_mask"],
            cu_seqlens=torch.from_numpy(request.cu_seqlens.astype(np.int32)),
            cu_seqlens_padded=torch.from_numpy(bounds.astype(np.int32)),
            max_seqlen=int((bounds[1:] - bounds[:-1]).max(initial=0)),
            total_tokens=request.total_tokens,
            true_tokens=int(request.cu_seqlens[-1]),
            image_grid_thw=torch.from_numpy(images.grids),
            image_starts=torch.from_numpy(images.starts),
            image_indices=torch.from_numpy(request.held),
            patches=fields.get("patches"),
            sample_keys=samples.keys,
            origins=tuple(map(SampleOrigin, *origins)),
            epoch=tag.position.epoch,
            step=tag.position.step,
            micro_batch=tag.position.micro_batch,
            pack=tag.pack,
            context_parallel=self.context_parallel,
            host=HostLayout(request.cu_seqlens, bounds, images.grids, images.starts, request.held),
            family=self.datasets[0].family,
        )


def _following(epoch: int, step: int, micro_batch: int, micro_batches: int, steps: int) -> Position:
    if micro_batch + 1 < micro_batches:
        return Position(epoch, step, micro_batch + 1)
    return Position(epoch, step + 1) if step + 1 < steps else Position(epoch + 1)
