"""One rank's batches as a stream of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vlmdata.context_parallel import Slice
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import BatchPart, Pixels
from vlmdata.loader.plans import EpochPlans
from vlmdata.loader.request import PackRequest, build_request
from vlmdata.loader.state import Position
from vlmdata.packing.config import PlanConfig
from vlmdata.packing.plan import EMPTY_PACK, EpochPlan


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
    """

    plans: EpochPlans | Mapping[int, EpochPlan]
    datasets: Sequence[VlmDataset]
    config: PlanConfig
    dp_rank: int
    dp_size: int
    context_parallel: Slice | None
    parts: frozenset[BatchPart]
    pixels: Pixels

    def requests(self, start: Position) -> Iterator[PackRequest]:
        """Yields this rank's requests from a position on, epoch after epoch, endlessly."""
        epoch, step, micro_batch = start.epoch, start.step, start.micro_batch
        while True:
            plan = self.plans[epoch]
            while step < plan.num_steps:
                packs = plan.assignment(step, self.dp_size)[:, self.dp_rank].tolist()
                for number in range(micro_batch, len(packs)):
                    yield self._request(plan, packs, Position(epoch, step, number))
                step, micro_batch = step + 1, 0
            epoch, step = epoch + 1, 0

    def request(self, position: Position, packs: Sequence[int]) -> PackRequest:
        """Returns the request at a position.

        Args:
            position: The position.
            packs: The packs of this rank in that step, one per micro-batch.
        """
        return self._request(self.plans[position.epoch], packs, position)

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
