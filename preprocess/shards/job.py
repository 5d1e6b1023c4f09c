"""One shard as the output of a pure function: (source, row range, configuration) -> tar, index rows, rejects.

The tar is renamed first, then its records, the record ``.json`` last. A shard whose ``.json`` exists is therefore
complete, whenever the process died.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from preprocess.chat.tokenizer import load_tokenizer
from preprocess.config import Overlong, PreprocessConfig, TrainTurns
from preprocess.conversation import Conversation
from preprocess.encode import EncodedSample, Encoder
from preprocess.recipes.base import Recipe
from preprocess.recipes.candidates import Candidate, candidates_of, unexpected
from preprocess.recipes.choice import media_for, other_form, recipe_for
from preprocess.recipes.image_files import recording, write_files
from preprocess.recipes.media import MediaLoader
from preprocess.reject import RowRejected
from preprocess.row import Row
from preprocess.shards.items import Items, encoded_items
from preprocess.shards.key_counts import KeyCounts
from preprocess.shards.read_ahead import rows_of
from preprocess.shards.samples import Place, count_turns, write_sample
from preprocess.sources.rows import Source
from vlmdata.errors import SourceError
from vlmdata.format.index_row import IndexRow, index_table, used_features
from vlmdata.format.ledger import Rejection
from vlmdata.format.manifest import ShardInfo, TokenizerInfo, Totals, differences
from vlmdata.format.schema import PROGRESS_DIR, sample_key, shard_name, supported_features
from vlmdata.format.shard import ShardWriter
from vlmdata.reasons import Reason
from vlmdata.storage import Store

RUN_FILE = f"{PROGRESS_DIR}/run.json"
FILES_SUFFIX = "files"


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
    """Data of a finished shard, available without opening it.

    Attributes:
        info: Its entry in the manifest.
        totals: Its totals.
        rejects: Rejected rows by reason.
        keys: Unused keys of rows.
        features: Format features that its samples use, sorted.
        turns: What the template did to assistant turns (see :mod:`vlmdata.format.turns`).
    """

    info: ShardInfo
    totals: Totals
    rejects: dict[str, int]
    keys: KeyCounts
    features: tuple[str, ...]
    turns: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Returns the JSON text of the record."""
        fields = {
            "info": dataclasses.asdict(self.info),
            "totals": dataclasses.asdict(self.totals),
            "rejects": self.rejects,
            "keys": self.keys.to_json(),
            "features": self.features,
            "turns": dict(self.turns),
        }
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def from_json(cls, content: bytes) -> ShardRecord:
        """Parses the result of :meth:`to_json`.

        Raises:
            ValueError, KeyError, TypeError: If it is something else, such as the record of another version.
        """
        fields = json.loads(content)
        info, totals = ShardInfo(**fields["info"]), Totals(**fields["totals"])
        keys = KeyCounts.from_json(fields["keys"])
        return cls(info, totals, fields["rejects"], keys, tuple(fields["features"]), fields["turns"])


@dataclass(frozen=True)
class RowOutcome:
    """What became of one row, for progress.

    Attributes:
        images: Images of its samples.
        tokens: True tokens of its samples.
        bytes: Bytes of its samples in the shard.
        rejects: Why candidates were rejected, one reason for each.
        file_bytes: Bytes of the image files of its samples.
    """

    images: int
    tokens: int
    bytes: int
    rejects: tuple[Reason, ...]
    file_bytes: int = 0


@dataclass(frozen=True, eq=False)
class ShardContext:
    """Data shared by all shards of a run; built once per process."""

    source: Source
    recipe: Recipe
    media: MediaLoader
    encoder: Encoder
    store: Store

    @classmethod
    def build(cls, source: Source, config: PreprocessConfig, store: Store, expected: TokenizerInfo) -> ShardContext:
        """Loads the tokenizer and the recipe.

        Args:
            source: The rows.
            config: The options.
            store: Destination of the shards.
            expected: The tokenizer at the start of the run.

        Raises:
            SourceError: If the tokenizer's files have changed since, which would change tokens.
        """
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision)
        if tokenizer.info != expected:
            changed = differences(dataclasses.asdict(expected), dataclasses.asdict(tokenizer.info))
            raise SourceError(
                f"--tokenizer {expected.name}: changed during the run ({'; '.join(changed)}). "
                "Restore its files and run the same command again to continue."
            )
        media = media_for(source, config)
        return cls(source, recipe_for(source, config, media), media, Encoder(config, tokenizer), store)


def progress_name(shard: int, suffix: str) -> str:
    """Path of a shard's record, index rows, rejects or image files (``json parquet jsonl files``) during a run."""
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
    """Makes one shard and its records.

    Args:
        job: The shard and its rows.
        context: Source, recipe, encoder and store.
        on_row: Called after each row.

    Returns:
        The shard's record, as written.

    Raises:
        OSError: If the disk is full or not writable; leaves no partial file.
        ResourceError: If an object store cannot be written; leaves no partial file.
    """
    name, store = shard_name(job.number), context.store
    rows: list[IndexRow] = []
    rejections: list[Rejection] = []
    keys, turns, file_bytes = KeyCounts(), Counter[str](), 0
    numbers = context.source.numbers[job.row_start : job.row_stop]
    with (
        recording() as files,
        store.writing(name) as file,
        ShardWriter(file) as writer,
        closing(rows_of(context.source, numbers, context.media, job.deadly)) as read,
    ):
        for number, row in read:
            outcome = _process_row(number, row, job.number, context, writer, rows, rejections, keys, turns)
            file_bytes += outcome.file_bytes
            if on_row is not None:
                on_row(outcome)
        size, digest = writer.close()
    extra = len(rows) + len(rejections) - (job.row_stop - job.row_start)
    info = ShardInfo(name, job.row_start, job.row_stop, len(rows), len(rejections), size, digest, extra)
    rejects = dict(sorted(Counter(rejection.reason.value for rejection in rejections).items()))
    totals, features = totals_of(info, rows, file_bytes), tuple(sorted(used_features(rows)))
    record = ShardRecord(info, totals, rejects, keys, features, turns)
    with store.writing(progress_name(job.number, "parquet")) as file:
        # All columns: the columns of the dataset are known only after all shards are made.
        pq.write_table(index_table(rows, supported_features()), file)
    write_files(store, progress_name(job.number, FILES_SUFFIX), job.number, files)
    store.put(progress_name(job.number, "jsonl"), b"".join(rejection.to_line() for rejection in rejections))
    store.put(progress_name(job.number, "json"), record.to_json())
    return record


