"""The summary of a run, or of one part of it: as a table for people, as JSON for programs."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlmdata.cli.console import results
from vlmdata.families import family
from vlmdata.format.index import DatasetIndex
from vlmdata.format.ledger import Rejection, first_rejections
from vlmdata.format.manifest import (
    DROPPED_REASONING,
    DROPPED_TURNS,
    LAST_TURNS_WITH_DROPPED_REASONING,
    ROWS_UNLIKE_INFERENCE,
    ROWS_WITH_DROPPED_REASONING,
    ROWS_WITH_DROPPED_TURNS,
    ROWS_WITH_SHRUNK_IMAGES,
    Manifest,
    Totals,
    counts_to_json,
    item_sizes,
    summed,
)
from vlmdata.format.schema import INDEX_NAME, KIND_FEATURES, LEDGER_NAME
from vlmdata.format.selection import SELECTION
from vlmdata.inspect.histogram import Histogram, histogram
from vlmdata.inspect.terminal.draw import histogram_table
from vlmdata.inspect.text import one_line
from vlmdata.media.codecs import VIDEO, codecs_of
from vlmdata.preprocess.cli.served import Bounds, bounds_lines
from vlmdata.preprocess.config import EMBEDDED, Overlong, TrainTurns
from vlmdata.preprocess.run.dataset import PartResult, RunResult
from vlmdata.preprocess.run.row_table import read_row_table
from vlmdata.reasons import Reason
from vlmdata.storage import Store
from vlmdata.wording import counted, duration

#: Number of rejection reasons shown with an example, and length of an example's message.
_EXAMPLES, _MESSAGE_LENGTH = 3, 240
#: Number of keys in a line; --json lists all.
_SHOWN_KEYS = 12
_LEARNED = {
    TrainTurns.ALL: "all assistant turns",
    TrainTurns.LAST: "the last assistant turn",
    TrainTurns.EACH: "each assistant turn, in a sample of its own",
}


@dataclass(frozen=True)
class Report:
    """Summary of a run."""

    store: Store
    result: RunResult
    lengths: Histogram | None  # of the samples, in tokens; None without samples
    seconds: float
    max_reject_rate: float  # the largest without failure
    examples: tuple[Rejection, ...]  # the first of each of the most common reasons, the most common first
    failed_row: int | None  # the first with an unexpected error
    command: str
    has_turns: bool  # whether any sample is a conversation
    served: Bounds | None = None  # image bounds of the model's own processor
    left_out: int = 0  # rejected candidates that do not count for the rate: the dataset before lacks them too
    in_train: tuple[int, int] | None = None  # distinct images of the held-out side, and those that train has too

    @property
    def manifest(self) -> Manifest:
        """Manifest of the dataset."""
        return self.result.manifest

    @property
    def reject_rate(self) -> float:
        """Rejected share of the candidates, without those that the data says are not to be learned (weight 0).

        Nor with those that were rejected before and stay so: the run that rejected them was accepted.
        """
        return self._lost / max(self.manifest.totals.candidates - self.left_out, 1)

    @property
    def _lost(self) -> int:
        """Rejected candidates that were meant to be learned."""
        lost = self.manifest.totals.rejected - self.manifest.rejects.get(Reason.NO_TARGETS, 0)
        return lost - self.left_out

    @property
    def failure(self) -> str | None:
        """Reason for exit code 1; None without failure."""
        totals = self.manifest.totals
        if totals.samples == 0:
            remedy = "Correct the data, or try another --recipe or other options"
            if set(self.manifest.rejects) <= {Reason.MISSING_IMAGE, Reason.MISSING_VIDEO}:
                kind = "image" if Reason.MISSING_IMAGE in self.manifest.rejects else "video"
                remedy = (
                    f"No {kind} was found: set --image-root to the folder to which the rows' file names are relative"
                )
            return (
                f"{counted(totals.rows, 'row')} gave no samples, so there is nothing to train on. {remedy}; "
                f"--overwrite is not needed. {self._ledger} has each row's reason."
            )
        if self.reject_rate > self.max_reject_rate:
            return (
                f"{self._lost:,} of {_candidates(totals)} rejected ({100 * self.reject_rate:.1f} %), more than "
                f"--max-reject-rate {self.max_reject_rate} allows. The dataset is complete without them. "
                f"{self._ledger} has the reasons."
            )
        return None

    @property
    def _ledger(self) -> str:
        return self.store.path(LEDGER_NAME)

    def index(self) -> DatasetIndex:
        """Reads the index of the dataset."""
        with self.store.local(INDEX_NAME) as folder:
            return DatasetIndex.read(folder / INDEX_NAME)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return {
            "directory": str(self.store),
            "fingerprint": self.manifest.fingerprint,
            "config_hash": self.manifest.config_hash,
            "recipe": self._options["recipe"],
            "tokenizer": self.manifest.tokenizer.name,
            "totals": counts_to_json(self.manifest.totals),
            "candidates": self.manifest.totals.candidates,
            "rejects": dict(self.manifest.rejects),
            "reject_rate": self.reject_rate,
            "reject_examples": [dataclasses.asdict(example) for example in self.examples],
            "unused_keys": dict(self.manifest.unused_keys),
            "unknown_keys": dict(self.manifest.unknown_keys),
            "train_turns": self._options["train_turns"],
            "turns": dict(self.manifest.turns),
            "max_reject_rate": self.max_reject_rate,
            "processor_image_bounds": self.served,
            "lengths": None if self.lengths is None else _lengths_to_json(self.lengths),
            "shards": len(self.manifest.shards),
            "shards_made": self.result.made,
            "shards_kept": self.result.kept,
            "repaired": list(self.result.repaired),
            "version": self.manifest.version.get("number", 1),
            "version_made": self.result.version is not None,
            **({"rows": self.result.version.changes} if self.result.version is not None else {}),
            **({} if self.in_train is None else {"distinct_images": self.in_train[0], "in_train": self.in_train[1]}),
            "seconds": round(self.seconds, 3),
        }

    def print(self, console: Console) -> None:
        """Prints the summary."""
        tokenizer = self.manifest.tokenizer
        trial = ", for trials only: fits no published model" if tokenizer.name == EMBEDDED else ""
        console.print(self._table())
        if self.lengths is not None:
            console.print(histogram_table(self.lengths))
        lines = []
        if self.has_turns:
            turns = self._options["train_turns"]
            lines.append(f"learned: {_LEARNED[TrainTurns(turns)]} (--train-turns {turns})")
        ids = counted(tokenizer.vocab_size, "id")
        lines.append(f"recipe {self._options['recipe']}, tokenizer {tokenizer.name} ({ids}{trial})")
        if self.served is not None and self.manifest.totals.items:
            lines += bounds_lines(self._options, family(self._options["family"]), self.served)
        lines += self._turn_lines()
        lines += self._key_lines()
        for example in self.examples:
            message = one_line(example.message, _MESSAGE_LENGTH)
            place = f" ({one_line(example.place)})" if example.place else ""
            lines.append(f"{example.reason}, for example row {example.row}{place}: {message}")
        if self.examples:
            lines.append(f"rejected rows, with reasons: {self._ledger}")
        if self.failed_row is not None:
            lines.append(f"unexpected errors: add --trace {self.failed_row} to {self.command} for the first traceback")
        if (version := self.result.version) is not None:
            rows = ", ".join(f"{count:,} {what}" for what, count in version.changes.items() if what != "edited")
            edited = f" ({counted(version.edited, 'row')} edited, by id)" if version.edited else ""
            lines.append(
                f"version {version.number}: rows {rows}{edited}. Version {version.number - 1} stays as it was."
            )
        elif not (self.result.made or self.result.repaired or self.result.closed):
            lines.append(f"no row has changed since version {self.manifest.version.get('number', 1)}: nothing to do")
        if self.in_train is not None and self.in_train[1]:
            images, shared = self.in_train
            remedy = "" if "by" in self.manifest.source[SELECTION] else "; --holdout-by image keeps each on one side"
            lines.append(f"{shared:,} of {counted(images, 'distinct image')} are in train too{remedy}")
        if self.result.repaired:
            lines.append(f"recreated and equal to the manifest: {', '.join(self.result.repaired)}")
        if self.manifest.totals.samples:
            lines.append(f"next: vlmdata verify {shlex.quote(str(self.store))}")
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)

    @property
    def _options(self) -> Mapping[str, Any]:
        options: Mapping[str, Any] = self.manifest.config["options"]
        return options

    def _turn_lines(self) -> Iterator[str]:
        """Yields lines about what the chat template and ``--overlong`` did to turns and images."""
        turns = self.manifest.turns
        last = turns.get(LAST_TURNS_WITH_DROPPED_REASONING, 0)
        earlier = turns.get(DROPPED_REASONING, 0) - last
        rows = counted(turns.get(ROWS_WITH_DROPPED_REASONING, 0), "row")
        if earlier:
            yield f"reasoning of {counted(earlier, 'earlier turn')} in {rows} is dropped by the template"
        if last:
            yield f"reasoning of {counted(last, 'last turn')} in {rows} is dropped by the template"
        if unlike := turns.get(ROWS_UNLIKE_INFERENCE, 0):
            yield from _unlike_lines(unlike, TrainTurns(self._options["train_turns"]))
        if dropped := turns.get(DROPPED_TURNS, 0):
            rows = counted(turns.get(ROWS_WITH_DROPPED_TURNS, 0), "row")
            yield f"{counted(dropped, 'early turn')} of {rows} dropped to fit --max-length"
        if shrunk := turns.get(ROWS_WITH_SHRUNK_IMAGES, 0):
            yield f"images of {counted(shrunk, 'row')} made smaller to fit --max-length"

    def _key_lines(self) -> Iterator[str]:
        """Yields lines about unused keys of the rows, the most frequent first."""
        if self.manifest.unused_keys:
            yield f"keys not used, harmless: {_shown(self.manifest.unused_keys)}"
        if self.manifest.unknown_keys:
            yield f"keys not used, unknown to the recipe: {_shown(self.manifest.unknown_keys)}"
            yield "  check that they do not matter; --strict rejects rows with such keys"

    def _table(self) -> Table:
        totals = self.manifest.totals
        table = Table(title=escape(str(self.store)), title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column()
        share = 100 * totals.targets / max(totals.tokens, 1)
        kept = f", {self.result.kept:,} kept" if self.result.kept else ""
        table.add_row("rows", f"{totals.rows:,}", "")
        # If documents are split, cuts lose nothing.
        cut = "continue in the next sample" if self._options["overlong"] == Overlong.SPLIT else "truncated"
        table.add_row("samples", f"{totals.samples:,}", f"{totals.truncated:,} {cut}" if totals.truncated else "")
        table.add_row("tokens", f"{totals.tokens:,}", f"+ {totals.padding:,} padding")
        table.add_row("target tokens", f"{totals.targets:,}", f"{share:.1f} % of tokens")
        has_videos = KIND_FEATURES[VIDEO] in self.manifest.features
        items, item = ("images and videos", "item") if has_videos else ("images", "image")
        table.add_row(items, f"{totals.items:,}", item_sizes(totals, " and ".join(codecs_of(self.manifest.features))))
        table.add_row(
            "patches",
            f"{totals.patches:,}",
            f"{totals.patches / max(totals.items, 1):,.0f} per {item}",
        )
        shards = counted(len(self.manifest.shards), "shard")
        table.add_row("bytes", f"{totals.bytes:,}", f"{totals.bytes / 1e6:,.1f} MB in {shards}")
        share = totals.rejected / max(totals.candidates, 1)
        rejected = f"{100 * share:.2f} % of {'samples of the rows' if totals.extra_candidates else 'rows'}"
        table.add_row("rejected", f"{totals.rejected:,}", rejected)
        for reason, count in _commonest_first(self.manifest):
            style = "bold red" if reason == Reason.UNEXPECTED_ERROR else "yellow"
            remark = "not counted for --max-reject-rate" if reason == Reason.NO_TARGETS else ""
            table.add_row(f"  {reason}", f"{count:,}", remark, style=style)
        table.add_row("time", duration(self.seconds), f"{counted(self.result.made, 'shard')} made{kept}")
        return table


def with_shared_images(report: Report, train: Report) -> Report:
    """Returns the report of held-out rows with the number of their images, by decoded pixels, that train has too."""
    held, known = (np.unique(each.index().pixel_checksums) for each in (report, train))
    return dataclasses.replace(report, in_train=(len(held), len(np.intersect1d(held, known, assume_unique=True))))


def report_of(
    store: Store,
    result: RunResult,
    seconds: float,
    max_reject_rate: float,
    command: str = "the command",
    left_out: int = 0,
    served: Bounds | None = None,
    is_side: bool = False,
) -> Report:
    """Creates the report of a finished run; ``command`` is the one to which to add ``--trace``, in words.

    ``left_out`` is the number of rejected candidates that do not count for the rate, ``served`` the image bounds of the
    model's own processor. Of a side of a holdout, ``is_side``, ``--trace`` takes numbers in the source.
    """
    manifest = result.manifest
    store = store.below(result.folder) if result.folder else store
    shown = [reason for reason, _ in _commonest_first(manifest)[:_EXAMPLES]]
    if manifest.rejects.get(Reason.UNEXPECTED_ERROR):
        shown.append(Reason.UNEXPECTED_ERROR)
    with store.local(INDEX_NAME, *([LEDGER_NAME] if shown else [])) as folder:
        index = pq.read_table(folder / INDEX_NAME, columns=["length", "target_turns"])
        counts = {reason: manifest.rejects[reason] for reason in shown}
        first = first_rejections(folder / LEDGER_NAME, counts, 1)
    failed = first.get(Reason.UNEXPECTED_ERROR)
    return Report(
        store=store,
        result=result,
        lengths=histogram("length", "length (tokens)", "integer", index.column("length").to_numpy()),
        seconds=seconds,
        max_reject_rate=max_reject_rate,
        examples=tuple(each for reason in dict.fromkeys(shown[:_EXAMPLES]) for each in first[reason]),
        failed_row=_traced_row(store, manifest, failed[0].row, is_side) if failed else None,
        command=command,
        has_turns=bool(index.column("target_turns").to_numpy().any()),
        left_out=left_out,
        served=served,
    )


def _traced_row(store: Store, manifest: Manifest, row: int, is_side: bool) -> int:
    """Returns the number that ``--trace`` takes for a row: in later versions, rows keep their earlier numbers."""
    if not (manifest.version and is_side):
        return row
    rows = read_row_table(store, manifest)
    return int(rows["source_row"][rows["row"].index(row).as_py()].as_py())


def show(report: Report | PartReport, talk: Console, as_json: bool) -> None:
    """Prints a summary on stdout, except as JSON, and a failure on stderr."""
    if not as_json:
        report.print(results())
    if report.failure is not None:
        talk.print("[bold red]failed:[/]", end=" ")
        talk.print(report.failure, soft_wrap=True, markup=False)


def _candidates(totals: Totals) -> str:
    """Describes the total of the rejected share: the rows or, with lists, their samples."""
    if totals.extra_candidates:
        return f"{counted(totals.candidates, 'sample')} of {counted(totals.rows, 'row')}"
    return counted(totals.rows, "row")


def _commonest_first(manifest: Manifest) -> list[tuple[str, int]]:
    return sorted(manifest.rejects.items(), key=lambda reason: (-reason[1], reason[0]))


def _shown(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{one_line(key)} ({counted(count, 'sample')})" for key, count in ordered[:_SHOWN_KEYS])
    rest = len(ordered) - _SHOWN_KEYS
    return f"{shown}, and {counted(rest, 'other')}" if rest > 0 else shown


def _unlike_lines(rows: int, turns: TrainTurns) -> Iterator[str]:
    """Yields lines about answers that are learned in another context than at inference."""
    what = f"{counted(rows, 'row')} with answers learned in another context than at inference:"
    if turns is TrainTurns.EACH:
        yield f"{what} its prompt opens a think block, which the template does not write before these answers"
        yield "  recommended: give their reasoning, or other --chat-template-kwargs"
    else:
        yield f"{what} the template writes the last turn of the assistant in another way than earlier ones"
        yield (
            "  recommended: --train-turns each, a sample for each turn with its reasoning and the context of "
            "inference; images are stored once"
        )


def _lengths_to_json(lengths: Histogram) -> dict[str, Any]:
    percentiles, edges, counts = dict(lengths.percentiles), list(lengths.edges), list(lengths.counts)
    return {"mean": lengths.mean, "percentiles": percentiles, "edges": edges, "counts": counts}


@dataclass(frozen=True)
class PartReport:
    """The result of a part. ``vlmdata finish`` checks whether too many rows were rejected."""

    store: Store
    result: PartResult
    seconds: float
    failure: None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as JSON values."""
        return {
            "directory": str(self.store),
            "part": str(self.result.part),
            "finished": self.result.finished,
            "rows": self._sum("rows"),
            "samples": self._sum("samples"),
            "rejected": self._sum("rejected"),
            "rejects": dict(sorted(self._rejects.items())),
            "bytes": self._sum("bytes"),
            "shards_made": self.result.made,
            "shards_kept": self.result.kept,
            "seconds": round(self.seconds, 3),
        }

    def print(self, console: Console) -> None:
        """Prints the summary."""
        result = self.result
        if result.finished:
            lines = [f"{self.store}: the dataset is finished; nothing to do for part {result.part}"]
        else:
            kept = f", {result.kept:,} kept" if result.kept else ""
            lines = [
                f"part {result.part}: {counted(result.made, 'shard')} made{kept}, "
                f"{counted(self._sum('samples'), 'sample')} of {counted(self._sum('rows'), 'row')}, "
                f"{self._sum('bytes') / 1e6:,.1f} MB in {duration(self.seconds)}"
            ]
            if self._rejects:
                listed = ", ".join(f"{count:,} {reason}" for reason, count in self._rejects.most_common())
                lines.append(f"{self._sum('rejected'):,} rejected: {listed}")
            lines.append(f"next, when all {result.part.parts} parts are made: vlmdata finish {self.store}")
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)

    @property
    def _rejects(self) -> Counter[str]:
        return Counter(summed(record.rejects for record in self.result.records))

    def _sum(self, name: str) -> int:
        return sum(getattr(record.totals, name) for record in self.result.records)
