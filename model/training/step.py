"""One optimizer step over packed batches. Its loss does not depend on packing or layout.

The loss is sum(weight x loss) / sum(weight) over all targets of the step, in all micro-batches and data- and
context-parallel ranks. Each micro-batch yields its sum, megatron-core adds the gradients, and they are divided once by
the sum of all weights (:class:`vlmdata.model.training.optimizer.sums_optimizer.SumsOptimizer`). Targets weigh 1 unless
the data differs.
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

from vlmdata import PackedBatch
from vlmdata.model.flops import StepFlops
from vlmdata.model.metrics import named_means
from vlmdata.model.network.quantized import device_of
from vlmdata.model.parallel.packed import to_device
from vlmdata.model.parallel.waiting import DeviceMoment, DeviceValues
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.optimizer.learner import Learner, unwrapped, weight_of_all_ranks
from vlmdata.model.training.processes.garbage import collect_after_micro_batch, collect_after_step
from vlmdata.model.training.vision_side import StepImages, VisionSide


@dataclass(frozen=True)
class StepResult:
    """Result of a step, over all ranks.

    Attributes:
        loss: Weighted mean cross-entropy over targets, in nats.
        extra_losses: Means of additional losses: ``mtp_loss``, ``moe_aux_loss``.
        grad_norm: Norm of the gradient before clipping.
        targets: Number of targets.
        tokens: Number of true tokens.
        slots: Token capacity: packs x capacity.
        images: Number of images.
        videos: Number of videos.
        patches: Number of vision patches.
        flops: Model FLOP, forward and backward (:mod:`vlmdata.model.flops`).
        seconds: From the begin of the step, or the end of the previous step if that is later, to the end of the step.
        data_wait: Longest wait of a rank for its batches, in seconds, while its device had no other step to work on.
        memory: Peak bytes of device memory since the start, the maximum over ranks; 0 on a CPU.
        interrupted: Whether any rank was asked to stop.
        any_masked: Whether any rank masked damaged samples.
        masked: (dataset number, position in it) of the samples that this rank masked.
        not_finite: Which of the losses and the gradient norm are infinite or NaN; the same on all ranks.
        batches: Micro-batches of this rank; on a rank of a separate tower those of the first data-parallel rank.
        vision_flops: Model FLOP of the vision tower.
        vision_memory: ``memory`` over the ranks of a separate vision tower; 0 without.
        vision_wait: Longest wait of a rank of a separate vision tower for gradients, in seconds; None without.
        language_wait: Longest wait of a rank of the language model for the rows of that tower, in seconds.
        memory_retries: Number of times that PyTorch found no device memory, freed some and allocated again, the maximum
            over ranks.
        lr: Learning rate.
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
    any_masked: bool = False
    masked: frozenset[tuple[int, int]] = frozenset()
    vision_flops: float = 0.0
    vision_memory: int = 0
    vision_wait: float | None = None
    language_wait: float | None = None
    memory_retries: int = 0
    lr: float = 0.0
    videos: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """A pack that a rank trained on.

    Attributes:
        epoch: Epoch of the data.
        step: Step in that epoch, from 0.
        sample_keys: Keys of all samples in the pack.
        finite: Whether this rank's part of the loss is finite; None on ranks without the loss.
    """

    epoch: int
    step: int
    sample_keys: tuple[str, ...]
    finite: bool | None


def digest(batches: Sequence[MicroBatch]) -> str:
    """Returns a digest of the samples in 12 hex digits, independent of their order."""
    keys = sorted(key for batch in batches for key in batch.sample_keys)
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]


