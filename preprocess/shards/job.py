"""One shard as the output of a pure function: (source, row range, configuration) -> tar, index rows, rejects.

The tar is renamed first, then its records, the record ``.json`` last. A shard whose ``.json`` exists is therefore
complete, whenever the process died.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pyarrow.parquet as pq

from vlmdata.errors import SourceError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import IndexRow, index_table, used_features
from vlmdata.format.ledger import Rejection
from vlmdata.format.manifest import ShardInfo, Totals, differences, summed
from vlmdata.format.schema import PROGRESS_DIR, sample_key, shard_name, supported_features
from vlmdata.format.shard import ShardWriter
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from vlmdata.preprocess.config import Overlong, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, Document
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.encode.kept import kept_text
from vlmdata.preprocess.encode.shorten import encode_shortened
from vlmdata.preprocess.encode.variants import with_variants
from vlmdata.preprocess.recipes.base import Candidate, Recipe, candidates_of, unexpected
from vlmdata.preprocess.recipes.choice import media_for, other_form, recipe_for
from vlmdata.preprocess.recipes.image_files import RecordedFile, write_files
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.shards.kept_columns import kept_values
from vlmdata.preprocess.shards.read_ahead import rows_of
from vlmdata.preprocess.shards.rows import ROWS_SUFFIX, RowRecord, as_recorded, write_rows
from vlmdata.preprocess.shards.samples import Items, Place, count_turns, encoded_items, write_sample
from vlmdata.preprocess.sources.row_digests import row_digests_by
from vlmdata.preprocess.sources.rows import Source, id_of
from vlmdata.storage import Store

RUN_FILE = f"{PROGRESS_DIR}/run.json"
FILES_SUFFIX = "files"
_LONGEST_KEY = 120


@dataclass(frozen=True)
class ShardJob:
    """Shard ``number``, made from rows ``[row_start, row_stop)`` of ``Source.numbers``.

    Rows ``deadly`` of the source are rejected without a try, as they end the processes that try.
    """

    number: int
    row_start: int
    row_stop: int
    deadly: frozenset[int] = frozenset()


def plan_shards(rows: int, rows_per_shard: int) -> list[ShardJob]:
    """All shards of a run."""
    starts = range(0, rows, rows_per_shard)
    return [ShardJob(n, start, min(start + rows_per_shard, rows)) for n, start in enumerate(starts)]


@dataclass(frozen=True)
class ShardRecord:
    """Data of a finished shard, available without opening it."""

    info: ShardInfo
    totals: Totals
    rejects: dict[str, int]  # candidates by reason
    features: tuple[str, ...]  # that its samples use, sorted
    unused: dict[str, int] = field(default_factory=dict)  # samples by key: harmless ones
    unknown: dict[str, int] = field(default_factory=dict)  # and those that the recipe does not know
    turns: dict[str, int] = field(default_factory=dict)  # as in the manifest

    def to_json(self) -> bytes:
        """Returns the JSON text of the record."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, content: bytes) -> ShardRecord:
        """Parses the result of :meth:`to_json`.

        Raises:
            ValueError, KeyError, TypeError: If it is something else, such as the record of another version.
        """
        try:
            fields = dict(json.loads(content))
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        info, totals, features = fields.pop("info"), fields.pop("totals"), fields.pop("features")
        hash(info["name"])  # a TypeError for lists and objects
        return cls(ShardInfo(**info), Totals(**totals), features=tuple(features), **fields)


@dataclass(frozen=True, eq=False)
class RowOutcome:
    """What became of one row: its samples in the shard, and its rejected candidates."""

    samples: tuple[IndexRow, ...]
    rejections: tuple[Rejection, ...]
    files: Mapping[str, RecordedFile] = field(default_factory=dict)  # that it names, by path
    file_bytes: int = 0  # of the image files of its samples
    columns: tuple[str, ...] | None = None  # that were read; None for all
    unused: Mapping[str, int] = field(default_factory=dict)  # samples by key, as in ShardRecord
    unknown: Mapping[str, int] = field(default_factory=dict)
    turns: Mapping[str, int] = field(default_factory=dict)
    place: Mapping[str, Any] = field(default_factory=dict)  # file, number there and id, as far as known


