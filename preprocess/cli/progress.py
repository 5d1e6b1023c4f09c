"""Following a run: a live bar on a terminal, plain lines or JSON elsewhere. All read the same counters."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.run.claim import Part
from vlmdata.preprocess.shards.counters import Counters, Counts, counts_of
from vlmdata.preprocess.shards.job import ShardRecord
from vlmdata.wording import counted, duration

_BAR_INTERVAL = 0.2  # in seconds, like the others
#: Interval between lines: a tenth of the elapsed time, within these bounds. A 10-hour run prints about 150 lines.
_LEAST_PAUSE, _LONGEST_PAUSE = 10.0, 300.0
#: Reasons of rejection shown in a line; --json has all.
_SHOWN_REASONS = 3


@dataclass(frozen=True)
class Snapshot:
    """Counts so far, those of earlier runs included, and rates per second of this run alone."""

    counts: Counts
    rows: float
    images: float
    tokens: float
    bytes: float


class _Meter:
    """Computes rates from live counters since the first row, without the start-up time of workers."""

    def __init__(self, counters: Counters):
        self._counters = counters
        self._begun = time.monotonic()
        self._before = counters.table().sum(axis=0)

    def read(self) -> Snapshot:
        now = self._counters.table().sum(axis=0)
        if (now == self._before).all():
            self._begun = time.monotonic()
        seconds = max(time.monotonic() - self._begun, 1e-9)
        return Snapshot(counts_of(now), *((now - self._before)[:4] / seconds).tolist())


class ProgressDisplay:
    """Shows progress from a separate thread, until the block ends: a bar, or lines, of JSON even on a terminal."""

    def __init__(
        self,
        console: Console,
        config: PreprocessConfig,
        workers: int,
        part: Part | None = None,
        *,
        as_json: bool = False,
    ):
        self._console = console
        self._config = config
        self._workers = workers
        self._part = part
        self._as_json = as_json
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._rows = self._shards = self._done = 0

    def start(self, rows: int, shards: int, kept: int, counters: Counters) -> None:
        """Starts the display, given the numbers of rows, shards and already finished shards."""
        self._rows, self._shards, self._done = rows, shards, kept
        before = f", {kept:,} already made" if kept else ""
        workers = counted(max(min(self._workers, shards - kept), 1), "worker")
        part = f"part {self._part}: " if self._part else ""
        self._console.print(
            f"{part}{counted(rows, 'row')} in {counted(shards, 'shard')}{before}: recipe {self._config.recipe}, "
            f"tokenizer {self._config.tokenizer}, {workers}",
            soft_wrap=True,
            markup=False,
        )
        follow = self._bar if self._console.is_terminal and not self._as_json else self._lines
        self._thread = threading.Thread(target=follow, args=(_Meter(counters),), daemon=True)
        self._thread.start()

    def shard_done(self, _: ShardRecord) -> None:
        """Counts a finished shard."""
        self._done += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
                progress.update(task, completed=snapshot.counts.rows, rates=_rates(snapshot))

    def _lines(self, meter: _Meter) -> None:
        begun = time.monotonic()
        while not self._stop.wait(pause_after(time.monotonic() - begun)):
            self._line(meter.read())
        self._line(meter.read())

    def _line(self, snapshot: Snapshot) -> None:
        if self._as_json:
            part = {"part": str(self._part)} if self._part else {}
            self._console.out(
                json.dumps(part | progress_json(snapshot, self._rows, self._done, self._shards)), highlight=False
            )
        else:
            self._console.print(progress_line(snapshot, self._rows, self._done, self._shards), soft_wrap=True)


def pause_after(elapsed: float) -> float:
    """Returns the seconds until the next log line."""
    return min(max(_LEAST_PAUSE, elapsed / 10), _LONGEST_PAUSE)


def progress_line(snapshot: Snapshot, rows: int, done: int, shards: int) -> str:
    """A line of a log: ``shard 3/30, 10 %, 41 rows/s, 29.5 MB/s, 2 min left, 7 rejected (5 overlong, 2 cut)``."""
    counts, missing = snapshot.counts, max(rows - snapshot.counts.rows, 0)
    parts = [f"shard {done:,}/{shards:,}", f"{100 * counts.rows // max(rows, 1)} %"]
    if snapshot.rows > 0:
        parts += [f"{_short(snapshot.rows)} rows/s", f"{_short(snapshot.bytes / 1e6)} MB/s"]
    if missing:
        parts.append(f"{_rough(missing / snapshot.rows)} left" if snapshot.rows > 0 else "starting")
    if counts.rejected:
        parts.append(f"{counts.rejected:,} rejected ({_listed(counts.rejects)})")
    return ", ".join(parts)


def progress_json(snapshot: Snapshot, rows: int, done: int, shards: int) -> dict[str, Any]:
    """The same as an object, with all reasons and the rates of images and tokens."""
    counts, missing = snapshot.counts, max(rows - snapshot.counts.rows, 0)
    return {
        "event": "progress",
        "shards_done": done,
        "shards": shards,
        "rows_done": counts.rows,
        "rows": rows,
        "images": counts.images,
        "tokens": counts.tokens,
        "bytes": counts.bytes,
        "rejected": counts.rejected,
        "rejects": dict(counts.rejects),
        "rows_per_second": round(snapshot.rows, 3),
        "images_per_second": round(snapshot.images, 3),
        "tokens_per_second": round(snapshot.tokens, 1),
        "mb_per_second": round(snapshot.bytes / 1e6, 3),
        "seconds_left": round(missing / snapshot.rows, 1) if snapshot.rows > 0 else None,
    }


def _listed(rejects: Mapping[str, int]) -> str:
    """The most frequent reasons."""
    shown = [f"{count:,} {reason}" for reason, count in list(rejects.items())[:_SHOWN_REASONS]]
    return ", ".join([*shown, "…"] if len(rejects) > len(shown) else shown)


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.1f}"


def _rough(seconds: float) -> str:
    """Formats an estimated duration: whole seconds below a minute, then whole minutes."""
    return f"{math.ceil(seconds)} s" if seconds <= 59 else duration(60 * math.ceil(seconds / 60))


def _rates(snapshot: Snapshot) -> str:
    counts = snapshot.counts
    rates = f"{_short(snapshot.rows)} rows/s, {snapshot.tokens:,.0f} tokens/s, {_short(snapshot.bytes / 1e6)} MB/s"
    return f"{rates}, {counts.rejected:,} rejected" + (f" ({_listed(counts.rejects)})" if counts.rejects else "")
