"""A training run from start to end: build, resume, step, log, save, close."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmdata import PackedBatch, StreamingLoader
from vlmdata.integrations.images import image_notes
from vlmdata.integrations.videos import video_notes
from vlmdata.loader.run_record import RunRecord
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import spec_of
from vlmdata.model.flops import peak_flops
from vlmdata.model.kernels.ahead import KernelsAhead
from vlmdata.model.lora.attach import Plan
from vlmdata.model.lora.flops import with_adapters
from vlmdata.model.training.build import adapt, architecture_of, build, computed_by, frozen_storage, parameter_dtype
from vlmdata.model.training.checkpoints.best import Best
from vlmdata.model.training.checkpoints.checkpoint import Checkpoints, megabytes
from vlmdata.model.training.checkpoints.folder import newest_in
from vlmdata.model.training.checkpoints.starting_point import find_start, load_start
from vlmdata.model.training.damage import name_damage_once, settle_damage
from vlmdata.model.training.data import RankPlace, endless, open_loader
from vlmdata.model.training.evaluation import Evaluator, also_trained_on, open_evaluation_sets
from vlmdata.model.training.optimizer.learner import Learner, build_learner, freeze
from vlmdata.model.training.processes.agreement import by_leaders, decided, gathered, raise_together, together
from vlmdata.model.training.processes.failure import ending, say
from vlmdata.model.training.processes.garbage import only_new_objects_collected
from vlmdata.model.training.processes.interruption import Interruption
from vlmdata.model.training.reports.logs import RunLog, StepReport
from vlmdata.model.training.reports.not_finite import not_finite_error
from vlmdata.model.training.reports.profiling import Profiler
from vlmdata.model.training.reports.step_notes import DataWait, MemoryNote, decoded_codecs
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.model.training.settings.model_settings import settings_of
from vlmdata.model.training.step import LaunchedStep, Stepper, StepResult
from vlmdata.model.training.vision_side import VisionSide, vision_side
from vlmdata.wording import counted, duration


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: Total optimizer steps completed.
        loss: Loss of the last step; NaN without steps.
        interrupted_by: Signal that ended the run early, or None.
    """

    steps: int
    loss: float
    interrupted_by: int | None


def train(config: TrainConfig, device: torch.device, resume: bool, kernels: KernelsAhead | None = None) -> Outcome:
    """Trains until the configured step or an interruption. The process groups must exist.

    Args:
        config: The run.
        device: This process's device.
        resume: Continue from the newest checkpoint in ``run.out``; otherwise the folder must contain none.
        kernels: Compilation of this node's kernels, if this process started it.

    Raises:
        ConfigError: If settings, data or checkpoint are incompatible.
        OtherRankError: If another rank failed unexpectedly.
        NotFiniteError: If a loss or gradient norm is infinite or NaN; raised on all ranks.
        VlmdataError: If this rank's data cannot be read.
    """
    place = RankPlace.here()
    with contextlib.ExitStack() as stack:
        # Data comes first, so that its errors appear before a large model is built.
        with together():
            newest = newest_in(Path(config.run.out) / "checkpoints") if resume else None
            architecture = architecture_of(config, newest)
            loader = stack.enter_context(open_loader(config, place, architecture, device))
            sets = open_evaluation_sets(config, place, architecture, device, loader)
        for each in sets.values():
            stack.enter_context(each)
        # Processes that write in the background do not have moments in host memory
        # (vlmdata.model.training.optimizer.compact_adam).
        suits = device.type == "cuda" and not config.optimizer.offload
        asynchronous = suits if config.run.async_save is None else config.run.async_save
        checkpoints = Checkpoints(config, architecture, place, asynchronous)
        start = find_start(config, checkpoints, resume)
        with together():
            model = build(config, architecture, place, device)
            plan = adapt(config, architecture, model, resume)
            trained = freeze(model, config.model.freeze)
        learner = build_learner(model, config, device, parameter_dtype(config, device))
        loaders = {"data": loader} | {f"evaluation data ({name})": each for name, each in sets.items()}
        vision = vision_side(learner, config, architecture, device, parameter_dtype(config, device), loaders)
        done, notes = load_start(config, architecture, place, checkpoints, start, learner, loader)
        with together():
            log = stack.enter_context(RunLog(config, place.rank == 0, done if resume else None))
            everywhere = gathered(trained)
            if place.rank == 0:
                RunRecord.of(loader, Path(config.run.out)).write()
        log.say(_describe(config, architecture, place, everywhere, loader))
        log.say(computed_by(model, settings_of(config, architecture, device.type == "cuda"), device))
        name_damage_once(place)
        if plan is not None:
            log.say(plan.described())
            log.say(frozen_storage(model))
        if place.rank == 0:
            named = [(each.name, each.manifest) for each in loader.datasets]
            notes += [*image_notes(named, config.model.hf), *video_notes(named, config.model.hf)]
        for note in [*_empty_packs(loader), *also_trained_on(sets, loader), *notes]:
            log.say(note)
        steps = _Loop(config, architecture, plan, place, learner, vision, checkpoints, loader, sets, log, device)
        stack.callback(steps.profiler.close)
        stack.enter_context(ending())
        if device.type == "cuda":  # other processes of the node would compile what is being compiled
            by_leaders(lambda: None if kernels is None else kernels.wait(log.say))
        stack.enter_context(only_new_objects_collected())
        return steps.until_end(done)