@dataclass(frozen=True, eq=False)
class ShardContext:
    """Data shared by all shards of a run; built once per process."""

    source: Source
    recipe: Recipe
    media: MediaLoader
    encoder: Encoder
    store: Store

    def candidates(self, row: Row, files: Mapping[str, RecordedFile]) -> list[Candidate] | RowRejected:
        """Returns what the recipe makes of a row, or its rejection.

        Args:
            row: The row.
            files: The files that it names, as far as they are read.
        """
        found = attempted(partial(candidates_of, self.recipe, row, self.encoder.config.keep_columns), self.recipe)
        return found if isinstance(found, RowRejected) else with_variants(found, row, self.encoder.config)

    def source_values(self, row: Row) -> Mapping[str, Any]:
        """Returns the values of the source columns that are kept (``--keep-columns``).

        Raises:
            UsageError: If a column has values that the index does not hold.
        """
        return kept_values(row, self.encoder.config.keep_columns)

    def place(self, number: int, source_row: int, row: Row | RowRejected) -> Mapping[str, Any]:
        """Returns what the ledger says of the place of a row: file, number there, and id, as far as known."""
        known = {} if isinstance(row, RowRejected) else {"id": id_of(row.values, self.encoder.config.id_column)}
        return {**self.source.place(source_row), **known}

    def hint(self, row: Row) -> str:
        """Returns what to add to the rejection of a row."""
        return other_form(self.encoder.config.recipe, self.source, row)

    def rows(self, job: ShardJob, records: Sequence[RowRecord]) -> Sequence[RowRecord]:
        """Returns what is recorded of the rows of a shard, given what is known of them from the source."""
        return records

    def files(self, job: ShardJob, outcomes: Sequence[RowOutcome]) -> dict[str, RecordedFile]:
        """Returns the files that the rows of a shard name."""
        return {path: file for each in outcomes for path, file in each.files.items()}

    @classmethod
    def build(
        cls,
        source: Source,
        config: PreprocessConfig,
        store: Store,
        expected: TokenizerInfo,
        tokenizer: ChatTokenizer | None = None,
    ) -> ShardContext:
        """Loads the recipe, and also the tokenizer if it is None.

        Raises:
            SourceError: If the tokenizer is not that of the start of the run, ``expected``, which would change tokens.
        """
        if tokenizer is None:
            tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision, config.model_family)
        if tokenizer.info != expected:
            changed = differences(dataclasses.asdict(expected), dataclasses.asdict(tokenizer.info))
            raise SourceError(
                f"--tokenizer {expected.name}: changed during the run ({'; '.join(changed)}). "
                "Restore its files and run the same command again to continue."
            )
        media = media_for(source, config)
        return cls(source, recipe_for(source, config, media), media, Encoder(config, tokenizer), store)


def progress_name(shard: int, suffix: str) -> str:
    """Path of a shard's record, index rows, rejects, image files or rows during a run.

    ``suffix`` is ``json``, ``parquet``, ``jsonl``, ``files`` or ``rows``.
    """
    return f"{PROGRESS_DIR}/{shard_name(shard).removesuffix('.tar')}.{suffix}"


def finished_records(store: Store, jobs: Iterable[ShardJob]) -> dict[int, ShardRecord]:
    """Reads the records of the finished shards, by number: two listings and the records themselves."""
    shards, begun = store.listing(), store.listing(PROGRESS_DIR)
    numbers = [
        job.number
        for job in jobs
        if shards.get(shard_name(job.number)) is not None
        and begun.get(progress_name(job.number, "json").removeprefix(f"{PROGRESS_DIR}/")) is not None
    ]
    found = {}
    contents = store.read_all(progress_name(number, "json") for number in numbers)
    for number, content in zip(numbers, contents, strict=True):
        try:
            record = ShardRecord.from_json(content)
        except (ValueError, KeyError, TypeError):
            continue
        if shards.get(record.info.name) == record.info.bytes:
            found[number] = record
    return found


