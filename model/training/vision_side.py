"""Steps with the vision tower on ranks of its own: both sides' parts of forward and backward passes.

The tower encodes up to ``pipeline stages + parallel.vision_ahead`` micro-batches before it waits for the gradient of
the first one. Then it computes a backward pass and a forward pass in turn. The language model runs megatron-core's
schedule; its first stage receives rows where its forward pass needs them, and returns gradients where its backward
pass makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmdata import PackedBatch, StreamingLoader
from vlmdata.loader.request.pack_request import PackImages
from vlmdata.model.architecture import Architecture
from vlmdata.model.network.patch_geometry import Grid
from vlmdata.model.parallel.packed import IntArray
from vlmdata.model.parallel.row_exchange import RowFormat, RowReceiver, RowSender
from vlmdata.model.parallel.separation import Separation, separation
from vlmdata.model.parallel.vision_rows import MicroBatchRows
from vlmdata.model.training.checkpoints.run_state import predicts
from vlmdata.model.training.optimizer.learner import Learner, unwrapped
from vlmdata.model.training.processes.agreement import gathered, together
from vlmdata.model.training.settings.config import ConfigError, TrainConfig

type StepImages = Sequence[Sequence[PackImages]]


class VisionSide:
    """This rank's part of what both sides do together."""

    def __init__(
        self,
        ranks: Separation,
        learner: Learner,
        config: TrainConfig,
        architecture: Architecture,
        device: torch.device,
        dtype: torch.dtype,
    ):
        vision = architecture.vision
        self._ranks, self._learner, self._merge_unit = ranks, learner, vision.merge_unit
        self._following = predicts(config.model.mtp, architecture)
        self._trained = config.trains_tower
        ahead = config.parallel.vision_ahead
        self._ahead = ranks.pipeline + ahead
        model = unwrapped(learner.model[0])
        rows = RowFormat((1 + len(vision.deepstack_layers)) * vision.out_hidden_size, dtype, device)
        self._sender = RowSender(ranks, rows, model.vision.tp_group) if ranks.holds_tower else None
        if ranks.receives_rows:
            model.receiver = RowReceiver(ranks, rows, model.pg_collection.tp, ahead)
        self._receiver: RowReceiver | None = getattr(model, "receiver", None)
        self._rows = rows

    def waited(self) -> tuple[float, float]:
        """Returns the seconds since the last call that a rank of the tower and one of the language model waited.

        A rank of the tower waits for gradients, or with a frozen tower until its rows are received; a rank of the
        language model waits for rows. The other value is 0.
        """
        vision = 0.0 if self._sender is None else self._sender.waiting.take()
        return vision, 0.0 if self._receiver is None else self._receiver.waiting.take()

    def run(
        self, images: StepImages, batches: Iterator[PackedBatch], language: Callable[[], Any], forward_only: bool
    ) -> Any:
        """Computes the forward passes of some micro-batches, and the backward passes unless ``forward_only``.

        Args:
            images: Packs, first by micro-batch, then by data-parallel rank.
            batches: On a rank of the tower their packs, in this order, with the pixels that this rank encodes.
            language: Runs the language model's schedule.
            forward_only: Whether to omit backward passes.

        Returns:
            What ``language`` returns; an empty list on ranks of the tower.
        """
        trained = self._trained and not forward_only
        micro_batches = [
            MicroBatchRows.of(packs, self._ranks, self._merge_unit, self._following)
            for packs in (images if self._sender or self._receiver else ())
        ]
        if self._sender is not None:
            self._encode_all(self._sender, micro_batches, batches, trained)
            if not forward_only:
                model = self._learner.model
                unwrapped(model[0]).config.finalize_model_grads_func(model, torch.zeros((), device=self._rows.device))
            return []
        if self._receiver is None:
            return language()
        self._receiver.begin(micro_batches, trained)
        found = language()
        self._receiver.finish()
        return found

    def _encode_all(
        self,
        sender: RowSender,
        micro_batches: Sequence[MicroBatchRows],
        batches: Iterator[PackedBatch],
        trained: bool,
    ) -> None:
        """Runs the schedule of the tower."""
        made: dict[int, Tensor] = {}

        def forward(number: int) -> None:
            if number < len(micro_batches):
                made[number] = self._encode([next(batches) for _ in range(self._ranks.data)])
                sender.send(number, micro_batches[number], made[number])

        for number in range(self._ahead):
            forward(number)
        for number in range(len(micro_batches)):
            rows = made.pop(number)
            if trained:
                gradient = sender.gradient(number, len(rows))
                if rows.requires_grad:  # not without images and videos
                    torch.autograd.backward(rows, gradient)
            else:
                sender.wait(number)
            forward(number + self._ahead)

    def _encode(self, packs: Sequence[PackedBatch]) -> Tensor:
        """Returns the rows of this rank's images in the packs of a micro-batch, then those of its videos, (m, W)."""
        hosts = [pack.host for pack in packs]
        images = _grids([each.image_grids_held for each in hosts])
        videos = _grids([each.video_grids_held for each in hosts])
        if not images and not videos:
            return self._rows.empty(0)
        patches = _joined([pack.patches for pack in packs])
        rows: Tensor = self._learner.model[0](patches, images, _joined([pack.video_patches for pack in packs]), videos)
        return rows


def _grids(of_packs: Sequence[IntArray]) -> list[Grid]:
    """Returns the grids of some items of each pack, one pack after another."""
    return [(t, h, w) for grids in of_packs for t, h, w in grids.tolist()]


def _joined(of_packs: Sequence[Tensor | None]) -> Tensor | None:
    """Joins the patches of packs, one after another; None if no pack has any tensor."""
    there = [each for each in of_packs if each is not None]
    filled = [each for each in there if len(each)]
    return torch.cat(filled) if len(filled) > 1 else next(iter([*filled, *there]), None)


def vision_side(
    learner: Learner,
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    loaders: Mapping[str, StreamingLoader],
) -> VisionSide | None:
    """Returns this rank's part of the work of both sides; None if the same ranks hold both. A collective.

    Raises:
        ConfigError: If ranks plan different packs, so that one would wait for rows that another does not send.
    """
    ranks = separation()
    if ranks is None:
        return None
    with together():
        own = [
            (name, tuple(each for _, each in loader.fingerprints), loader.plan_config.fingerprint())
            for name, loader in loaders.items()
        ]
        for plans in zip(*gathered(own), strict=True):
            name = plans[0][0]
            different = [rank for rank, plan in enumerate(plans) if plan[1:] != plans[0][1:]]
            if different:
                raise ConfigError(
                    f"ranks {different[:8]} have other {name} than rank 0, or plan other packs of it: with "
                    "parallel.vision_gpus all ranks must see the same datasets"
                )
    names = gathered(unwrapped(learner.model[0]).metric_names)
    if ranks.holds_tower:
        unwrapped(learner.model[0]).metric_names = names[-1]
    return VisionSide(ranks, learner, config, architecture, device, dtype)