def _describe(
    config: TrainConfig, architecture: Architecture, place: RankPlace, trained: Sequence[int], loader: StreamingLoader
) -> str:
    p = config.parallel
    name = config.model.hf or config.model.preset
    frozen = f", frozen: {', '.join(config.model.freeze)}" if config.model.freeze else ""
    processes = "1 process" if place.world == 1 else f"{place.world} processes"
    samples, steps = sum(len(each) for each in loader.datasets), loader.steps(loader.position.epoch)
    where, tower = f"{trained[0]:,} parameters trained on rank 0", ""
    if p.vision_gpus:
        where = f"{where} (vision), {trained[p.vision_gpus]:,} on rank {p.vision_gpus} (language)"
        tower = f"{p.vision_gpus} for vision (dp {place.vision_size} x tp {p.vision_tp or 1}), others "
    return (
        f"{name}: {architecture.language.num_layers} layers, {where}{frozen}; "
        f"{processes}: {tower}dp {place.dp_size} x tp {p.tp} x cp {p.cp} x pp {p.pp}, ep {p.ep}"
        f"{', fully sharded' if p.fsdp else ''}; "
        f"{counted(samples, 'sample')}, {counted(steps, 'step')} per epoch; config {config.hash()}"
    )


def _empty_packs(loader: StreamingLoader) -> list[str]:
    """Returns a line if many packs are empty, since steps have a fixed number of packs."""
    plan = loader.plan(loader.position.epoch)
    made, computed = plan.num_packs, plan.num_steps * plan.config.global_batch
    if made > 0.75 * computed:
        return []
    return [
        f"an epoch has {counted(made, 'pack')} for {counted(plan.num_steps, 'step')} of "
        f"{plan.config.global_batch:,}: the remaining packs are empty but take full time; lower "
        "--global-batch or --capacity"
    ]


def runs_ahead(device: torch.device, vision: VisionSide | None) -> bool:
    """Whether each step is launched before the previous one is finished.

    False on a CPU, where launching a step computes it, and with a vision tower on ranks of its own, where finishing a
    step sends messages.
    """
    return device.type == "cuda" and vision is None


