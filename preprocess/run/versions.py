"""Plans a version of a finished dataset: which rows of the source it keeps, and which it makes.

A row is known by its content and its image files; of its content, by the columns that were read of it when its samples
were made. A row that is there again keeps its number, its samples and their
places; all others get new numbers, above all that were ever given. So a key always means the same sample.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import ConfigMismatchError, DatasetFormatError
from vlmdata.format.manifest import Manifest, canonical_hash
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR
from vlmdata.format.selection import rows_digest
from vlmdata.format.stored_names import sha256_text
from vlmdata.preprocess.run.directory import clear_place, read_identity, read_manifest
from vlmdata.preprocess.shards.job import RUN_FILE
from vlmdata.preprocess.sources.holdout import SelectedRows
from vlmdata.preprocess.sources.row_digests import DIGEST_BYTES, Columns, Digests, RowDigests, row_digests
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage import Store
from vlmdata.storage.linked import row_numbers
from vlmdata.storage.versions import Version, folder_of, store_of_version, versions_in

#: What the rows of a source determine of its identity. A run in which nothing else differs makes a version.
_OF_ROWS = (
    "source.bytes:",
    "source.files:",
    "source.listing_sha256:",
    "source.num_files:",
    "source.reader:",  # which earlier versions lack
    "source.rows:",
    "source.selection.of_rows:",
    "source.selection.rows_sha256:",
)
#: Fields of that which are numbers.
_COUNTS = ("number", "first_number", "kept", "made", "removed", "edited")
#: Name of what a run records about the version that it makes.
_VERSION = "version"
#: Rows are compared by so many sets of columns at most, by those of most rows. Others are compared by all columns.
_MOST_COLUMNS = 16
#: Modules that processes import which read the rows.
_PRELOADED = ("vlmdata.preprocess.engines.base",)


@dataclass(frozen=True)
class Newest:
    """The newest version of a finished dataset."""

    number: int
    store: Store  # with its files
    manifest: Manifest
    listed: tuple[Version, ...]  # all versions; empty if there is only the first

    @classmethod
    def read(cls, store: Store) -> Newest | None:
        """Reads it from the store of a dataset; None if there is no finished one.

        Raises:
            DatasetFormatError: If the list of versions or a manifest is damaged.
        """
        listed = versions_in(store)
        number = listed[-1].number if listed else 1
        place = store_of_version(store, number)
        manifest = read_manifest(place)
        if manifest is None and listed:
            raise DatasetFormatError(
                f"{place.path(MANIFEST_NAME)}: missing, but {store} lists version {number}. Restore it from a copy. "
                f"Earlier versions can be opened by their numbers, as {store}@{listed[0].number}."
            )
        return None if manifest is None else cls(number, place, manifest, listed)

    @property
    def folder(self) -> str:
        """Name of its folder in the dataset; empty for the first."""
        return folder_of(self.number)


@dataclass(frozen=True)
class VersionInfo:
    """What a run records about the version that it makes."""

    number: int
    parent: str  # fingerprint of the version before it
    first_number: int  # number of the first row that is made
    kept: int  # rows that are kept
    made: int  # rows that are made
    removed: int  # rows of the parent that are not in it
    rows_sha256: str  # of the numbers of the kept rows, and of all rows in the source
    edited: int = 0  # rows that are made and have the id of a removed one

    @property
    def kept_file(self) -> str:
        """Name of the record of the kept rows in an unfinished run. Its time is when their files were compared."""
        return f"{PROGRESS_DIR}/kept-{self.rows_sha256[:32]}.parquet"

    @property
    def stop(self) -> int:
        """One past the largest row number ever given."""
        return self.first_number + self.made

    @property
    def changes(self) -> dict[str, int]:
        """Numbers of rows, for the manifest and reports."""
        edited = {"edited": self.edited} if self.edited else {}
        return {"kept": self.kept, "made": self.made, "removed": self.removed, **edited}


@dataclass(frozen=True, eq=False)
class VersionPlan:
    """A version to make."""

    info: VersionInfo
    store: Store  # of its files
    source: Source  # the rows to make
    #: The kept rows, ascending: row and source_row (int64), content, and if known file (text) and file_row (int64).
    kept: pa.Table

    def identity(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what another run must share to continue it."""
        return {**run, _VERSION: asdict(self.info)}


def differs_in_rows(changed: Sequence[str]) -> bool:
    """Returns whether two runs differ in the rows of the source alone, given the lines of their differences."""
    return bool(changed) and all(line.startswith(_OF_ROWS) for line in changed)