def run_shard(job: ShardJob, context: ShardContext, on_row: Callable[[RowOutcome], None] | None = None) -> ShardRecord:
    """Makes one shard and its records, calling ``on_row`` after each row. Returns the shard's record, as written.

    Raises:
        OSError: If the disk is full or not writable; leaves no partial file.
        ResourceError: If an object store cannot be written; leaves no partial file.
    """
    name, store = shard_name(job.number), context.store
    numbers = context.source.numbers[job.row_start : job.row_stop]
    outcomes: list[RowOutcome] = []
    records: list[RowRecord] = []
    with (
        store.writing(name) as file,
        ShardWriter(file) as writer,
        closing(rows_of(context.source, numbers, context.media, job.deadly)) as rows,
    ):
        for at, (source_row, row) in enumerate(rows, start=job.row_start):
            number = context.source.allotted(at, source_row)
            outcomes.append(_add_row(number, source_row, row, job.number, context, writer))
            records.append(_record_of(number, source_row, None if source_row in job.deadly else row, outcomes[-1]))
            if on_row is not None:
                on_row(outcomes[-1])
        size, digest = writer.close()
    samples = [sample for each in outcomes for sample in each.samples]
    rejections = [rejection for each in outcomes for rejection in each.rejections]
    extra = len(samples) + len(rejections) - (job.row_stop - job.row_start)
    info = ShardInfo(name, job.row_start, job.row_stop, len(samples), len(rejections), size, digest, extra)
    table = index_table(samples, supported_features())  # the columns of the dataset are known after all shards
    record = ShardRecord(
        info,
        DatasetIndex(table).totals([info], sum(each.file_bytes for each in outcomes)),
        rejects=summed([Counter(rejection.reason.value for rejection in rejections)]),
        features=tuple(sorted(used_features(samples))),
        unused=summed(each.unused for each in outcomes),
        unknown=summed(each.unknown for each in outcomes),
        turns=summed(each.turns for each in outcomes),
    )
    with store.writing(progress_name(job.number, "parquet")) as file:
        pq.write_table(table, file)
    files = context.files(job, outcomes)
    write_files(store, progress_name(job.number, FILES_SUFFIX), job.number, files)
    write_rows(store, progress_name(job.number, ROWS_SUFFIX), job.number, context.rows(job, records))
    store.put(progress_name(job.number, "jsonl"), b"".join(rejection.to_line() for rejection in rejections))
    store.put(progress_name(job.number, "json"), record.to_json())
    return record


def _record_of(number: int, source_row: int, row: Row | RowRejected | None, outcome: RowOutcome) -> RowRecord:
    """Returns the record of a row; ``row`` is None if it was rejected without a try."""
    columns = outcome.columns
    content, *read = (None,) if row is None else row_digests_by(row, [] if columns is None else [columns])
    return RowRecord(
        row=number,
        source_row=source_row,
        content=content,
        columns=columns,
        read=read[0] if read else None,
        files=[each.path for each in outcome.files.values()],
        file_bytes=outcome.file_bytes,
        notes={"unused_keys": outcome.unused, "unknown_keys": outcome.unknown, "turns": outcome.turns},
        **as_recorded(outcome.place),
    )


