"""The audit of a whole dataset: manifest, index and ledger against each other, then every shard."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.dataset import OpenShard
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import IndexRow
from vlmdata.format.ledger import Rejection, read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import (
    DOCUMENTS,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    KIND_FEATURES,
    LEDGER_NAME,
    MANIFEST_NAME,
    parse_key,
)
from vlmdata.format.selection import SELECTION, Selection, has_selected
from vlmdata.format.tokenizer_files import STRAY, tokenizer_findings
from vlmdata.media.codecs import IMAGE, RAW, codec_feature
from vlmdata.storage.join import shifted_keys
from vlmdata.verify.fault import Fault
from vlmdata.verify.manifest import (
    foreign_files,
    image_files_faults,
    listed,
    manifest_faults,
    stray_files,
    tokenizer_info_faults,
    totals_faults,
    turns_faults,
)
from vlmdata.verify.sample import SampleRules
from vlmdata.verify.shard import FolderShards, ShardAudit, audit_shard, hash_shard
from vlmdata.wording import counted
from vlmdata.workers import Workers, WorkersDied

#: What the index tells of the totals of a manifest.
_SUMS = ("samples", "tokens", "padding", "targets", "items", "patches", "truncated")


@dataclass(frozen=True)
class Audit:
    """The result of verifying a dataset.

    Attributes:
        manifest: The dataset's manifest.
        samples: Number of audited samples.
        bytes: Shard bytes re-hashed.
        faults: All faults; empty if the dataset is intact.
        foreign: Files and folders that are no part of the dataset and harm none of its readers. They are no faults.
    """

    manifest: Manifest
    samples: int
    bytes: int
    faults: list[Fault]
    foreign: tuple[str, ...] = ()


def verify_dataset(
    directory: Path,
    *,
    workers: int = 1,
    pixels: bool = True,
    on_shard: Callable[[ShardAudit], None] | None = None,
    open_shard: OpenShard | None = None,
    listing: Iterable[str] | None = None,
) -> Audit:
    """Audits a dataset directory.

    Args:
        directory: The dataset.
        workers: Number of processes.
        pixels: Whether items that a codec encoded are decoded and their patches checked, and not only stored bytes.
        on_shard: Called after each shard.
        open_shard: Opens shards that are not in the directory (see :func:`vlmdata.verify.remote.auditable`).
        listing: Paths of the files where the shards are, to find files that the manifest lacks; by default those of
            the directory.

    Raises:
        DatasetFormatError: If there is no readable manifest to audit against.
    """
    manifest = Manifest.read(directory)
    open_shard = open_shard or FolderShards(directory)
    names = list(listed(directory) if listing is None else listing)
    small = [*_check_files(directory, manifest), *_check_tokenizer(directory, manifest)]
    faults = [*manifest_faults(manifest), *small, *stray_files(names, manifest)]
    if {fault.file for fault in small} & {INDEX_NAME}:
        # The rows of an index that is not the written one would accuse sound samples.
        shards = _hash_shards(open_shard, manifest, workers)
    else:
        found, shards = _check_rows(directory, open_shard, manifest, workers, pixels)
        faults += found
    samples, turns, sound = 0, Counter[str](), True
    for result in shards:
        samples += result.samples
        faults += result.faults
        turns.update(result.turns)
        sound = sound and bool(result.turns) and not result.faults
        if on_shard is not None:
            on_shard(result)
    if sound:  # else the counts of the samples are not known
        faults += turns_faults(turns, manifest)
    size = sum(shard.bytes for shard in manifest.shards)
    return Audit(manifest, samples, size, faults, foreign_files(names, manifest))


def _check_rows(
    directory: Path, open_shard: OpenShard, manifest: Manifest, workers: int, pixels: bool
) -> tuple[list[Fault], Iterator[ShardAudit]]:
    """Checks index and ledger; returns the faults, and the audits of the shards, which run as they are read."""
    try:
        index = DatasetIndex.read(directory / INDEX_NAME)
        index.table.validate(full=True)
    except (DatasetFormatError, pa.ArrowException) as error:
        return [Fault(INDEX_NAME, "unreadable", str(error))], _hash_shards(open_shard, manifest, workers)
    faults = [
        *_check_index(index, manifest),
        *_check_features(index, manifest),
        *_check_ledger(directory, index, manifest),
    ]
    try:
        opened = _Opened(directory, open_shard, manifest, index, SampleRules.of(manifest), pixels)
    except DatasetFormatError as error:
        return [*faults, Fault(MANIFEST_NAME, "config", str(error))], iter(())
    return faults, _audit_shards(opened, workers)


def _hash_shards(open_shard: OpenShard, manifest: Manifest, workers: int) -> Iterator[ShardAudit]:
    with ThreadPoolExecutor(workers) as pool:  # hashing releases the GIL
        yield from pool.map(lambda info: hash_shard(open_shard, info), manifest.shards)


@dataclass(frozen=True, eq=False)
class _Opened:
    """Inputs of every shard's audit."""

    directory: Path
    open_shard: OpenShard
    manifest: Manifest
    index: DatasetIndex
    rules: SampleRules
    pixels: bool

    def audit(self, shard: int) -> ShardAudit:
        first, last = np.searchsorted(self.index.shard, [shard, shard + 1]).tolist()
        info = self.manifest.shards[shard]
        rows = [_as_stored(self.index.row(i), info.row_offset) for i in range(first, last)]
        return audit_shard(self.open_shard, info, rows, self.rules, pixels=self.pixels)


