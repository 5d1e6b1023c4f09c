"""One optimizer step over packed batches, whose loss does not depend on packing or layout.

The loss is sum(weight x loss) / sum(weight) over all targets of the step, in every micro-batch, data-parallel and
context-parallel rank: each micro-batch gives its sum, megatron-core adds gradients up, and they are divided once by the
sum of all weights (:func:`model.training.optimizer.finalize_gradients`). Targets weigh 1 unless the data differs.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from model.flops import StepFlops
from model.training.data import RankPlace
from model.training.optimizer import Learner, TargetWeights, finalize_gradients, unwrapped
from vlmdata import PackedBatch


@dataclass(frozen=True)
class StepResult:
    """What a step did, over all ranks.

    Attributes:
        loss: Mean cross-entropy over targets by their weights, in nats.
        extra_losses: Means of the losses beside it: ``mtp_loss``, ``moe_aux_loss``.
        grad_norm: Norm of the gradient before clipping.
        targets: Targets trained on.
        tokens: True tokens.
        slots: Tokens there was room for: packs x capacity.
        images: Images.
        patches: Vision patches.
        flops: Model FLOP, forward and backward (:mod:`model.flops`).
        seconds: Wall time.
        data_wait: Longest wait of a rank for its batches, in seconds.
        memory: Peak bytes of device memory since the start, of the rank with the most; 0 on a CPU.
        interrupted: Whether any rank was asked to stop.
        not_finite: Which of the losses and the gradient norm are infinite or no number; on all ranks alike.
        batches: What this rank trained on.
    """

    loss: float
    extra_losses: dict[str, float]
    grad_norm: float
    targets: int
    tokens: int
    slots: int
    images: int
    patches: int
    flops: float
    seconds: float
    data_wait: float
    memory: int
    interrupted: bool
    not_finite: tuple[str, ...]
    batches: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class MicroBatch:
    """A pack that a rank trained on.

    Attributes:
        epoch: Epoch of the data.
        step: Step in that epoch, from 0.
        sample_keys: Samples of the whole pack.
        finite: Whether this rank's part of its loss is a finite number; None on ranks that don't see the loss.
    """

    epoch: int
    step: int
    sample_keys: tuple[str, ...]
    finite: bool | None


def digest(batches: Sequence[MicroBatch]) -> str:
    """Twelve hex digits of the samples, in any order."""
    keys = sorted(key for batch in batches for key in batch.sample_keys)
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]


class _Counted:
    """Batches of one step, counted as they pass."""

    def __init__(self, batches: Iterator[PackedBatch], flops: StepFlops):
        self._batches, self._flops = batches, flops
        self._origins: list[tuple[int, int, tuple[str, ...]]] = []
        self.weights = TargetWeights()
        self.tokens = self.images = self.patches = 0
        self.flops = self.wait = 0.0

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        begun = time.perf_counter()
        batch = next(self._batches)
        self.wait += time.perf_counter() - begun
        lengths = np.diff(batch.host.cu_seqlens)
        patches = batch.host.image_grid_thw.prod(axis=1)
        self.weights.add(batch)
        self.tokens += batch.true_tokens
        self.images += len(patches)
        self.patches += int(patches.sum())
        self.flops += self._flops.of(lengths, patches)
        self._origins.append((batch.epoch, batch.step, batch.sample_keys))
        return batch

    def made(self, losses: list[float] | None) -> tuple[MicroBatch, ...]:
        """What has passed, with this rank's losses by micro-batch if it has any."""
        finite = [None if losses is None else math.isfinite(losses[i]) for i in range(len(self._origins))]
        return tuple(MicroBatch(*each, of) for each, of in zip(self._origins, finite, strict=True))


