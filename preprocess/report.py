"""The summary of a run: as a table for people, as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from preprocess.job import RunResult
from vlmdata.format.index import DatasetIndex
from vlmdata.format.ledger import Reason, read_ledger
from vlmdata.format.manifest import Manifest, Totals, counts_to_json
from vlmdata.format.schema import INDEX_NAME, LEDGER_NAME
from vlmdata.wording import counted

_PERCENTILES = (0, 25, 50, 75, 95, 99, 100)
_BINS, _BAR_WIDTH = 10, 32
#: Keys listed in a line; --json has all.
_SHOWN_KEYS = 12


@dataclass(frozen=True)
class LengthDistribution:
    """True lengths of the samples, in tokens.

    Attributes:
        mean: Mean.
        percentiles: Percent -> length.
        edges: Histogram bin edges, one more than ``counts``.
        counts: Samples per bin.
    """

    mean: float
    percentiles: dict[int, int]
    edges: list[int]
    counts: list[int]


@dataclass(frozen=True)
class Report:
    """What a run gave.

    Attributes:
        directory: The dataset.
        manifest: Its manifest.
        lengths: Length distribution; None without samples.
        seconds: Wall time of this run.
        made: Shards made in this run.
        kept: Shards already there.
        max_reject_rate: Greatest rejected share that is no failure.
    """

    directory: Path
    manifest: Manifest
    lengths: LengthDistribution | None
    seconds: float
    made: int
    kept: int
    max_reject_rate: float

    @property
    def failed_row(self) -> int | None:
        """The first row with an error that nobody foresaw, if there is any."""
        if not self.manifest.rejects.get(Reason.UNEXPECTED_ERROR):
            return None
        rejections = read_ledger(self.directory / LEDGER_NAME)
        return next((each.row for each in rejections if each.reason is Reason.UNEXPECTED_ERROR), None)

    @property
    def reject_rate(self) -> float:
        """Rejected share of what could have become samples."""
        return self.manifest.totals.rejected / max(self.manifest.totals.candidates, 1)

    @property
    def too_many_rejects(self) -> bool:
        """Whether the rejected share is a failure."""
        return self.reject_rate > self.max_reject_rate

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "directory": str(self.directory),
            "fingerprint": self.manifest.fingerprint,
            "config_hash": self.manifest.config_hash,
            "totals": counts_to_json(self.manifest.totals),
            "candidates": self.manifest.totals.candidates,
            "rejects": dict(self.manifest.rejects),
            "reject_rate": self.reject_rate,
            "unused_keys": dict(self.manifest.unused_keys),
            "unknown_keys": dict(self.manifest.unknown_keys),
            "max_reject_rate": self.max_reject_rate,
            "lengths": dataclasses.asdict(self.lengths) if self.lengths else None,
            "shards": len(self.manifest.shards),
            "shards_made": self.made,
            "shards_kept": self.kept,
            "seconds": round(self.seconds, 3),
        }

    def print(self, console: Console) -> None:
        """Prints the summary."""
        console.print(self._table())
        if self.lengths is not None:
            console.print(_histogram(self.lengths))
        for line in self._key_lines():
            console.print(line, soft_wrap=True, markup=False)
        ledger = self.directory / LEDGER_NAME
        if self.manifest.totals.rejected:
            console.print(f"rejected rows, with reasons: {ledger}", soft_wrap=True, markup=False)
        if self.failed_row is not None:
            console.print(
                f"unexpected errors: add --trace {self.failed_row} to the command for the traceback of the first",
                soft_wrap=True,
            )
        console.print(f"next: vlmdata verify {self.directory}", soft_wrap=True, markup=False)

    def print_reject_failure(self, console: Console) -> None:
        """Says that too many rows were rejected."""
        totals = self.manifest.totals
        console.print(
            f"[bold red]failed:[/] {totals.rejected} of {totals.candidates} {_candidates(totals)} rejected "
            f"({100 * self.reject_rate:.1f} %), more than --max-reject-rate {self.max_reject_rate} allows. "
            f"The dataset of the other {totals.samples} is complete; the reasons stand in "
            f"{escape(str(self.directory / LEDGER_NAME))}.",
            soft_wrap=True,
        )

    def _key_lines(self) -> Iterator[str]:
        """Keys of the rows that nothing was made of, the most frequent first."""
        if self.manifest.unused_keys:
            yield f"keys not used, and harmless: {_shown(self.manifest.unused_keys)}"
        if self.manifest.unknown_keys:
            yield f"keys the recipe does not know, not used: {_shown(self.manifest.unknown_keys)}"
            yield "  check that they do not matter; --strict rejects rows that have such keys"

    def _table(self) -> Table:
        totals = self.manifest.totals
        table = Table(title=escape(str(self.directory)), title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column()
        share = 100 * totals.targets / max(totals.tokens, 1)
        done = f"{self.made} shards made" + (f", {self.kept} kept" if self.kept else "")
        table.add_row("rows", f"{totals.rows:,}", "")
        table.add_row("samples", f"{totals.samples:,}", f"{totals.truncated:,} truncated" if totals.truncated else "")
        table.add_row("tokens", f"{totals.tokens:,}", f"+ {totals.padding:,} padding")
        table.add_row("target tokens", f"{totals.targets:,}", f"{share:.1f} % of tokens")
        table.add_row("images", f"{totals.images:,}", "")
        table.add_row("patches", f"{totals.patches:,}", f"{totals.patches / max(totals.images, 1):,.0f} per image")
        table.add_row(
            "bytes", f"{totals.bytes:,}", f"{totals.bytes / 1e6:,.1f} MB in {len(self.manifest.shards)} shards"
        )
        table.add_row("rejected", f"{totals.rejected:,}", f"{100 * self.reject_rate:.2f} % of {_candidates(totals)}")
        for reason, count in self.manifest.rejects.items():
            style = "bold red" if reason == Reason.UNEXPECTED_ERROR else "yellow"
            table.add_row(f"  {reason}", f"{count:,}", "", style=style)
        table.add_row("time", f"{self.seconds:.1f} s", done)
        return table


def report_of(directory: Path, result: RunResult, seconds: float, max_reject_rate: float) -> Report:
    """The report of a finished run."""
    lengths = DatasetIndex.read(directory / INDEX_NAME).lengths
    return Report(
        directory, result.manifest, _distribution(lengths), seconds, result.made, result.kept, max_reject_rate
    )


def _candidates(totals: Totals) -> str:
    """What the rejected are a share of: rows, or, where rows gave lists, their samples."""
    return "samples of the rows" if totals.extra_candidates else "rows"


def _shown(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{key} ({counted(count, 'sample')})" for key, count in ordered[:_SHOWN_KEYS])
    rest = len(ordered) - _SHOWN_KEYS
    return f"{shown}, and {counted(rest, 'other')}" if rest > 0 else shown


def _distribution(lengths: np.ndarray[Any, np.dtype[np.int32]]) -> LengthDistribution | None:
    if len(lengths) == 0:
        return None
    values = np.percentile(lengths, _PERCENTILES, method="inverted_cdf")
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.linspace(low, high + 1, _BINS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    percentiles = {p: int(v) for p, v in zip(_PERCENTILES, values, strict=True)}
    return LengthDistribution(float(lengths.mean()), percentiles, edges.tolist(), counts.tolist())


def _histogram(lengths: LengthDistribution) -> Table:
    table = Table(title="length (tokens)", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="cyan")
    most = max(lengths.counts)
    for low, high, count in zip(lengths.edges, lengths.edges[1:], lengths.counts, strict=False):
        width = round(_BAR_WIDTH * count / most)
        table.add_row(f"{low:,}–{high - 1:,}", f"{count:,}", "█" * width or ("▏" if count else ""))
    marks = ", ".join(f"p{p} {v:,}" for p, v in lengths.percentiles.items() if p in (50, 95, 99))
    table.caption = f"mean {lengths.mean:,.0f}, {marks}"
    table.caption_justify = "left"
    return table