class _Loop:
    """The loop and its parts, created when the starting point is known."""

    def __init__(
        self,
        config: TrainConfig,
        architecture: Architecture,
        plan: Plan | None,
        place: RankPlace,
        learner: Learner,
        vision: VisionSide | None,
        checkpoints: Checkpoints,
        loader: StreamingLoader,
        sets: Mapping[str, StreamingLoader],
        log: RunLog,
        device: torch.device,
    ):
        self._config, self._learner, self._checkpoints = config, learner, checkpoints
        self._place, self._loader, self._log = place, loader, log
        self._interruption = Interruption()
        mtp = config.model.mtp is not False and architecture.mtp_layers > 0
        flops = spec_of(architecture).step_flops(architecture, mtp, config.frozen_parts, config.adapted_parts)
        if plan is not None:
            flops = with_adapters(flops, plan.sites.values(), plan.form.rank, architecture)
        self._stepper = Stepper(
            learner,
            place,
            micro_batches=config.data.global_batch // place.dp_size,
            capacity=config.data.capacity,
            flops=flops,
            device=device,
            stop_requested=self._interruption.requested,
            vision=vision,
            images=lambda: loader.images(loader.position.epoch, loader.position.step),
        )
        stop = self._interruption.requested
        self._evaluator = Evaluator(sets, learner, place, config, device, stop, vision) if sets else None
        self._data = tuple(each.datasets[0].manifest.fingerprint for each in sets.values())
        self._peak = peak_flops(device)
        trace = Path(config.run.out) / "profile" / f"rank-{place.rank:05d}.json"
        self.profiler = Profiler(config.run.profile, trace, device)
        self._notes = DataWait(config.data.workers, decoded_codecs(loader.datasets)), MemoryNote()
        self._ahead = runs_ahead(device, vision)
        self._best = checkpoints.best
        self._saved = -1
        self._loss = float("nan")

    def until_end(self, done: int) -> Outcome:
        """Runs steps until the last one or a signal, evaluates, saves, and prints how the run ended."""
        run = self._config.run
        finished = done >= run.steps
        self._saved = done
        for note in self._best.recall(self._data) if run.keep_best else ():
            self._log.say(note)
        with self._interruption.watched():
            stopped = False
            if finished or (self._due(done, run.eval_every) and self._lacks_evaluation(done)):
                stopped = not self._evaluated(done) and done > 0  # step 0 is not saved: the first step will be
            if not (finished or stopped):
                done, stopped = self._step_until_end(done)
            self._finish_saving()
        self._say_end(done, stopped, finished)
        if stopped:
            # Another rank may have asked this one to stop, without a signal here.
            return Outcome(done, self._loss, self._interruption.signal or signal.SIGTERM)
        return Outcome(done, self._loss, None)

    def _step_until_end(self, done: int) -> tuple[int, bool]:
        """Runs steps. Returns the number of the last step, and whether the run was asked to stop before its end."""
        run, batches = self._config.run, endless(self._loader)
        first, stopped = done + 1, False
        step, launched = first, self._launch(first, batches)
        while True:
            following = None
            # The first step shows whether all works, so it is finished by itself.
            if step > first and not stopped and self._may_run_ahead_of(step):
                try:
                    following = self._launch(step + 1, batches)
                except Exception as error:
                    self._log_before(error, step, launched)
                    raise
            result = self._log_finished(step, launched)
            self._settle(step, result)
            # A run that is asked to stop in the last step is complete anyway.
            stopped = (stopped or result.interrupted) and step < run.steps
            if following is None:
                if stopped or self._due(step, run.save_every):
                    self._save(step)
                # After saving, so that a failure in evaluation does not lose the step.
                if not stopped and self._due(step, run.eval_every) and not self._evaluated(step):
                    stopped = True
                    self._save(step)
                if stopped or step == run.steps:
                    return step, stopped
                following = self._launch(step + 1, batches)
            step, launched = step + 1, following

    def _lacks_evaluation(self, done: int) -> bool:
        """Whether the evaluation after this step was not made, or cut off, when the run ended there. A collective."""
        return decided(lambda: self._log.lacks_evaluation(done))

    def _may_run_ahead_of(self, step: int) -> bool:
        """Whether the next step may be launched before this one is finished. True if nothing is due between them."""
        run = self._config.run
        due = self._due(step, run.save_every) or self._due(step, run.eval_every)
        return self._ahead and not (due or self.profiler.covers(step) or self.profiler.covers(step + 1))

    def _launch(self, step: int, batches: Iterator[PackedBatch]) -> LaunchedStep:
        with self.profiler.at(step):
            launched = self._stepper.launch(batches)
            if self.profiler.covers(step):
                launched.wait()
        return launched

    def _log_finished(self, step: int, launched: LaunchedStep) -> StepResult:
        """Waits for a step and logs it, unless its results are not finite."""
        result = self._stepper.finish(launched)
        if not result.not_finite:
            self._loss = result.loss
            self._log.step(StepReport(step, result, self._mfu(result)))
        return result

    def _log_before(self, error: Exception, step: int, launched: LaunchedStep) -> None:
        """Logs a step if the launch of the next one failed. Sends no messages, because other ranks may not have failed.

        If other ranks have failed, this one may wait for them in vain, so it prints the reason first.
        """
        if self._place.world > 1:
            say(error)
        with contextlib.suppress(Exception):  # the launch's error matters
            result = self._log_finished(step, launched)
            if result.not_finite:
                self._log.say(f"step {step} gave values that are not finite: {', '.join(result.not_finite)}")

    def _settle(self, step: int, result: StepResult) -> None:
        """Handles damage and results that are not finite, and prints what slows the run down. A collective."""
        if result.any_masked:
            settle_damage(self._loader, self._place, result.masked)
        if result.not_finite:
            self._checkpoints.wait()
            raise_together(not_finite_error(step, result, self._config, self._place, self._checkpoints, self._log))
        for watch in self._notes:
            if note := watch.note(result):
                self._log.say(note)
        self._checkpoints.poll()

    def _due(self, done: int, every: int) -> bool:
        """True if a periodic action with this interval, also due at the end, is due after this step."""
        return done == self._config.run.steps or (every > 0 and done % every == 0)

    def _save(self, done: int) -> None:
        if self._saved != done:
            self._checkpoints.save(done, self._learner, self._loader.state_dict())
            self._saved = done

    def _finish_saving(self) -> None:
        """Waits for what is written in the background, and says how long: large models take minutes."""
        size, begun = self._checkpoints.pending_bytes, time.perf_counter()
        if size:
            self._log.say(f"writing the last checkpoint, {megabytes(size)} …")
        self._checkpoints.wait()
        if size:
            took = time.perf_counter() - begun
            self._log.say(f"written in {duration(took)}, {megabytes(size / max(took, 1e-3))}/s")

    def _evaluated(self, done: int) -> bool:
        """Evaluates on the sets, if any, and keeps the checkpoint if it is the best. False if interrupted."""
        if self._evaluator is None:
            return True
        found = self._evaluator(done)
        if found is None:
            self._log.say(f"the evaluation after step {done} was interrupted")
            return False
        better = self._best.found is None or found.loss < self._best.found.loss
        # Step 0 is not saved: its weights are the initial ones.
        if self._config.run.keep_best and done > 0 and math.isfinite(found.loss) and better:
            self._save(done)
            self._best.mark(Best(self._checkpoints.path_of(done).name, done, found.loss, self._data))
        self._log.evaluation(found)  # last: a run that ends before this line evaluates again
        return True

    def _say_end(self, done: int, stopped: bool, finished: bool) -> None:
        run = self._config.run
        if (best := self._best.found) is not None:
            path = self._checkpoints.path_of(best.step)
            self._log.say(f"best: step {best.step}, evaluation loss {best.loss:.4f}, {path}")
        if stopped:
            command = self._resume_command(done)
            self._log.say(f"interrupted: step {done} is saved in {run.out}; continue with:\n  {command}")
        elif finished:
            self._log.say(f"nothing to do: step {done} is saved in {run.out}, and run.steps is {run.steps}")
        else:
            self._log.say(f"done: step {done} is saved in {run.out}")

    def _mfu(self, result: StepResult) -> dict[str, float]:
        """Returns the shares of the devices' peak, see :class:`StepReport`."""
        if self._peak is None:
            return {}
        world, vision = self._place.world, self._config.parallel.vision_gpus
        shares = {"mfu": (result.flops, world)}
        if vision:
            shares["vision_mfu"] = (result.vision_flops, vision)
            shares["language_mfu"] = (result.flops - result.vision_flops, world - vision)
        return {name: flops / result.seconds / (self._peak * count) for name, (flops, count) in shares.items()}

    def _resume_command(self, step: int) -> str:
        world = self._place.world
        start = "python" if world == 1 else f"torchrun --nproc-per-node {world} --master-addr 127.0.0.1"
        if world > int(os.environ.get("LOCAL_WORLD_SIZE", str(world))) or "SLURM_PROCID" in os.environ:
            start = "(launcher as before)"
        config = self._checkpoints.path_of(step) / "config.toml"
        called = Path(sys.argv[0])
        if called.name == "train.py" and called.parent.name != "vlmdata":  # as the user named it, from any folder
            start += f" {shlex.quote(sys.argv[0])}"
        else:
            start = "vlmdata train" if start == "python" else f"{start} -m vlmdata.train"
        return f"{start} --config {shlex.quote(str(config))} --resume"