def _as_stored(row: IndexRow, row_offset: int) -> IndexRow:
    """A row of the index with the row number and key that its shard has."""
    if not row_offset or parse_key(row.key) is None:
        return row  # what is no key is a fault of its own
    (key,) = shifted_keys([row.key], -row_offset)
    return dataclasses.replace(row, key=key, source_row=row.source_row - row_offset)


def _audit_shards(opened: _Opened, workers: int) -> Iterator[ShardAudit]:
    shards = range(len(opened.manifest.shards))
    if workers <= 1 or len(shards) <= 1:
        yield from (opened.audit(shard) for shard in shards)
        return
    prepare = partial(_prepare, opened.directory, opened.open_shard, opened.pixels)
    # Spawned: a fork server without the libraries of preprocessing would stay that of this process.
    pool = Workers(prepare, min(workers, len(shards)), method="spawn")
    try:
        for future in [pool.submit(shard) for shard in shards]:
            yield future.result()
    except WorkersDied as error:
        raise ResourceError(
            f"{opened.directory}/{opened.manifest.shards[error.job].name}: {error.deaths} processes of the audit died "
            f"on it, the last one {error.cause}; nothing was changed. Run it again, with fewer --workers."
        ) from error
    finally:
        pool.close()


def _prepare(directory: Path, open_shard: OpenShard, pixels: bool) -> Callable[[int], ShardAudit]:
    """Runs in a worker; returns what audits a shard."""
    manifest = Manifest.read(directory)
    index = DatasetIndex.read(directory / INDEX_NAME)
    return _Opened(directory, open_shard, manifest, index, SampleRules.of(manifest), pixels).audit


def _check_files(directory: Path, manifest: Manifest) -> Iterator[Fault]:
    for name, expected in manifest.small_files.items():
        path = directory / name
        if not path.is_file():
            yield Fault(name, "missing", "file not found")
            continue
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected:
            unchecked = "; the samples were not checked against it" if name == INDEX_NAME else ""
            yield Fault(name, "sha256", f"{digest}, the manifest says {expected}{unchecked}")
        elif name == IMAGE_FILES_NAME:
            yield from image_files_faults(directory, manifest)


def _check_tokenizer(directory: Path, manifest: Manifest) -> list[Fault]:
    """Checks the tokenizer folder; if it is unchanged, also what the manifest says of it."""
    faults = [Fault(*found) for found in tokenizer_findings(directory, manifest) if found[1] != STRAY]
    return faults or list(tokenizer_info_faults(directory, manifest))


