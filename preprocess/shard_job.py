"""One shard as the output of a pure function: (source, row range, configuration) -> tar, index rows, rejects.

The tar is renamed into place first, its records after it, the record ``.json`` last. So a shard whose ``.json``
exists is whole, whenever the process died.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from preprocess.candidates import Candidate, candidates_of, unexpected
from preprocess.chat.tokenizer import load_tokenizer
from preprocess.config import Overlong, PreprocessConfig
from preprocess.encode import EncodedSample, Encoder
from preprocess.image_files import recording, write_files
from preprocess.key_counts import KeyCounts
from preprocess.recipes.base import Recipe
from preprocess.recipes.choice import recipe_for
from preprocess.reject import RowRejected
from preprocess.sources.rows import Source
from vlmdata.errors import SourceError
from vlmdata.format.atomic import atomic_path, sync, temporary_path, write_atomically
from vlmdata.format.index_row import IndexRow, index_table, used_features
from vlmdata.format.ledger import Rejection
from vlmdata.format.manifest import ShardInfo, TokenizerInfo, Totals, differences
from vlmdata.format.schema import sample_key, shard_name, supported_features
from vlmdata.format.shard import EncodedItem, Placement, ShardWriter
from vlmdata.media.codecs import RAW, codec

PROGRESS_DIR = ".progress"
RUN_FILE = "run.json"
FILES_SUFFIX = "files"


@dataclass(frozen=True)
class ShardJob:
    """Rows ``[row_start, row_stop)`` of those in ``Source.numbers``, to be made into shard ``number``."""

    number: int
    row_start: int
    row_stop: int


@dataclass(frozen=True)
class ShardRecord:
    """What is known of a finished shard without opening it.

    Attributes:
        info: Its entry in the manifest.
        totals: Its sums.
        rejects: Rejected rows by reason.
        keys: Keys of rows that were not used.
        features: Format features that its samples use, sorted.
    """

    info: ShardInfo
    totals: Totals
    rejects: dict[str, int]
    keys: KeyCounts
    features: tuple[str, ...]

    def to_json(self) -> bytes:
        """JSON text of the record."""
        fields = {
            "info": dataclasses.asdict(self.info),
            "totals": dataclasses.asdict(self.totals),
            "rejects": self.rejects,
            "keys": self.keys.to_json(),
            "features": self.features,
        }
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def read(cls, path: Path) -> ShardRecord:
        """Reads a record written by :meth:`to_json`."""
        fields = json.loads(path.read_bytes())
        info, totals = ShardInfo(**fields["info"]), Totals(**fields["totals"])
        keys = KeyCounts.from_json(fields["keys"])
        return cls(info, totals, fields["rejects"], keys, tuple(fields["features"]))


@dataclass(frozen=True)
class RowOutcome:
    """What became of one row, for progress: images and true tokens of its samples, and how many were rejected."""

    images: int
    tokens: int
    rejected: int


@dataclass(frozen=True, eq=False)
class ShardContext:
    """What every shard of a run shares; built once per process."""

    source: Source
    recipe: Recipe
    encoder: Encoder
    directory: Path

    @classmethod
    def build(cls, source: Source, config: PreprocessConfig, directory: Path, expected: TokenizerInfo) -> ShardContext:
        """Loads the tokenizer and the recipe.

        Args:
            source: The rows.
            config: The options.
            directory: Where shards go.
            expected: The tokenizer as the run found it when it began.

        Raises:
            SourceError: If the tokenizer's files were edited since, so that shards would differ in their tokens.
        """
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision)
        if tokenizer.info != expected:
            changed = differences(dataclasses.asdict(expected), dataclasses.asdict(tokenizer.info))
            raise SourceError(
                f"--tokenizer {expected.name}: changed while the run was under way ({'; '.join(changed)}). "
                "Restore its files and run the same command again to continue."
            )
        return cls(source, recipe_for(source, config), Encoder(config, tokenizer), directory)


def progress_path(directory: Path, shard: int, suffix: str) -> Path:
    """Where a shard's record, index rows, rejects or image files (``json parquet jsonl files``) wait for the end."""
    return directory / PROGRESS_DIR / Path(shard_name(shard)).with_suffix(f".{suffix}").name


def finished_record(directory: Path, job: ShardJob) -> ShardRecord | None:
    """The record of a shard that is already whole, or None."""
    try:
        record = ShardRecord.read(progress_path(directory, job.number, "json"))
        size = (directory / record.info.name).stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if size == record.info.bytes else None


def run_shard(job: ShardJob, context: ShardContext, on_row: Callable[[RowOutcome], None] | None = None) -> ShardRecord:
    """Makes one shard and its records.

    Args:
        job: Which rows.
        context: Source, recipe, encoder and output folder.
        on_row: Called after every row.

    Returns:
        The shard's record, as written.

    Raises:
        OSError: If the disk is full or not writable; no partial file is left.
    """
    name = shard_name(job.number)
    # Not atomic_path: the writer has already flushed the file when it closes.
    temporary = temporary_path(context.directory / name)
    rows: list[IndexRow] = []
    rejections: list[Rejection] = []
    keys = KeyCounts()
    try:
        with recording() as files, ShardWriter(temporary) as writer:
            for number in context.source.numbers[job.row_start : job.row_stop]:
                outcome = _process_row(number, job.number, context, writer, rows, rejections, keys)
                if on_row is not None:
                    on_row(outcome)
            size, digest = writer.close()
        os.replace(temporary, context.directory / name)
        sync(context.directory)
    finally:
        temporary.unlink(missing_ok=True)
    extra = len(rows) + len(rejections) - (job.row_stop - job.row_start)
    info = ShardInfo(name, job.row_start, job.row_stop, len(rows), len(rejections), size, digest, extra)
    rejects = dict(sorted(Counter(rejection.reason.value for rejection in rejections).items()))
    record = ShardRecord(info, _totals(info, rows), rejects, keys, tuple(sorted(used_features(rows))))
    with atomic_path(progress_path(context.directory, job.number, "parquet")) as path:
        # All columns: which of them the whole dataset has is known when all its shards are made.
        pq.write_table(index_table(rows, supported_features()), path)
    write_files(progress_path(context.directory, job.number, FILES_SUFFIX), job.number, files)
    ledger = b"".join(rejection.to_line() for rejection in rejections)
    write_atomically(progress_path(context.directory, job.number, "jsonl"), ledger)
    write_atomically(progress_path(context.directory, job.number, "json"), record.to_json())
    return record