def _add_row(
    number: int,
    source_row: int,
    row: Row | RowRejected,
    shard: int,
    context: ShardContext,
    writer: ShardWriter,
) -> RowOutcome:
    """Writes the samples of a row to the shard. Returns what became of it."""
    config = context.encoder.config
    place = context.place(number, source_row, row)
    if isinstance(row, RowRejected):
        return RowOutcome((), (Rejection(number, row.reason, row.message, **place),), place=place)
    row, reads = row.recorded()
    # Of a key that it does not know, the recipe reports only the name; --strict rejects the row.
    reads.everything = config.strict
    with context.media.row() as files:
        candidates = context.candidates(row, files)
    if isinstance(candidates, RowRejected):
        message = candidates.message + context.hint(row)
        rejection = Rejection(number, candidates.reason, message, **place)
        return RowOutcome((), (rejection,), files, columns=reads.columns, place=place)
    samples, rejections, file_bytes = list[IndexRow](), list[Rejection](), 0
    unused, unknown, turns = Counter[str](), Counter[str](), Counter[str]()
    items: Items = {}
    for at, encoded in enumerate(encoded_candidates(candidates, context.recipe, context.encoder)):
        kept = None
        if encoded.made is not None:
            if config.keep_conversations:
                kept = kept_text(encoded.made, candidates[at], len(encoded.outcomes))
            unused.update(shortened(encoded.made.unused))
            unknown.update(shortened(encoded.made.unknown))
        values = context.source_values(row) if config.keep_columns else {}
        for in_list, outcome in encoded.outcomes:
            known = items
            try:
                if isinstance(outcome, RowRejected):
                    raise outcome
                items = encoded_items(outcome, sample_key(number, in_list.sample, in_list.of), config, known)
            except RowRejected as error:  # of the encoder, or of the codec
                rejections.append(Rejection(number, error.reason, error.message, in_list.sample, **place))
                continue
            # The samples of a conversation's turns share its images: a file counts once.
            file_bytes += sum(item.file_bytes for item in outcome.items if item not in known and not item.view)
            samples.append(write_sample(outcome, items, number, in_list, shard, writer, kept, values))
            kept = None  # the first sample has it for all
            count_turns(turns, outcome)
    return RowOutcome(
        tuple(samples), tuple(rejections), files, file_bytes, reads.columns, unused, unknown, turns, place
    )


type _Outcome = EncodedSample | RowRejected
type _Encoded = tuple[Conversation | Document | None, Sequence[_Outcome]]


@dataclass(frozen=True, eq=False)
class EncodedCandidate:
    """What a candidate became: its samples and rejections, with their places in the list of the row."""

    made: Conversation | Document | None  # None if the candidate was rejected whole
    outcomes: Sequence[tuple[Place, _Outcome]]


def encoded_candidates(candidates: Sequence[Candidate], recipe: Recipe, encoder: Encoder) -> Iterator[EncodedCandidate]:
    """Yields what each candidate of a row became, in order."""
    config, listed = encoder.config, candidates[0].sample is not None
    each_turn = config.train_turns is TrainTurns.EACH
    # One candidate after another, as each holds its images.
    encoded: Iterable[_Encoded] = (_encode(candidate, recipe, encoder) for candidate in candidates)
    if config.overlong == Overlong.SPLIT or (each_turn and not listed):
        # How many samples documents and turns give is known only after encoding all of them.
        encoded = list(encoded)
        of = sum(len(outcomes) for _, outcomes in encoded)
        listed = listed or of > 1
    else:
        # The turns of a list bound its length.
        of = sum(map(_turns, candidates)) if each_turn else len(candidates)
    numbers = count()
    for made, outcomes in encoded:
        yield EncodedCandidate(made, [(Place(next(numbers) if listed else None, of), each) for each in outcomes])


def attempted[T](make: Callable[[], T], recipe: Recipe) -> T | RowRejected:
    """Returns a result, or the rejection. An unexpected error rejects, so that one row does not end the run."""
    try:
        return make()
    except RowRejected as error:
        return error
    except MemoryError:
        raise
    except Exception as error:
        return unexpected(error, recipe)


def _encode(candidate: Candidate, recipe: Recipe, encoder: Encoder) -> _Encoded:
    if isinstance(candidate.made, RowRejected):
        return None, [candidate.made]
    encoded = attempted(partial(encode_shortened, candidate.made, encoder), recipe)
    return (None, [encoded]) if isinstance(encoded, RowRejected) else encoded


def _turns(candidate: Candidate) -> int:
    """Returns the most samples that a candidate gives with one for each turn."""
    turns = candidate.made.messages if isinstance(candidate.made, Conversation) else ()
    return max(1, sum(message.role == "assistant" for message in turns))


def shortened(keys: Iterable[str]) -> list[str]:
    """Returns keys as they are counted."""
    return [key[:_LONGEST_KEY] for key in keys]