def _check_index(index: DatasetIndex, manifest: Manifest) -> Iterator[Fault]:
    rows = index.source_row
    if len(rows) and (np.diff(index.shard) < 0).any():
        yield Fault(INDEX_NAME, "order", "the samples are not in the order of their shards")
    yield from _check_keys(index)
    ends = np.concatenate([[0], np.cumsum(index.grids.astype(np.int64).prod(axis=1))])
    implied = np.diff(ends[index.grid_offsets])
    if (wrong := np.flatnonzero(implied != index.num_patches)).size:
        i = int(wrong[0])
        message = f"{counted(int(index.num_patches[i]), 'patch')} for grids with {implied[i]}"
        yield Fault(INDEX_NAME, "patches", message, int(rows[i]), index.key(i))
    totals = dataclasses.asdict(index.totals((), index.file_bytes))
    sums = {name: totals[name] for name in _SUMS}
    if manifest.totals.item_bytes:  # earlier manifests lack it
        sums["item_bytes"] = totals["item_bytes"]
    if manifest.totals.file_bytes and index.file_bytes:
        sums["file_bytes"] = index.file_bytes
    yield from totals_faults(INDEX_NAME, "totals", sums, manifest)


def _check_keys(index: DatasetIndex) -> Iterator[Fault]:
    """Checks that rows ascend, and that keys match their rows and ascend within the list of a row."""
    rows, keys = index.source_row, index.keys.to_pylist()
    if (np.diff(rows) < 0).any():
        at = int(np.flatnonzero(np.diff(rows) < 0)[0])
        yield Fault(INDEX_NAME, "order", f"source row {rows[at + 1]} follows row {rows[at]}")
    if len(set(keys)) != len(keys):
        key, count = Counter(keys).most_common(1)[0]
        yield Fault(INDEX_NAME, "keys", f"the key {key} occurs {count} times")
    named = list(zip(rows.tolist(), keys, strict=True))
    for row, key in named:
        if (parse_key(key) or (-1, -1))[0] != row:
            yield Fault(INDEX_NAME, "keys", f"the key {key!r} does not belong to source row {row}", row, key)
            break
    for before, (row, key) in pairwise(named):
        if before[0] == row and before[1] >= key:
            yield Fault(INDEX_NAME, "order", f"the key {key} follows {before[1]}", row, key)
            break


def _check_features(index: DatasetIndex, manifest: Manifest) -> Iterator[Fault]:
    """Checks that the manifest lists exactly the used features. Writers of schema 1.0 always listed image features."""
    # Where documents are not listed, such samples are faulty themselves, as are those with items of an unknown kind.
    used = index.features - ({DOCUMENTS} - set(manifest.features))
    for feature in sorted(used - set(manifest.features)):
        yield Fault(MANIFEST_NAME, "features", f"samples use {feature}, which the features do not list")
    always = {KIND_FEATURES[IMAGE], codec_feature(RAW)} if manifest.schema_version == "1.0" else set()
    for feature in sorted(set(manifest.features) - used - always):
        yield Fault(MANIFEST_NAME, "features", f"the features list {feature}, which no sample in the index uses")


def _check_ledger(directory: Path, index: DatasetIndex, manifest: Manifest) -> Iterator[Fault]:
    """Checks the ledger, and with it that all rows are in their shards."""
    rejections: list[Rejection] | None = None
    try:
        rejections = list(read_ledger(directory / LEDGER_NAME))
    except FileNotFoundError:
        pass  # a separate fault
    except (DatasetFormatError, OSError) as error:
        yield Fault(LEDGER_NAME, "unreadable", str(error))
    faults = [] if rejections is None else list(_ledger_faults(index, rejections, manifest))
    yield from faults
    rows, rejected = index.source_row.astype(np.int64), np.array([each.row for each in rejections or ()], np.int64)
    if Selection.read(manifest.source) is not None:
        if rejections is None:
            return  # rows cannot be counted without the ledger
        chosen = np.union1d(rows, rejected)
        rows, rejected = np.searchsorted(chosen, rows), np.searchsorted(chosen, rejected)
    yield from _check_shard_rows(index, rows, manifest)
    if rejections is not None and not faults:
        yield from _check_shard_rejects(np.sort(rejected), manifest)