def _process_row(
    number: int,
    read: Callable[[], Row],
    shard: int,
    context: ShardContext,
    writer: ShardWriter,
    rows: list[IndexRow],
    rejections: list[Rejection],
    keys: KeyCounts,
    turns: Counter[str],
) -> RowOutcome:
    """Adds the row's samples to the shard and ``rows``, rejections to ``rejections``, and counts keys and turns."""
    row = None
    try:
        row = read()
        with _foreseen(context.recipe), context.media.row():
            candidates = candidates_of(context.recipe, row)
    except RowRejected as error:
        other = "" if row is None else other_form(context.encoder.config.recipe, context.source, row)
        rejections.append(Rejection(number, error.reason, error.message + other))
        return RowOutcome(0, 0, 0, (error.reason,))
    images = tokens = size = file_bytes = 0
    rejects: list[Reason] = []
    template: Counter[str] = Counter()
    items: Items = {}
    for place, outcome in _outcomes(candidates, context, keys):
        if isinstance(outcome, RowRejected):
            rejections.append(Rejection(number, outcome.reason, outcome.message, place.sample))
            rejects.append(outcome.reason)
        else:
            # The samples of a conversation's turns share its images: a file counts once.
            file_bytes += sum(len(image.file) for image in outcome.images if image not in items)
            items = encoded_items(outcome, sample_key(number, place.sample, place.of), context.encoder.config, items)
            rows.append(write_sample(outcome, items, number, place, shard, writer))
            images, tokens = images + len(outcome.images), tokens + outcome.length
            size += rows[-1].placement.size
            count_turns(template, outcome)
    turns.update(template)
    return RowOutcome(images, tokens, size, tuple(rejects), file_bytes)


def _outcomes(
    candidates: list[Candidate], context: ShardContext, keys: KeyCounts
) -> Iterator[tuple[Place, EncodedSample | RowRejected]]:
    """Yields the outcome of each candidate, in order."""
    config = context.encoder.config
    if config.overlong != Overlong.SPLIT and config.train_turns is not TrainTurns.EACH:
        for candidate in candidates:
            (outcome,) = _encode(candidate, context, keys)
            yield Place(candidate.sample, candidate.of), outcome
        return
    if config.overlong != Overlong.SPLIT and candidates[0].sample is not None:
        # One conversation after another, as each holds its images. Their turns bound the length of the list.
        encoded = (outcome for candidate in candidates for outcome in _encode(candidate, context, keys))
        most = sum(_most_samples(candidate) for candidate in candidates)
        yield from ((Place(number, most), outcome) for number, outcome in enumerate(encoded))
        return
    # How many samples documents and turns give is known only after encoding all of them.
    outcomes = [outcome for candidate in candidates for outcome in _encode(candidate, context, keys)]
    listed = len(outcomes) > 1 or candidates[0].sample is not None
    for number, outcome in enumerate(outcomes):
        yield Place(number if listed else None, len(outcomes)), outcome


def _most_samples(candidate: Candidate) -> int:
    """The most samples that a candidate gives with one for each turn."""
    turns = candidate.made.messages if isinstance(candidate.made, Conversation) else ()
    return max(1, sum(message.role == "assistant" for message in turns))


def _encode(candidate: Candidate, context: ShardContext, keys: KeyCounts) -> Sequence[EncodedSample | RowRejected]:
    if isinstance(candidate.made, RowRejected):
        return [candidate.made]
    try:
        with _foreseen(context.recipe):
            encoded = context.encoder.encode_all(candidate.made)
    except RowRejected as error:
        return [error]
    keys.add(candidate.made)
    return encoded


@contextmanager
def _foreseen(recipe: Recipe) -> Iterator[None]:
    """Converts unexpected errors to rejections, so that one row does not end the run. The summary shows them."""
    try:
        yield
    except (RowRejected, MemoryError):
        raise
    except Exception as error:
        raise unexpected(error, recipe) from error


def totals_of(info: ShardInfo, rows: Sequence[IndexRow], file_bytes: int = 0) -> Totals:
    """The sums of a shard."""
    stored = {item.offset: item.bytes for row in rows for item in row.items}  # rows may share an image
    return Totals(
        rows=info.row_stop - info.row_start,
        samples=info.samples,
        rejected=info.rejected,
        tokens=sum(row.length for row in rows),
        padding=sum(row.padded_length - row.length for row in rows),
        targets=sum(row.num_targets for row in rows),
        images=sum(len(row.image_grid_thw) for row in rows),
        patches=sum(row.num_patches for row in rows),
        bytes=info.bytes,
        truncated=sum(row.truncated for row in rows),
        extra_candidates=info.extra_candidates,
        image_bytes=sum(stored.values()),
        file_bytes=file_bytes,
    )
