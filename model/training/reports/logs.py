"""Output of a run: one line per step, a progress bar on a terminal, metrics.jsonl, and optional TensorBoard and W&B."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vlmdata.errors import ResourceError
from vlmdata.model.training.evaluation import Evaluation
from vlmdata.model.training.settings.config import ConfigError, TrainConfig
from vlmdata.model.training.step import StepResult, digest

#: What a run logs, as patterns in its folder.
_LOGS = ("metrics.jsonl", "tensorboard", "profile", "not-finite-step-*.json")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Log entry of a step."""

    step: int  # number of the step, from 1
    result: StepResult  # result of the step
    #: Model FLOP/s over the devices' peak by name: ``mfu`` over all devices, and ``vision_mfu`` and ``language_mfu``
    #: with separate ranks; empty if the peak is unknown.
    mfu: Mapping[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """Returns numbers by name."""
        result = self.result
        values: dict[str, float | None] = {
            "loss": result.loss,
            **result.extra_losses,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_second": result.tokens / result.seconds,
            "fill": result.tokens / result.slots if result.slots else 0.0,
            "targets": result.targets,
            "tokens": result.tokens,
            "images": result.images,
            "videos": result.videos,
            "patches": result.patches,
            "tflops": result.flops / result.seconds / 1e12,
            **self.mfu,
            "data_wait": result.data_wait,
            "data_wait_share": result.data_wait / result.seconds,
            "vision_wait": result.vision_wait,
            "language_wait": result.language_wait,
            "seconds": result.seconds,
            "memory_gib": result.memory / 2**30 if result.memory else None,
            "vision_memory_gib": result.vision_memory / 2**30 if result.vision_memory else None,
        }
        return {name: float(value) for name, value in values.items() if value is not None}

    def line(self, steps: int) -> str:
        """Formats one console line."""
        m = self.metrics
        parts = [f"step {self.step:>{len(str(steps))}}/{steps}", f"loss {m['loss']:.4f}"]
        sides = ""
        if "vision_wait" in m:
            shares = (m[f"{side}_wait"] / m["seconds"] for side in ("vision", "language"))
            sides = " (vision {:.1%}, language {:.1%})".format(*shares)
        if "mtp_loss" in m:
            parts.append(f"mtp {m['mtp_loss']:.4f}")
        parts += [
            f"grad {m['grad_norm']:.3f}",
            f"lr {m['lr']:.2e}",
            f"{m['tokens_per_second']:,.0f} tok/s",
            f"fill {m['fill']:.1%}",
            f"wait {m['data_wait_share']:.1%}{sides}",
        ]
        if "mfu" in m:
            split = f" (vision {m['vision_mfu']:.1%}, language {m['language_mfu']:.1%})" if "vision_mfu" in m else ""
            parts.append(f"mfu {m['mfu']:.1%}{split}")
        if self.result.memory:
            vision = f" (vision {m['vision_memory_gib']:.1f})" if self.result.vision_memory else ""
            parts.append(f"mem {m['memory_gib']:.1f} GiB{vision}")
        parts.append(f"{self.result.seconds:.2f} s")
        return "  ".join(parts)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Converts write failures to :class:`ResourceError`."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free / 1e6
        raise ResourceError(
            f"{folder.resolve()}: logs could not be written: {error.strerror or error}; {free:,.1f} MB free. "
            "Checkpoints are unchanged. Free space or fix permissions, and continue with --resume"
        ) from error


class JsonLines:
    """``metrics.jsonl``: one line per step. A resumed run continues the same file.

    ``evaluated`` are the steps after which an earlier part of the run evaluated.
    """

    def __init__(self, path: Path, resumed_at: int | None):
        self._folder = path.parent
        with _writing(self._folder):
            _drop_half_line(path)
            self._file = path.open("a")
        if resumed_at is not None:
            self.event("resumed", resumed_at)
        self.evaluated = _evaluated_in(path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a step."""
        self._line({"step": step, **metrics})

    def event(self, name: str, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Appends an event other than a step."""
        self._line({"event": name, "step": step, **(values or {})})

    def _line(self, values: Mapping[str, Any]) -> None:
        # JSON has neither NaN nor infinity.
        odd = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
        plain = {name: None if name in odd else value for name, value in values.items()}
        with _writing(self._folder):
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with _writing(self._folder):
            self._file.close()


def _move_earlier_logs(out: Path) -> list[str]:
    """Moves the logs of an earlier run into a folder of their own. Returns a line for the user if there were any.

    A new run has no steps in common with them: the earlier one died before its first checkpoint, or its checkpoints
    were moved away.
    """
    steps = out / "metrics.jsonl"
    # A run that ended before its first step left nothing to add to.
    if not (steps.stat().st_size if steps.exists() else (out / "tensorboard").exists()):
        return []
    found = sorted(path for pattern in _LOGS for path in out.glob(pattern))
    aside = next(path for number in itertools.count(1) if not (path := out / f"earlier-run-{number}").exists())
    aside.mkdir()
    for path in found:
        os.rename(path, aside / path.name)
    return [f"{out} had logs of an earlier run without a checkpoint: they are now in {aside}"]


def _evaluated_in(path: Path) -> set[int]:
    """Returns the steps after which the run that wrote ``metrics.jsonl`` evaluated, without those it made again."""
    steps: set[int] = set()
    with path.open() as lines:
        for line in lines:
            if '"event"' not in line:
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that was edited records nothing
                event = json.loads(line)
                if event["event"] == "resumed":
                    steps = {step for step in steps if step <= event["step"]}
                elif event["event"] == "evaluation":
                    steps.add(event["step"])
    return steps


def _drop_half_line(path: Path) -> None:
    """Removes a truncated last line (full disk, crash), which would corrupt the next line."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


class TensorBoard:
    """TensorBoard event files under ``OUT/tensorboard``."""

    def __init__(self, folder: Path, resumed_at: int | None):
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "run.tensorboard is set, but tensorboard is not installed: pip install 'vlmdata[train]', or "
                "--set run.tensorboard=false"
            ) from error

        self._folder = folder.parent
        self._summary, self._value = Summary, Summary.Value
        with _writing(self._folder):
            # Hides events of steps that a resumed run repeats.
            self._writer: Any = SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)

    def write(self, step: int, metrics: Mapping[str, float], group: str = "train") -> None:
        """Adds scalars ``GROUP/NAME``."""
        # One event of all scalars: one for each would take a millisecond, in which no GPU has work.
        values = [self._value(tag=f"{group}/{name}", simple_value=value) for name, value in metrics.items()]
        with _writing(self._folder):
            self._writer.file_writer.add_summary(self._summary(value=values), step)

    def close(self) -> None:
        """Flushes the files."""
        with _writing(self._folder):
            self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run; ``OUT/wandb-id`` keeps its id, so a resumed run continues it."""

    def __init__(self, config: TrainConfig, resumed: bool):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("run.wandb is set, but wandb is not installed: pip install wandb") from error
        out = Path(config.run.out)
        with _writing(out):
            run_id = _run_id(out / "wandb-id", resumed)
        self._run = wandb.init(
            project=config.run.wandb, dir=str(out), config=config.to_dict(), id=run_id, resume="allow"
        )

    def write(self, step: int, metrics: Mapping[str, float], group: str = "train") -> None:
        """Logs scalars: ``NAME``, or ``eval/NAME`` for an evaluation."""
        prefix = "" if group == "train" else f"{group}/"
        self._run.log({f"{prefix}{name}": value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _run_id(file: Path, resumed: bool) -> str:
    """Returns a random id, or the saved id when resuming. The id must not depend on the configuration alone."""
    if resumed and file.is_file() and (kept := file.read_text().strip()):
        return kept
    made = uuid.uuid4().hex
    file.write_text(made + "\n")
    return made


class RunLog:
    """Console output and log files of rank 0. Other ranks print nothing.

    A ConfigError if TensorBoard or wandb is configured but not installed; ResourceErrors if files cannot be written.
    """

    def __init__(self, config: TrainConfig, speaks: bool, resumed_at: int | None):
        self._steps = config.run.steps
        self._lines: JsonLines | None = None
        self._sinks: list[TensorBoard | WeightsAndBiases] = []
        self._console = Console(highlight=False, soft_wrap=True, quiet=not speaks, emoji=False)
        self._bar: Progress | None = None
        if not speaks:
            return
        out = Path(config.run.out)
        out.mkdir(parents=True, exist_ok=True)
        if resumed_at is None:
            with _writing(out):
                moved = _move_earlier_logs(out)
            for note in moved:
                self.say(note)
        self._lines = JsonLines(out / "metrics.jsonl", resumed_at)
        if config.run.tensorboard:
            self._sinks.append(TensorBoard(out / "tensorboard", resumed_at))
        if config.run.wandb:
            self._sinks.append(WeightsAndBiases(config, resumed_at is not None))
        if sys.stdout.isatty():
            columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            self._bar = Progress(TextColumn("training"), *columns, console=self._console)
            self._task = self._bar.add_task("steps", total=self._steps, completed=resumed_at or 0)
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints a console line."""
        self._console.print(text, markup=False)

    def step(self, report: StepReport) -> None:
        """Logs a step."""
        if self._lines is None:
            return
        self.say(report.line(self._steps))
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step)
        batches = report.result.batches  # the digest of this rank's samples is for comparing runs
        self._lines.write(report.step, {**report.metrics, "epoch": batches[0].epoch, "samples": digest(batches)})
        for sink in self._sinks:
            sink.write(report.step, report.metrics)

    def evaluation(self, found: Evaluation) -> None:
        """Logs an evaluation."""
        if self._lines is None:
            return
        self.say(found.line(self._steps))
        self._lines.event("evaluation", found.step, found.metrics)
        for sink in self._sinks:
            sink.write(found.step, found.metrics, "eval")

    def lacks_evaluation(self, step: int) -> bool:
        """True if no earlier part of the run has recorded an evaluation after this step. For rank 0."""
        return self._lines is not None and step not in self._lines.evaluated

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Records an event other than a completed step in ``metrics.jsonl``."""
        if self._lines is not None:
            self._lines.event(name, step, values)

    def close(self) -> None:
        """Closes the progress bar and files."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        with contextlib.ExitStack() as closing:  # closes the others if one fails
            if self._lines is not None:
                closing.callback(self._lines.close)
                self._lines = None
            while self._sinks:
                closing.callback(self._sinks.pop().close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second write failure must not be reported again, nor hide an earlier error.
        with contextlib.nullcontext() if error is None else contextlib.suppress(ResourceError):
            self.close()