def _ledger_faults(index: DatasetIndex, rejections: list[Rejection], manifest: Manifest) -> Iterator[Fault]:
    reasons = dict(sorted(Counter(rejection.reason.value for rejection in rejections).items()))
    if reasons != dict(manifest.rejects):
        yield Fault(LEDGER_NAME, "reasons", f"{reasons}, the manifest says {dict(manifest.rejects)}")
    problem = _uncovered(index, rejections, manifest)
    if problem:
        yield Fault(
            LEDGER_NAME,
            "coverage",
            f"{counted(len(index), 'sample')} and {counted(len(rejections), 'rejection')} do not cover each candidate "
            f"of the {manifest.totals.rows} source rows exactly once: {problem}",
        )


def _uncovered(index: DatasetIndex, rejections: list[Rejection], manifest: Manifest) -> str:
    """Describes where samples and rejections leave a gap or overlap; empty if they cover all rows and their lists.

    A row is covered by one entry without a number, or by entries 0, 1, 2, … of its list, each exactly once.
    """
    named = [parse_key(key) or (-1, -1) for key in index.keys.to_pylist()]
    named += [(r.row, -1 if r.sample is None else r.sample) for r in rejections]
    entries = np.array(named, dtype=np.int64).reshape(-1, 2)
    entries = entries[np.lexsort((entries[:, 1], entries[:, 0]))]
    rows, numbers = entries.T
    first = np.diff(rows, prepend=-1) != 0
    expected = np.where(first, np.minimum(numbers, 0), np.roll(numbers, 1) + 1)
    # No entry may follow an entry for the whole row.
    wrong = (numbers != expected) & (not has_selected(manifest.source)) | (~first & (np.roll(numbers, 1) < 0))
    if wrong.any():
        row, number = entries[np.flatnonzero(wrong)[0]].tolist()
        return f"row {row} has an entry too many or too few" + (f", before sample {number}" if number > 0 else "")
    totals, selection = manifest.totals, Selection.read(manifest.source)
    if selection is not None:
        if not (len(rows[first]) == totals.rows and selection.names(rows[first])):
            return f"they are not the rows in the manifest's {SELECTION}"
    elif not np.array_equal(rows[first], np.arange(totals.rows)):
        missing = np.setdiff1d(np.arange(totals.rows), rows)
        return f"row {missing[0]} is missing" if len(missing) else f"row {rows[-1]} is not in the source"
    if len(entries) != totals.candidates:
        return f"the manifest counts {totals.candidates} candidates, but there are {len(entries)}"
    return ""


def _check_shard_rows(index: DatasetIndex, rows: npt.NDArray[np.int64], manifest: Manifest) -> Iterator[Fault]:
    """Checks that every sample is in the shard whose rows, counted within this dataset, include its source row."""
    starts, stops = _row_ranges(manifest)
    known = np.flatnonzero((index.shard >= 0) & (index.shard < len(manifest.shards)))
    of = index.shard[known]
    for i in known[(rows[known] < starts[of]) | (rows[known] >= stops[of])].tolist():
        shard = manifest.shards[index.shard[i]]
        message = f"source row {index.source_row[i]} is not in this shard's [{shard.row_start}, {shard.row_stop})"
        yield Fault(shard.name, "index", message, int(index.source_row[i]), index.key(i))


def _check_shard_rejects(rejected: npt.NDArray[np.int64], manifest: Manifest) -> Iterator[Fault]:
    """Checks that the ledger has as many rejections in a shard's rows as the manifest says."""
    starts, stops = _row_ranges(manifest)
    counts = np.searchsorted(rejected, stops) - np.searchsorted(rejected, starts)
    for shard, count in zip(manifest.shards, counts.tolist(), strict=True):
        if count != shard.rejected:
            message = f"{shard.name}: {counted(shard.rejected, 'rejection')}, but the ledger has {count} in its rows"
            yield Fault(MANIFEST_NAME, "shards", message)


def _row_ranges(manifest: Manifest) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    starts, stops = np.array([[s.row_start, s.row_stop] for s in manifest.shards], np.int64).reshape(-1, 2).T
    return starts, stops