class Stepper:
    """Runs optimizer steps.

    Args:
        learner: Model, optimizer and schedule.
        place: This process.
        micro_batches: Packs of this rank in a step.
        capacity: Tokens of a pack, as pipeline stages exchange them.
        flops: The FLOP formula of the model.
        device: Where sums over ranks are made.
        stop_requested: Whether this process was asked to stop: looked at when a step is made, and told to all ranks.
    """

    def __init__(
        self,
        learner: Learner,
        place: RankPlace,
        micro_batches: int,
        capacity: int,
        flops: StepFlops,
        device: torch.device,
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        self._learner, self._place, self._flops, self._device = learner, place, flops, device
        self._stop_requested = stop_requested
        self._micro_batches, self._capacity = micro_batches, capacity
        self._forward_backward = get_forward_backward_func()

    def __call__(self, batches: Iterator[PackedBatch]) -> StepResult:
        """Trains on the next packs.

        Args:
            batches: At least as many as this rank has in a step.
        """
        begun = time.perf_counter()
        learner, counted = self._learner, _Counted(batches, self._flops)
        for chunk in learner.model:
            chunk.zero_grad_buffer()
        learner.optimizer.zero_grad()
        config = unwrapped(learner.model[0]).config
        config.finalize_model_grads_func = partial(finalize_gradients, counted.weights)
        found = self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=counted,
            model=learner.model,
            num_microbatches=self._micro_batches,
            seq_length=self._capacity,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = learner.optimizer.step()
        learner.schedule.step(increment=1)
        return self._result(found, counted, float(grad_norm), begun)

    def _result(self, found: list[dict[str, Any]], counted: _Counted, grad_norm: float, begun: float) -> StepResult:
        """Sums over ranks in one message; maxima in another."""
        speaks = self._place.speaks
        whole = speaks and self._place.cp_rank == 0
        losses = torch.stack([each["loss"] for each in found]) if speaks else None
        sums = [0.0, 0.0, 0.0] if losses is None else losses.sum(0).tolist()
        slots = self._micro_batches * self._capacity
        counts = (counted.tokens, slots, counted.images, counted.patches, counted.flops)
        total = torch.tensor([*sums, *(counts if whole else [0.0] * 5)], dtype=torch.float64, device=self._device)
        own = [counted.wait, peak_memory(self._device), not math.isfinite(grad_norm), self._stop_requested()]
        most = torch.tensor(own, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        loss, weight, targets, tokens, slots, images, patches, flops = total.tolist()
        wait, memory, overflow, stop = most.tolist()
        model = unwrapped(self._learner.model[0])
        extra_losses = model.metrics.pop(model.metric_names, device=self._device)
        odd = [name for name, value in {"loss": loss, **extra_losses}.items() if not math.isfinite(value)]
        return StepResult(
            loss=loss / (weight or 1.0),
            extra_losses=extra_losses,
            grad_norm=grad_norm,
            targets=int(targets),
            tokens=int(tokens),
            slots=int(slots),
            images=int(images),
            patches=int(patches),
            flops=flops + self._flops.per_target * targets,
            seconds=time.perf_counter() - begun,
            data_wait=wait,
            memory=int(memory),
            interrupted=bool(stop),
            not_finite=(*odd, "grad_norm") if overflow else tuple(odd),
            batches=counted.made(None if losses is None else losses[:, 0].tolist()),
        )


def peak_memory(device: torch.device) -> int:
    """Peak bytes allocated on a device since the start; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def forward_step(batches: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """What megatron-core's schedules call for each micro-batch, in training and in evaluation."""
    batch = next(batches)
    return model(batch), partial(_loss, batch)


def _loss(batch: PackedBatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum over this rank's targets, their number, and for the log the sum, their weight and their number.

    Args:
        batch: The batch, with ``loss_mask`` and ``loss_weights`` (1, t).
        losses: float32 (1, t), cross-entropy of every token times its weight, 0 off target.
    """
    assert batch.loss_mask is not None
    assert batch.loss_weights is not None
    total, weight, targets = losses.sum(), batch.loss_weights.sum(), batch.loss_mask.sum()
    return total, targets.to(torch.int), {"loss": torch.stack([total.detach(), weight, targets])}
