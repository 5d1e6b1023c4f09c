"""One rank's batches as a stream of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlmdata.context_parallel import Slice
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import BatchPart, Pixels
from vlmdata.loader.request.plans import EpochPlans
from vlmdata.loader.request.request import IntArray, PackRequest, build_request
from vlmdata.loader.state import Position
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.image_owners import step_owners
from vlmdata.packing.plan.epoch import EMPTY_PACK, EpochPlan


@dataclass(frozen=True, eq=False)
class PackImages:
    """Boundaries and images of a pack, and who encodes the images.

    Attributes:
        cu_seqlens: int64 (segments + 1,), running sum of true lengths.
        cu_seqlens_padded: int64 (segments + 1,), start of each segment.
        image_grid_thw: int64 (N, 3), patches per image along t, h, w.
        image_starts: int64 (N,), first token of each image in the pack.
        owners: int64 (N,), data-parallel rank of the vision tower that encodes each image.
    """

    cu_seqlens: IntArray
    cu_seqlens_padded: IntArray
    image_grid_thw: IntArray
    image_starts: IntArray
    owners: IntArray


@dataclass(frozen=True, eq=False)
class RankStream:
    """The batches of one rank.

    Attributes:
        plans: The plans by epoch.
        datasets: The datasets by number.
        config: The plan's configuration.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel size.
        context_parallel: Slice of every pack; None for whole packs.
        parts: Parts to read.
        pixels: Dtype of the patches in a batch.
        vision_ranks: Data-parallel ranks of a vision tower on processes of its own; 0 for none.
        vision_rank: Rank of that tower: the stream has the packs of all data-parallel ranks, each as a micro-batch of
            its own, with the images of this rank. None for the packs of ``dp_rank``.
    """

    plans: EpochPlans | Mapping[int, EpochPlan]
    datasets: Sequence[VlmDataset]
    config: PlanConfig
    dp_rank: int
    dp_size: int
    context_parallel: Slice | None
    parts: frozenset[BatchPart]
    pixels: Pixels
    vision_ranks: int = 0
    vision_rank: int | None = None

    def requests(self, start: Position) -> Iterator[PackRequest]:
        """Yields this rank's requests from a position on, epoch after epoch, endlessly."""
        epoch, step, micro_batch = start.epoch, start.step, start.micro_batch
        while True:
            plan = self.plans[epoch]
            while step < plan.num_steps:
                if self.vision_rank is None:
                    packs = plan.assignment(step, self.dp_size)[:, self.dp_rank].tolist()
                    for number in range(micro_batch, len(packs)):
                        yield self._request(plan, packs, Position(epoch, step, number))
                else:
                    yield from self._of_tower(plan, epoch, step, self.vision_rank)[micro_batch:]
                step, micro_batch = step + 1, 0
            epoch, step = epoch + 1, 0

    def request(self, position: Position, packs: Sequence[int]) -> PackRequest:
        """Returns the request at a position.

        Args:
            position: The position.
            packs: The packs of this rank in that step, one per micro-batch.
        """
        return self._request(self.plans[position.epoch], packs, position)

    def images(self, epoch: int, step: int) -> tuple[tuple[PackImages, ...], ...]:
        """Returns the boundaries and images of all packs of a step, first by micro-batch, then by data-parallel rank.

        Reads the index only.

        Raises:
            IndexError: If the epoch has no such step.
        """
        requests = self._all_of(self.plans[epoch], epoch, step)
        return tuple(
            tuple(
                PackImages(r.cu_seqlens, r.cu_seqlens_padded, r.images.grids, r.images.starts, owners)
                for r, owners in zip(packs, of_packs, strict=True)
            )
            for packs, of_packs in zip(requests, self._owners(requests), strict=True)
        )

    def _of_tower(self, plan: EpochPlan, epoch: int, step: int, rank: int) -> list[PackRequest]:
        """Returns a step's requests of a rank of the tower."""
        requests = self._all_of(plan, epoch, step)
        return [
            request.of(self.parts, None, np.flatnonzero(owners == rank))
            for packs, of_packs in zip(requests, self._owners(requests), strict=True)
            for request, owners in zip(packs, of_packs, strict=True)
        ]

    def _all_of(self, plan: EpochPlan, epoch: int, step: int) -> list[list[PackRequest]]:
        """Returns the requests of all data-parallel ranks in a step, by micro-batch; positions count packs."""
        assigned = plan.assignment(step, self.dp_size)
        packs = assigned.ravel().tolist()
        made = [self._request(plan, packs, Position(epoch, step, number)) for number in range(len(packs))]
        return [made[start : start + self.dp_size] for start in range(0, len(made), self.dp_size)]

    def _owners(self, requests: list[list[PackRequest]]) -> tuple[tuple[IntArray, ...], ...]:
        return step_owners([[each.images.grids for each in packs] for packs in requests], max(self.vision_ranks, 1))

    def _request(self, plan: EpochPlan, packs: Sequence[int], position: Position) -> PackRequest:
        epoch, step, number = position.epoch, position.step, position.micro_batch
        return build_request(
            None if packs[number] == EMPTY_PACK else plan.pack(packs[number]),
            self.datasets,
            number=packs[number],
            position=position,
            following=_following(epoch, step, number, len(packs), plan.num_steps),
            empty_tokens=self.config.capacity if self.config.pad_to_capacity else self.config.alignment,
            parts=self.parts,
            pixels=self.pixels,
            context_parallel=self.context_parallel,
        )


def _following(epoch: int, step: int, micro_batch: int, micro_batches: int, steps: int) -> Position:
    if micro_batch + 1 < micro_batches:
        return Position(epoch, step, micro_batch + 1)
    return Position(epoch, step + 1) if step + 1 < steps else Position(epoch + 1)