class _Counted:
    """Iterates over the batches of one step and counts what they hold, for the log, on the host.

    Of each ``every`` batches, it keeps the first's origin. The wait for the first batch counts only if the device is no
    longer ``busy`` when the wait ends.
    """

    def __init__(self, batches: Iterator[PackedBatch], flops: StepFlops, every: int, busy: Callable[[], bool]):
        self._batches, self._flops, self._every, self._busy = batches, flops, every, busy
        self._origins: list[tuple[int, int, tuple[str, ...]]] = []
        self.masked: set[tuple[int, int]] = set()
        self.tokens = self.images = self.videos = self.patches = 0
        self.flops = self.vision_flops = self.wait = 0.0

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        if self._origins:
            collect_after_micro_batch()
        begun = time.perf_counter()
        batch = next(self._batches)
        if self._origins or not self._busy():
            self.wait += time.perf_counter() - begun
        lengths = np.diff(batch.host.cu_seqlens)
        images, videos = batch.host.image_grid_thw, batch.host.video_grid_thw
        # Attention of the tower is within an image, or within a temporal patch of a video.
        spans = np.concatenate([images.prod(axis=1), np.repeat(videos[:, 1] * videos[:, 2], videos[:, 0])])
        of_videos = int(videos.prod(axis=1).sum())
        self.tokens += batch.true_tokens
        self.images += len(images)
        self.videos += len(videos)
        self.patches += int(spans.sum())
        self.flops += self._flops.of(lengths, spans, of_videos)
        self.vision_flops += self._flops.of_vision(spans, of_videos)
        self.masked.update((batch.origins[i].dataset, batch.origins[i].index) for i in batch.masked)
        if batch.micro_batch % self._every == 0:
            self._origins.append((batch.epoch, batch.step, batch.sample_keys))
        return batch

    def made(self, losses: list[float] | None) -> tuple[MicroBatch, ...]:
        """Returns the processed micro-batches, with this rank's losses if it has any."""
        finite = [None if losses is None else math.isfinite(losses[i]) for i in range(len(self._origins))]
        return tuple(MicroBatch(*each, of) for each, of in zip(self._origins, finite, strict=True))


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose work is queued on the device. :meth:`Stepper.finish` waits for its results.

    Attributes:
        counted: Counts of its batches.
        begun: The moment at which the device began it, after the previous step.
        results: Losses of the micro-batches, gradient norm, sums over ranks, additional losses, maxima over ranks.
        lr: Its learning rate.
    """

    counted: _Counted
    begun: DeviceMoment
    results: DeviceValues
    lr: float

    def wait(self) -> None:
        """Waits until the device has finished the step."""
        self.results.ready.wait()


class Stepper:
    """Runs optimizer steps. A step may be launched before the results of the previous one are read.

    The device then has work while the host waits, logs and launches. At 0.8b, the host queues the commands of a forward
    pass no faster than an H200 executes them, so it must begin earlier.

    Args:
        learner: Model, optimizer and schedule.
        place: This process.
        micro_batches: Packs per step on this rank.
        capacity: Tokens per pack, for the exchange between pipeline stages.
        flops: The FLOP formula of the model.
        device: Device for sums over ranks.
        stop_requested: Whether this process was asked to stop; checked in each step and shared with all ranks.
        vision: This rank's part of the work with a separate vision tower; None without.
        images: Returns the packs of the next step, for ``vision``.
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
        vision: VisionSide | None = None,
        images: Callable[[], StepImages] = tuple,
    ):
        self._vision, self._images = vision, images
        self._learner, self._place, self._flops, self._device = learner, place, flops, device
        self._stop_requested = stop_requested
        self._micro_batches, self._capacity = micro_batches, capacity
        self._steps = 0
        self._retries = 0  # of the allocator since the start
        self._launched: DeviceValues | None = None  # results of the step that was launched last

    def __call__(self, batches: Iterator[PackedBatch]) -> StepResult:
        """Trains on the next packs and waits for the results.

        Args:
            batches: At least as many as this rank needs in a step.
        """
        return self.finish(self.launch(batches))

    def launch(self, batches: Iterator[PackedBatch]) -> LaunchedStep:
        """Queues the work of a step on the next packs. On a CPU, the work is done at once.

        Args:
            batches: At least as many as this rank needs in a step.
        """
        begun, lr = DeviceMoment(self._device), self._learner.optimizer.param_groups[0]["lr"]
        learner, every = self._learner, 1 if self._place.vision_rank is None else self._place.dp_size
        counted = _Counted(batches, self._flops, every, self._busy)
        for chunk in learner.model:
            chunk.zero_grad_buffer()
        learner.optimizer.zero_grad()
        images: StepImages = ()
        if self._vision is not None:
            self._vision.waited()  # forgets the waits of an evaluation
            images = self._images()
        losses = run_passes(learner, self._vision, counted, images, self._micro_batches, self._capacity)
        grad_norm = learner.optimizer.step(weight_of_all_ranks(losses[:, 1].sum()))
        learner.schedule.step(increment=1)
        results = self._launched = self._reduce(losses, counted, grad_norm)
        self._steps += 1
        collect_after_step(self._steps)  # the device is still busy
        return LaunchedStep(counted, begun, results, lr)

    def _busy(self) -> bool:
        """Whether the device still works on the step that was launched last."""
        return self._launched is not None and not self._launched.ready.has_come()

    def _reduce(self, losses: torch.Tensor, counted: _Counted, grad_norm: torch.Tensor) -> DeviceValues:
        """Reduces results over ranks, with one message for sums and one for maxima, and copies them to the host."""
        speaks = self._place.speaks
        whole = speaks and self._place.cp_rank == 0
        slots = self._micro_batches * self._capacity
        items = (counted.images, counted.videos, counted.patches)
        counts = (counted.tokens, slots, *items, counted.flops, counted.vision_flops)
        total = to_device(np.array([0.0, 0.0, 0.0, *(counts if whole else [0.0] * len(counts))]), self._device)
        if speaks:
            total[:3] += losses.sum(0)
        memory, retries = device_memory(self._device)
        self._retries, retries = retries, retries - self._retries
        vision_memory = 0 if self._place.vision_rank is None else memory
        most = to_device(
            np.array(
                [counted.wait, memory, vision_memory, retries, self._stop_requested(), bool(counted.masked), 0.0],
                np.float64,
            ),
            self._device,
        )
        most[-1] = ~grad_norm.isfinite().all()
        if self._place.world > 1:
            torch.distributed.all_reduce(total)
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        model = unwrapped(self._learner.model[0])
        means = model.metrics.take(model.metric_names, device=self._device)
        return DeviceValues(losses[:, 0], grad_norm, total, means, most)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Waits for a launched step and returns its results. Steps must be finished in the order of their launch.

        With a separate vision tower, this is a collective: finish a step before you launch the next one.
        """
        counted = launched.counted
        each_loss, (norm,), sums, extra, most = launched.results.get()
        waits = (0.0, 0.0) if self._vision is None else self._longest_waits(self._vision)
        loss, weight, targets, tokens, all_slots, images, videos, patches, flops, vision_flops = sums
        wait, most_memory, vision_memory, retries, stop, any_masked, overflow = most
        names = unwrapped(self._learner.model[0]).metric_names
        extra_losses = named_means(names, extra)
        odd = [name for name, value in {"loss": loss, **extra_losses}.items() if not math.isfinite(value)]
        return StepResult(
            loss=loss / (weight or 1.0),
            extra_losses=extra_losses,
            grad_norm=norm,
            targets=int(targets),
            tokens=int(tokens),
            slots=int(all_slots),
            images=int(images),
            videos=int(videos),
            patches=int(patches),
            flops=flops + self._flops.per_target * targets,
            vision_flops=vision_flops,
            seconds=launched.results.ready.seconds_after(launched.begun),
            data_wait=wait,
            memory=int(most_memory),
            vision_memory=int(vision_memory),
            vision_wait=None if self._vision is None else waits[0],
            language_wait=None if self._vision is None else waits[1],
            memory_retries=int(retries),
            interrupted=bool(stop),
            any_masked=bool(any_masked),
            masked=frozenset(counted.masked),
            not_finite=(*odd, "grad_norm") if overflow else tuple(odd),
            batches=counted.made(each_loss if self._place.speaks else None),
            lr=launched.lr,
        )

    def _longest_waits(self, vision: VisionSide) -> tuple[float, float]:
        """Returns the longest waits in the finished step: of a rank of the tower, and of one of the language model."""
        waits = torch.tensor(vision.waited(), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(waits, op=torch.distributed.ReduceOp.MAX)
        of_tower, of_language = waits.tolist()
        return of_tower, of_language


def device_memory(device: torch.device) -> tuple[int, int]:
    """Returns the peak bytes of tensors on a device and the allocator's retries, since the start; both 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    found = torch.cuda.memory_stats(device)
    return found.get("allocated_bytes.all.peak", 0), found.get("num_alloc_retries", 0)


