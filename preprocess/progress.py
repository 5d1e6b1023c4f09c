"""Following a run: a live bar on a terminal, plain lines elsewhere. Both read the same counters."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from preprocess.config import PreprocessConfig
from preprocess.counters import Counters
from preprocess.shard_job import ShardRecord
from vlmdata.wording import counted, duration

_BAR_INTERVAL = 0.2  # seconds, as are the others
#: Between two lines: a tenth of the time so far, within these bounds. A run of 10 hours prints some 150 lines.
_LEAST_PAUSE, _LONGEST_PAUSE = 10.0, 300.0


@dataclass(frozen=True)
class Snapshot:
    """Counts so far, those of earlier runs included, and rates of this run alone."""

    rows: int
    images: int
    tokens: int
    rejected: int
    images_per_second: float
    tokens_per_second: float
    rows_per_second: float


class _Meter:
    """Turns live counters into rates since the first row: the time that workers take to start does not count."""

    def __init__(self, counters: Counters):
        self._counters = counters
        self._begun = time.monotonic()
        self._before = counters.table().sum(axis=0)

    def read(self) -> Snapshot:
        now = self._counters.table().sum(axis=0)
        if (now == self._before).all():
            self._begun = time.monotonic()
        seconds = max(time.monotonic() - self._begun, 1e-9)
        row_rate, image_rate, token_rate, _ = ((now - self._before) / seconds).tolist()
        rows, images, tokens, rejected = now.tolist()
        return Snapshot(rows, images, tokens, rejected, image_rate, token_rate, row_rate)


class ProgressDisplay:
    """Follows a run in a thread of its own, until :meth:`stop`."""

    def __init__(self, console: Console, config: PreprocessConfig, workers: int):
        self._console = console
        self._config = config
        self._workers = workers
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._rows = self._shards = self._done = 0

    def start(self, rows: int, shards: int, kept: int, counters: Counters) -> None:
        """The run begins: so many rows and shards, so many shards already whole."""
        self._rows, self._shards, self._done = rows, shards, kept
        before = f", {kept:,} already made" if kept else ""
        workers = counted(max(min(self._workers, shards - kept), 1), "worker")
        self._console.print(
            f"{counted(rows, 'row')} in {counted(shards, 'shard')}{before}: recipe {self._config.recipe}, "
            f"tokenizer {self._config.tokenizer}, {workers}",
            soft_wrap=True,
            markup=False,
        )
        follow = self._bar if self._console.is_terminal else self._lines
        self._thread = threading.Thread(target=follow, args=(_Meter(counters),), daemon=True)
        self._thread.start()

    def shard_done(self, _: ShardRecord) -> None:
        """A shard was made."""
        self._done += 1

    def stop(self) -> None:
        """Ends the display, showing the last counts."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _bar(self, meter: _Meter) -> None:
        columns = (
            TextColumn("[progress.percentage]{task.percentage:>3.0f}%"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self._console) as progress:
            task: TaskID = progress.add_task("rows", total=self._rows, rates="")
            ended = False
            while not ended:
                ended = self._stop.wait(_BAR_INTERVAL)
                snapshot = meter.read()
                progress.update(task, completed=snapshot.rows, rates=_rates(snapshot))

    def _lines(self, meter: _Meter) -> None:
        begun = time.monotonic()
        while not self._stop.wait(pause_after(time.monotonic() - begun)):
            self._line(meter.read())
        self._line(meter.read())

    def _line(self, snapshot: Snapshot) -> None:
        self._console.print(progress_line(snapshot, self._rows, self._done, self._shards), soft_wrap=True)


def pause_after(elapsed: float) -> float:
    """Seconds until the next line of a log."""
    return min(max(_LEAST_PAUSE, elapsed / 10), _LONGEST_PAUSE)


def progress_line(snapshot: Snapshot, rows: int, done: int, shards: int) -> str:
    """A line of a log: ``shard 3/30, 10 %, 41 rows/s, 2 min left, 7 rejected``.

    Args:
        snapshot: Counts so far.
        rows: Rows of the source.
        done: Shards that are whole.
        shards: Shards in all.
    """
    rate, missing = snapshot.rows_per_second, max(rows - snapshot.rows, 0)
    parts = [f"shard {done:,}/{shards:,}", f"{100 * snapshot.rows // max(rows, 1)} %"]
    if rate > 0:
        parts.append(f"{rate:,.0f} rows/s" if rate >= 9.95 else f"{rate:.1f} rows/s")
    if missing:
        parts.append(f"{_rough(missing / rate)} left" if rate > 0 else "starting")
    if snapshot.rejected:
        parts.append(f"{snapshot.rejected:,} rejected")
    return ", ".join(parts)


def _rough(seconds: float) -> str:
    """A duration that is only guessed: whole seconds under a minute, whole minutes from there."""
    return f"{math.ceil(seconds)} s" if seconds <= 59 else duration(60 * math.ceil(seconds / 60))


def _rates(snapshot: Snapshot) -> str:
    return (
        f"{snapshot.images_per_second:.1f} images/s, {snapshot.tokens_per_second:,.0f} tokens/s, "
        f"{snapshot.rejected:,} rejected"
    )


@contextmanager
def progress_display(console: Console, config: PreprocessConfig, workers: int) -> Iterator[ProgressDisplay]:
    """A display that stops, whatever happens, when the block ends."""
    display = ProgressDisplay(console, config, workers)
    try:
        yield display
    finally:
        display.stop()