def _process_row(
    number: int,
    shard: int,
    context: ShardContext,
    writer: ShardWriter,
    rows: list[IndexRow],
    rejections: list[Rejection],
    keys: KeyCounts,
) -> RowOutcome:
    """Adds the row's samples to the shard and ``rows``, and what is wrong with the others to ``rejections``."""
    try:
        row = context.source.row(number)
        with _foreseen(context.recipe):
            candidates = candidates_of(context.recipe, row)
    except RowRejected as error:
        rejections.append(Rejection(number, error.reason, error.message))
        return RowOutcome(0, 0, 1)
    images = tokens = rejected = 0
    for place, outcome in _outcomes(candidates, context, keys):
        if isinstance(outcome, RowRejected):
            rejections.append(Rejection(number, outcome.reason, outcome.message, place.sample))
            rejected += 1
        else:
            rows.append(_write_sample(outcome, number, place, shard, writer, context.encoder.config))
            images, tokens = images + len(outcome.images), tokens + outcome.length
    return RowOutcome(images, tokens, rejected)


@dataclass(frozen=True)
class _Place:
    """Where a sample stands in the list of its row: its number, None without a list, and the list's length."""

    sample: int | None
    of: int


def _outcomes(
    candidates: list[Candidate], context: ShardContext, keys: KeyCounts
) -> Iterator[tuple[_Place, EncodedSample | RowRejected]]:
    """What became of each candidate, one after the other."""
    if context.encoder.config.overlong != Overlong.SPLIT:
        for candidate in candidates:
            (outcome,) = _encode(candidate, context, keys)
            yield _Place(candidate.sample, candidate.of), outcome
        return
    # How many samples documents give is known when all of them are encoded.
    outcomes = [outcome for candidate in candidates for outcome in _encode(candidate, context, keys)]
    listed = len(outcomes) > 1 or candidates[0].sample is not None
    for number, outcome in enumerate(outcomes):
        yield _Place(number if listed else None, len(outcomes)), outcome


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
    """Turns what nobody foresaw into a rejection: one row must not lose the others; the summary shows it."""
    try:
        yield
    except (RowRejected, MemoryError):
        raise
    except Exception as error:
        raise unexpected(error, recipe) from error


def _write_sample(
    encoded: EncodedSample, row: int, place: _Place, shard: int, writer: ShardWriter, config: PreprocessConfig
) -> IndexRow:
    key = sample_key(row, place.sample, place.of)
    grids = tuple(image.grid for image in encoded.images)
    targets = int(encoded.loss_mask.sum())
    metadata: dict[str, Any] = {
        "key": key,
        "source_row": row,
        "length": encoded.length,
        "padded_length": len(encoded.input_ids),
        "num_targets": targets,
        "target_turns": encoded.target_turns,
        "truncated": encoded.truncated,
        "image_grid_thw": grids,
        "images": [dict(image.origin) for image in encoded.images],
    }
    if place.sample is not None:
        metadata["sample"] = place.sample
    if encoded.turn_weights:
        metadata["turn_weights"] = encoded.turn_weights
    pieces, items = _pieces(encoded), _encoded_items(encoded, config)
    if items:
        del pieces["patches"]
        metadata["items"] = [item.describe() for item in items]
    placement: Placement = writer.add(key, metadata, pieces, items)
    return IndexRow(
        key=key,
        source_row=row,
        shard=shard,
        placement=placement,
        length=encoded.length,
        padded_length=len(encoded.input_ids),
        num_targets=targets,
        target_turns=encoded.target_turns,
        truncated=encoded.truncated,
        image_grid_thw=grids,
        image_starts=encoded.image_starts,
    )


def _encoded_items(encoded: EncodedSample, config: PreprocessConfig) -> list[EncodedItem]:
    """The images as the run's codec encodes them; none if patches are stored as they are."""
    if config.pixels == RAW:
        return []
    encode = codec(config.pixels).encode
    return [
        EncodedItem(encode(image.patches, image.grid, config.model_family), config.pixels) for image in encoded.images
    ]


def _pieces(encoded: EncodedSample) -> dict[str, list[Any]]:
    pieces: dict[str, list[Any]] = {
        "input_ids": [encoded.input_ids],
        "loss_mask": [encoded.loss_mask],
        "position_ids": [encoded.position_ids],
        "image_grid_thw": [encoded.image_grid_thw],
        "patches": encoded.patches,
    }
    return pieces if encoded.loss_weights is None else pieces | {"loss_weights": [encoded.loss_weights]}


def _totals(info: ShardInfo, rows: list[IndexRow]) -> Totals:
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
    )