def plan_version(
    store: Store,
    newest: Newest,
    rows: pa.Table,
    source: Source,
    changed_files: Collection[str],
    *,
    id_column: str | None = None,
    workers: int,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> VersionPlan | None:
    """Compares the rows of a source with those of the newest version. Reads all rows, but decodes nothing.

    Args:
        store: The dataset.
        newest: Its newest version.
        rows: The rows of that.
        source: The source as it is now.
        changed_files: Paths of image files that are not as they were.
        id_column: Column with the id of a row; None for one of a usual name.
        workers: Number of processes that read rows.
        on_rows: Called occasionally with the number of rows read so far.

    Returns:
        What to make; None if all rows are as before.
    """
    of_columns = _read_columns(rows)
    found = row_digests(source, list(of_columns), id_column, workers=workers, preload=_PRELOADED, on_rows=on_rows)
    old, new = _same_rows(rows, _unchanged(rows, changed_files), found, of_columns)
    if len(old) == rows.num_rows and len(new) == source.num_rows:
        return None
    numbers = np.fromiter(source.numbers, np.int64, source.num_rows)
    is_new = np.ones(len(numbers), np.bool_)
    is_new[new] = False
    order = np.argsort(old)  # rows ascend
    kept_rows = rows["row"].to_numpy()[old[order]]
    kept_numbers = numbers[new[order]]
    chosen = np.zeros(int(numbers.max(initial=-1)) + 1, np.bool_)
    chosen[numbers[is_new]] = True
    first = row_numbers(newest.manifest)
    digest = canonical_hash([rows_digest(each) for each in (kept_rows, kept_numbers, numbers[is_new])])
    info = VersionInfo(
        newest.number + 1,
        newest.manifest.fingerprint,
        first,
        kept=len(kept_rows),
        made=int(is_new.sum()),
        removed=rows.num_rows - len(kept_rows),
        rows_sha256=digest,
        edited=_edited(rows["id"], old, found.ids.filter(pa.array(is_new))),
    )
    made = replace(source, numbers=SelectedRows.of(chosen), first_number=first)
    # A row that has gained a column is known by its content of now in the next run.
    content = [digest.ljust(DIGEST_BYTES, b"\0") for digest in found.content[new[order]].tolist()]
    columns = {"row": kept_rows, "source_row": kept_numbers, "content": pa.array(content, pa.binary(DIGEST_BYTES))}
    columns["id"] = found.ids.take(pa.array(new[order], pa.int64()))
    if source.files is not None:
        files, file_rows = source.files.places(kept_numbers)
        names = pa.DictionaryArray.from_arrays(pa.array(files, pa.int32()), pa.array(source.files.names, pa.string()))
        columns |= {"file": names, "file_row": file_rows}
    kept = pa.table(columns)
    return VersionPlan(info, store_of_version(store, info.number), made, kept)


def begin_version(plan: VersionPlan, identity: Mapping[str, Any], looked_ns: int, *, restart: bool) -> None:
    """Records the version that a run makes, or continues one. The caller has locked the store of its files.

    Args:
        plan: The version.
        identity: What another run must share to continue this one.
        looked_ns: ``time.monotonic_ns()`` before the image files of kept rows were compared.
        restart: Whether to remove what was begun with other rows, which belongs to no version yet.

    Raises:
        ConfigMismatchError: If another part began with other rows.
    """
    store = plan.store
    before = read_identity(store)
    if before is not None and before != json.loads(json.dumps(identity)):
        if not restart:
            raise ConfigMismatchError(
                f"{store}: other parts of this version were begun with other rows of the source, or other options. "
                "Give all parts the same, or run the command once without --part, which starts the version over."
            )
        before = None
    if before is None and restart:
        clear_place(store)
        store.prepare(PROGRESS_DIR)
    # A manifest here that is not listed is of a run that was killed at its end.
    store.delete([MANIFEST_NAME])
    if before is None:
        content = io.BytesIO()
        pq.write_table(plan.kept, content, compression="zstd")
        store.put(plan.info.kept_file, content.getvalue())
        # By the clock of the store: what has changed since the comparison began counts as changed.
        now_ns = store.modified_ns(plan.info.kept_file)
        store.stamp(plan.info.kept_file, now_ns - (time.monotonic_ns() - looked_ns))
        if not store.create(RUN_FILE, json.dumps(identity, sort_keys=True).encode()):
            begin_version(plan, identity, looked_ns, restart=False)  # another part has just begun it


def begun_version(store: Store, newest: Newest) -> tuple[Store, dict[str, Any]] | None:
    """Returns the store and the identity of the version that is being made; None if there is none."""
    place = store_of_version(store, newest.number + 1)
    identity = read_identity(place)
    return None if identity is None or _VERSION not in identity else (place, identity)


def read_version(store: Store, identity: Mapping[str, Any]) -> tuple[VersionInfo, pa.Table]:
    """Returns what a run recorded about the version that it makes, and the kept rows."""
    try:
        info = VersionInfo(**identity[_VERSION])
        sha256_text(info.rows_sha256, f"{store.path(RUN_FILE)}: {_VERSION}.rows_sha256")
        if any(type(getattr(info, name)) is not int for name in _COUNTS):
            raise TypeError(f"it is {identity[_VERSION]!r}"[:200])
        return info, pq.read_table(io.BytesIO(store.read(info.kept_file)))
    except (KeyError, TypeError, FileNotFoundError, pa.ArrowException) as error:
        raise DatasetFormatError(
            f"{store.path(RUN_FILE)}: {_VERSION} has the wrong form, or its record of kept rows is missing: {error}. "
            f"Remove {store}, of which no version is listed, and run the same command again."
        ) from error


def _read_columns(rows: pa.Table) -> dict[Columns, npt.NDArray[np.int64]]:
    """Returns the columns that were read of rows of a dataset, most frequent first, with the places of these rows."""
    encoded = rows["columns"].combine_chunks().dictionary_encode()
    indices = encoded.indices.fill_null(-1).to_numpy()
    names = [tuple(json.loads(text)) for text in encoded.dictionary.to_pylist()]
    frequent = np.argsort(-np.bincount(indices[indices >= 0], minlength=len(names)), kind="stable")[:_MOST_COLUMNS]
    return {names[at]: np.flatnonzero(indices == at) for at in frequent.tolist()}


def _same_rows(
    rows: pa.Table,
    usable: npt.NDArray[np.bool_],
    found: RowDigests,
    of_columns: Mapping[Columns, npt.NDArray[np.int64]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the positions of rows of a dataset and of its source that give the same samples, int64 (m,) each.

    These are equal rows. Of the others, those that are equal in all columns that were read of the former.

    Args:
        rows: Those of the dataset.
        usable: bool (n,): which of them may be kept.
        found: The hashes of those of the source.
        of_columns: Columns that were read of rows of the dataset, with their positions.
    """
    known = _hashes(rows["content"])
    old, new = _matched(known, found.content, usable & (known != b""))
    if len(new) == len(found.content) or not of_columns:
        return old, new
    read = _hashes(rows["read"])
    old_left, new_left = usable.copy(), np.ones(len(found.content), np.bool_)
    for columns, places in of_columns.items():
        old_left[old], new_left[new] = False, False
        ours, theirs = places[old_left[places] & (read[places] != b"")], np.flatnonzero(new_left)
        pairs = _matched(read[ours], found.read[columns][theirs], np.ones(len(ours), np.bool_))
        old, new = np.concatenate([old, ours[pairs[0]]]), np.concatenate([new, theirs[pairs[1]]])
    return old, new


def _edited(ids: pa.ChunkedArray, kept: npt.NDArray[np.int64], made: pa.Array) -> int:
    """Returns how many ids of rows that are not kept are those of rows that are made."""
    removed = np.ones(len(ids), np.bool_)
    removed[kept] = False
    return len(set(ids.filter(pa.array(removed)).drop_null().to_pylist()) & set(made.drop_null().to_pylist()))


def _hashes(column: pa.ChunkedArray) -> Digests:
    """Returns a column of hashes; empty ones are unknown."""
    return np.array([digest or b"" for digest in column.to_pylist()], f"S{DIGEST_BYTES}")


def _unchanged(rows: pa.Table, changed_files: Collection[str]) -> npt.NDArray[np.bool_]:
    """Returns of each row whether its files are as they were."""
    usable = np.ones(rows.num_rows, np.bool_)
    if changed_files:
        files = rows["files"].combine_chunks()
        changed = pa.compute.is_in(files.flatten(), value_set=pa.array(sorted(changed_files), pa.string()))
        of = pa.compute.list_parent_indices(files).to_numpy()
        usable[of[changed.to_numpy(zero_copy_only=False)]] = False
    return usable


def _matched(
    known: Digests, found: Digests, usable: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the positions of equal rows in both, int64 (m,) each. Of equal rows, the first is paired with the first.

    Args:
        known: S16 (n,): hashes of the dataset's rows.
        found: S16 (m,): hashes of the source's rows.
        usable: bool (n,): which of the dataset's rows may be paired.
    """
    places = np.flatnonzero(usable)
    _, groups = np.unique(np.concatenate([known[places], found]), return_inverse=True)
    old, new = groups[: len(places)].astype(np.int64), groups[len(places) :].astype(np.int64)
    ranks = [_ranks(each) for each in (old, new)]
    width = 1 + max((int(each.max(initial=0)) for each in ranks), default=0)
    _, of_old, of_new = np.intersect1d(
        old * width + ranks[0], new * width + ranks[1], assume_unique=True, return_indices=True
    )
    return places[of_old], of_new.astype(np.int64)


def _ranks(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns of each element how many equal ones are before it, int64 (n,)."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(firsts, np.diff(np.append(firsts, len(groups))))
    return ranks
