"""The summary of a run: as a table for people, as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from preprocess.config import EMBEDDED, Overlong
from preprocess.run import RunResult
from vlmdata.format.index import DatasetIndex
from vlmdata.format.ledger import Reason, Rejection, read_ledger
from vlmdata.format.manifest import Manifest, Totals, counts_to_json
from vlmdata.format.schema import INDEX_NAME, LEDGER_NAME
from vlmdata.inspect.text import one_line
from vlmdata.wording import counted, duration

_PERCENTILES = (0, 25, 50, 75, 95, 99, 100)
_BINS, _BAR_WIDTH = 10, 32
#: Reasons of rejection that are shown with an example, and characters of an example's message.
_EXAMPLES, _MESSAGE_LENGTH = 3, 240
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
        mended: Files and folders that the finished dataset had lost and that were made again.
        max_reject_rate: Largest rejected share that is no failure.
        examples: The first rejection for each of the commonest reasons, commonest first.
    """

    directory: Path
    manifest: Manifest
    lengths: LengthDistribution | None
    seconds: float
    made: int
    kept: int
    mended: tuple[str, ...]
    max_reject_rate: float
    examples: tuple[Rejection, ...]

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
    def failure(self) -> str | None:
        """Why the command ends in exit code 1; None if it does not."""
        totals = self.manifest.totals
        if totals.samples == 0:
            return (
                f"no sample came of {counted(totals.rows, 'row')}, so there is nothing to train on. Mend the data, or "
                "try another --recipe or other options; --overwrite is not needed for that. "
                f"{self._ledger} has each row's reason."
            )
        if self.reject_rate > self.max_reject_rate:
            return (
                f"{totals.rejected:,} of {_candidates(totals)} rejected ({100 * self.reject_rate:.1f} %), more than "
                f"--max-reject-rate {self.max_reject_rate} allows. The dataset of the others is complete. "
                f"{self._ledger} has the reasons."
            )
        return None

    @property
    def _ledger(self) -> Path:
        return self.directory / LEDGER_NAME

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "directory": str(self.directory),
            "fingerprint": self.manifest.fingerprint,
            "config_hash": self.manifest.config_hash,
            "recipe": self._recipe,
            "tokenizer": self.manifest.tokenizer.name,
            "totals": counts_to_json(self.manifest.totals),
            "candidates": self.manifest.totals.candidates,
            "rejects": dict(self.manifest.rejects),
            "reject_rate": self.reject_rate,
            "reject_examples": [dataclasses.asdict(example) for example in self.examples],
            "unused_keys": dict(self.manifest.unused_keys),
            "unknown_keys": dict(self.manifest.unknown_keys),
            "max_reject_rate": self.max_reject_rate,
            "lengths": dataclasses.asdict(self.lengths) if self.lengths else None,
            "shards": len(self.manifest.shards),
            "shards_made": self.made,
            "shards_kept": self.kept,
            "mended": list(self.mended),
            "seconds": round(self.seconds, 3),
        }

    def print(self, console: Console) -> None:
        """Prints the summary."""
        tokenizer = self.manifest.tokenizer
        trial = ", for trials: no published model shares it" if tokenizer.name == EMBEDDED else ""
        console.print(self._table())
        if self.lengths is not None:
            console.print(_histogram(self.lengths))
        lines = [f"recipe {self._recipe}, tokenizer {tokenizer.name} ({counted(tokenizer.vocab_size, 'id')}{trial})"]
        lines += self._key_lines()
        for example in self.examples:
            message = one_line(example.message, _MESSAGE_LENGTH)
            lines.append(f"{example.reason}, for example row {example.row}: {message}")
        if self.examples:
            lines.append(f"rejected rows, with reasons: {self._ledger}")
        if self.failed_row is not None:
            lines.append(f"unexpected errors: add --trace {self.failed_row} to the command for the first traceback")
        if self.mended:
            lines.append(f"made again, as the manifest has them: {', '.join(self.mended)}")
        if self.manifest.totals.samples:
            lines.append(f"next: vlmdata verify {self.directory}")
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)

    @property
    def _recipe(self) -> str:
        return str(self.manifest.config["options"]["recipe"])

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
        done = f"{counted(self.made, 'shard')} made" + (f", {self.kept:,} kept" if self.kept else "")
        table.add_row("rows", f"{totals.rows:,}", "")
        # Where documents are split, nothing is lost by a cut.
        cut = "truncated"
        if self.manifest.config["options"]["overlong"] == Overlong.SPLIT:
            cut = "go on in the next sample"
        table.add_row("samples", f"{totals.samples:,}", f"{totals.truncated:,} {cut}" if totals.truncated else "")
        table.add_row("tokens", f"{totals.tokens:,}", f"+ {totals.padding:,} padding")
        table.add_row("target tokens", f"{totals.targets:,}", f"{share:.1f} % of tokens")
        table.add_row("images", f"{totals.images:,}", "")
        table.add_row("patches", f"{totals.patches:,}", f"{totals.patches / max(totals.images, 1):,.0f} per image")
        table.add_row(
            "bytes",
            f"{totals.bytes:,}",
            f"{totals.bytes / 1e6:,.1f} MB in {counted(len(self.manifest.shards), 'shard')}",
        )
        rejected = f"{100 * self.reject_rate:.2f} % of {'samples of the rows' if totals.extra_candidates else 'rows'}"
        table.add_row("rejected", f"{totals.rejected:,}", rejected)
        for reason, count in _commonest_first(self.manifest):
            style = "bold red" if reason == Reason.UNEXPECTED_ERROR else "yellow"
            table.add_row(f"  {reason}", f"{count:,}", "", style=style)
        table.add_row("time", duration(self.seconds), done)
        return table


def report_of(directory: Path, result: RunResult, seconds: float, max_reject_rate: float) -> Report:
    """The report of a finished run."""
    manifest = result.manifest
    return Report(
        directory=directory,
        manifest=manifest,
        lengths=_distribution(DatasetIndex.read(directory / INDEX_NAME).lengths),
        seconds=seconds,
        made=result.made,
        kept=result.kept,
        mended=result.mended,
        max_reject_rate=max_reject_rate,
        examples=_examples(directory / LEDGER_NAME, [reason for reason, _ in _commonest_first(manifest)[:_EXAMPLES]]),
    )


def _candidates(totals: Totals) -> str:
    """What the rejected are a share of: the rows or, where rows gave lists, their samples."""
    if totals.extra_candidates:
        return f"{counted(totals.candidates, 'sample')} of {counted(totals.rows, 'row')}"
    return counted(totals.rows, "row")


def _commonest_first(manifest: Manifest) -> list[tuple[str, int]]:
    return sorted(manifest.rejects.items(), key=lambda reason: (-reason[1], reason[0]))


def _examples(ledger: Path, reasons: Sequence[str]) -> tuple[Rejection, ...]:
    """The first rejection for each reason. Reads no further in the ledger than it must."""
    found: dict[str, Rejection] = {}
    if reasons:
        for rejection in read_ledger(ledger):
            if rejection.reason in reasons:
                found.setdefault(rejection.reason, rejection)
            if len(found) == len(reasons):
                break
    return tuple(found[reason] for reason in reasons if reason in found)


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
