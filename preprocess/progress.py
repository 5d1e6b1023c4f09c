"""Following a run: a live bar on a terminal, plain lines elsewhere. Both read the same counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from preprocess.engine import Counters
from preprocess.shard_job import ShardRecord

_BAR_INTERVAL, _LINE_INTERVAL = 0.2, 10.0  # seconds


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
    """Turns live counters into rates since rows began to come: starting workers up is no work on rows."""

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

    def __init__(self, console: Console):
        self._console = console
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._total = 0

    def start(self, rows: int, shards: int, kept: int, counters: Counters) -> None:
        """The run begins: so many rows and shards, so many shards already whole."""
        self._total = rows
        again = f", {kept} already made" if kept else ""
        self._console.print(f"{rows:,} rows in {shards:,} shards{again}")
        follow = self._bar if self._console.is_terminal else self._lines
        self._thread = threading.Thread(target=follow, args=(_Meter(counters),), daemon=True)
        self._thread.start()

    def shard_done(self, record: ShardRecord) -> None:
        """A shard was made; plain output says so."""
        if not self._console.is_terminal:
            info = record.info
            self._console.print(
                f"{info.name}: {info.samples} samples, {info.rejected} rejected, {info.bytes / 1e6:.1f} MB",
                soft_wrap=True,
            )

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
            task: TaskID = progress.add_task("rows", total=self._total, rates="")
            ended = False
            while not ended:
                ended = self._stop.wait(_BAR_INTERVAL)
                snapshot = meter.read()
                progress.update(task, completed=snapshot.rows, rates=_rates(snapshot))

    def _lines(self, meter: _Meter) -> None:
        while not self._stop.wait(_LINE_INTERVAL):
            snapshot = meter.read()
            if snapshot.rows_per_second > 0:
                left = f"{(self._total - snapshot.rows) / snapshot.rows_per_second:.0f} s left"
            else:
                left = "starting"
            share = 100 * snapshot.rows / self._total
            self._console.print(
                f"{snapshot.rows:,}/{self._total:,} rows ({share:.0f} %), {_rates(snapshot)}, {left}", soft_wrap=True
            )


def _rates(snapshot: Snapshot) -> str:
    return (
        f"{snapshot.images_per_second:.1f} images/s, {snapshot.tokens_per_second:,.0f} tokens/s, "
        f"{snapshot.rejected:,} rejected"
    )


@contextmanager
def progress_display(console: Console) -> Iterator[ProgressDisplay]:
    """A display that stops, whatever happens, when the block ends."""
    display = ProgressDisplay(console)
    try:
        yield display
    finally:
        display.stop()