def run_passes(
    learner: Learner,
    vision: VisionSide | None,
    batches: Iterator[PackedBatch],
    images: StepImages,
    count: int,
    capacity: int,
    *,
    forward_only: bool = False,
) -> torch.Tensor:
    """Computes the forward passes of some micro-batches with megatron-core's schedule, and the backward passes.

    Args:
        learner: The model.
        vision: This rank's part of the work with a separate vision tower; None without.
        batches: The micro-batches.
        images: Their packs, for ``vision``.
        count: Number of micro-batches.
        capacity: Tokens per pack, for the exchange between pipeline stages.
        forward_only: Whether to omit backward passes.

    Returns:
        float64 (n, 3): for each micro-batch the sum of weighted losses, of weights, and the number of targets. Ranks
        without the loss have none.
    """
    compute = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=batches,
        model=learner.model,
        num_microbatches=count,
        seq_length=capacity,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    found = compute() if vision is None else vision.run(images, batches, compute, forward_only)
    if not found:
        return torch.zeros(0, 3, dtype=torch.float64, device=device_of(learner.model[0]))
    return torch.stack([each["loss"] for each in found])


def forward_step(batches: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Forward step that megatron-core's schedules call for each micro-batch."""
    batch = next(batches)
    return model(batch), partial(_loss, batch)


def _loss(batch: PackedBatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the weighted sum over this rank's targets, their number, and what :func:`run_passes` returns of them."""
    assert batch.loss_mask is not None
    assert batch.loss_weights is not None
    total, targets = losses.sum(), batch.loss_mask.sum()
    weight = batch.loss_weights.sum(dtype=torch.float64)
    return total, targets.to(torch.int), {"loss": torch.stack([total.detach().double(), weight, targets.double()])}
