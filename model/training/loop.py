"""A run from start to end: build, resume, step, log, save, close."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from model.architecture import Architecture
from model.training.checkpoint import Checkpoints, load_weights
from model.training.config import ConfigError, TrainConfig, config_differences
from model.training.data import RankPlace, endless, open_loader
from model.training.flops import StepFlops, peak_flops
from model.training.logs import RunLog, StepReport
from model.training.optimizer import Learner, build_learner, freeze
from model.training.setup import architecture_of, build, parameter_dtype
from model.training.step import Stepper, StepResult
from vlmdata import PackedBatch, StreamingLoader


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: Optimizer steps done, in all.
        loss: Of the last step; nan if none was made.
        interrupted_by: Signal that ended it early, or None.
    """

    steps: int
    loss: float
    interrupted_by: int | None


class Interruption:
    """Remembers the first signal to stop; the second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Listens to ctrl-C and to what schedulers send."""
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(config: TrainConfig, device: torch.device, resume: bool) -> Outcome:
    """Trains until the configured step, or until it is interrupted; the process groups exist already.

    Args:
        config: The run.
        device: This process's device.
        resume: Whether to go on from the newest checkpoint in ``run.out``; otherwise that folder must hold none.

    Raises:
        ConfigError: If something does not fit together; on all ranks alike.
    """
    place, architecture = RankPlace.here(), architecture_of(config)
    # The data first: what is wrong with it is told before a large model is built.
    with open_loader(config, place, architecture.language.moe is not None, device) as loader:
        model = build(config, architecture, place, device)
        trained = freeze(model, config.model.freeze)
        learner = build_learner(model, config, device, parameter_dtype(config, device))
        asynchronous = device.type == "cuda" if config.run.async_save is None else config.run.async_save
        checkpoints = Checkpoints(config, architecture, place, asynchronous)
        done, notes = _start(config, checkpoints, learner, loader, resume)
        with RunLog(config, place.rank == 0, done if resume else None) as log:
            log.say(_describe(config, architecture, place, trained, loader))
            for note in notes:
                log.say(note)
            run = _Run(config, architecture, place, learner, checkpoints, loader, log, device)
            return run.until_end(done)


def _start(
    config: TrainConfig, checkpoints: Checkpoints, learner: Learner, loader: StreamingLoader, resume: bool
) -> tuple[int, list[str]]:
    """Loads what the run begins from; steps done already, and what changed since."""
    latest = checkpoints.latest()
    if not resume:
        if latest is not None:
            raise ConfigError(
                f"{config.run.out} holds the checkpoint {latest.name} of an earlier run: go on with --resume, or "
                "choose another --out"
            )
        if config.model.weights is not None:
            load_weights(Path(config.model.weights), learner)
        return 0, []
    if latest is None:
        raise ConfigError(f"{config.run.out} holds no checkpoint to resume from; leave --resume out, or name its --out")
    state = checkpoints.load(latest, learner)
    loader.load_state_dict(state.loader)
    changes = [f"  {line}" for line in config_differences(state.config, config.to_dict())]
    return state.step, [f"resumed from {latest}", *(["changed since:", *changes] if changes else [])]


def _describe(
    config: TrainConfig, architecture: Architecture, place: RankPlace, trained: int, loader: StreamingLoader
) -> str:
    p = config.parallel
    name = config.model.hf or config.model.preset
    frozen = f", frozen: {', '.join(config.model.freeze)}" if config.model.freeze else ""
    samples, steps = sum(len(each) for each in loader.datasets), loader.steps(loader.position.epoch)
    return (
        f"{name}: {architecture.language.num_layers} layers, {trained:,} parameters trained on rank 0{frozen}; "
        f"{place.world} processes: dp {place.dp_size} x tp {p.tp} x cp {p.cp} x pp {p.pp}, ep {p.ep}; "
        f"{samples:,} samples, {steps:,} steps an epoch; config {config.hash()}"
    )


class _Run:
    """The loop and what it needs; made once the start is known."""

    def __init__(
        self,
        config: TrainConfig,
        architecture: Architecture,
        place: RankPlace,
        learner: Learner,
        checkpoints: Checkpoints,
        loader: StreamingLoader,
        log: RunLog,
        device: torch.device,
    ):
        self._config, self._learner, self._checkpoints = config, learner, checkpoints
        self._loader, self._log, self._device = loader, log, device
        mtp = config.model.mtp is not False and architecture.mtp_layers > 0
        self._stepper = Stepper(
            learner,
            place,
            micro_batches=config.data.global_batch // place.dp_size,
            capacity=config.data.capacity,
            flops=StepFlops.for_model(architecture, mtp, config.model.freeze),
            device=device,
        )
        peak = peak_flops(device)
        self._peak = None if peak is None else peak * place.world
        self._profiler = _profiler(config, place, device)

    def until_end(self, done: int) -> Outcome:
        """Steps until the last one or a signal, saves, and says how it ended."""
        steps, interruption = self._config.run.steps, Interruption()
        batches, loss, saved = endless(self._loader), float("nan"), done
        with interruption.watched():
            while done < steps:
                lr = self._learner.optimizer.param_groups[0]["lr"]
                seen = _Seen(batches)
                epoch = self._loader.position.epoch
                with self._profiler.at(done + 1):
                    result = self._stepper(seen, interruption.signal is not None)
                done += 1
                loss = result.loss
                self._log.step(self._report(done, epoch, result, lr, seen))
                self._checkpoints.poll()
                every = self._config.run.save_every
                if result.interrupted or done == steps or (every and done % every == 0):
                    self._checkpoints.save(done, self._learner, self._loader.state_dict())
                    saved = done
                if result.interrupted:
                    break
            self._checkpoints.wait()
        if interruption.signal is not None:
            self._log.say(f"interrupted: step {saved} is saved in {self._config.run.out}; go on with --resume")
        elif saved == done:
            self._log.say(f"done: step {saved} is saved in {self._config.run.out}")
        # A rank may have been told to stop without its own signal.
        return Outcome(done, loss, interruption.signal or (signal.SIGTERM if done < steps else None))

    def _report(self, step: int, epoch: int, result: StepResult, lr: float, seen: _Seen) -> StepReport:
        mfu = None if self._peak is None else result.flops / result.seconds / self._peak
        memory = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return StepReport(step, epoch, result, lr, mfu, memory, seen.digest())


class _Seen(Iterator[PackedBatch]):
    """Batches, remembering which samples they held."""

    def __init__(self, batches: Iterator[PackedBatch]):
        self._batches = batches
        self._keys: list[str] = []

    def __next__(self) -> PackedBatch:
        batch = next(self._batches)
        self._keys += batch.sample_keys
        return batch

    def digest(self) -> str:
        """Twelve hex digits of the samples, in any order."""
        return hashlib.sha256("\n".join(sorted(self._keys)).encode()).hexdigest()[:12]


@dataclasses.dataclass
class _Profiler:
    """A torch profile of some steps, as a Chrome trace; nothing without a range."""

    first: int | None
    last: int
    path: Path
    device: torch.device
    _profile: torch.profiler.profile | None = None

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Around a step."""
        if step == self.first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
        yield
        if self._profile is not None and step == self.last:
            self._profile.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))
            by = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            table = self._profile.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=80)
            self.path.with_suffix(".txt").write_text(table)
            self._profile = None


def _profiler(config: TrainConfig, place: RankPlace, device: torch.device) -> _Profiler:
    first, last = config.run.profile or (None, 0)
    return _Profiler(first, last, Path(config.run.out) / "profile" / f"rank-{place.rank:05d}.json", device)
