"""Completes a version: merges what it keeps of the version before it with the records of the shards that were made.

Its manifest names kept shards where they are, in the folders of earlier versions. A kept shard may hold samples that
the version does not have, as in a selection. The list of versions is written last: before that, nothing shows.
"""

from __future__ import annotations

import io
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlmdata.errors import ConfigMismatchError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import index_schema, with_columns
from vlmdata.format.ledger import Rejection, read_ledger
from vlmdata.format.manifest import Manifest, ShardInfo, recounted
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    PROGRESS_DIR,
    supported_features,
)
from vlmdata.format.selection import SELECTION, Selection, rows_digest
from vlmdata.format.source_columns import SourceTypes, columns_of, source_fields, values_of
from vlmdata.format.writing import Hashing
from vlmdata.preprocess.recipes.image_files import SCHEMA as FILES_SCHEMA
from vlmdata.preprocess.recipes.image_files import FileVersions, merge_files
from vlmdata.preprocess.run.closing import most_frequent, source_values
from vlmdata.preprocess.run.row_table import read_row_table, rows_of_shards, write_row_table
from vlmdata.preprocess.run.versions import Newest, VersionInfo, read_version
from vlmdata.preprocess.shards.fingerprints import of_samples
from vlmdata.preprocess.shards.job import FILES_SUFFIX, ShardRecord, progress_name
from vlmdata.preprocess.shards.rows import sum_notes
from vlmdata.storage import Lock, Store
from vlmdata.storage.derive import Derivation, close, row_groups, take_tokenizer, with_shards
from vlmdata.storage.versions import Version, folder_of

#: What the record of kept rows says of where they are.
_PLACE = ("row", "file", "file_row", "id")


@dataclass(frozen=True, eq=False)
class _Merged:
    """The tables of a version. Shards are numbered in the version."""

    rows: pa.Table
    index: pa.Table
    ledger: list[tuple[int, str, bytes]]  # row, reason and line, by shard
    infos: list[ShardInfo]  # with their names in the version; samples and rows are not those of the version yet


def close_version(
    lock: Lock, place: Store, newest: Newest, identity: Mapping[str, Any], records: Sequence[ShardRecord]
) -> Manifest:
    """Writes a version's files, its manifest, and last the list of versions, if no other run took over.

    Args:
        lock: The lock of the dataset.
        place: The store of the version's files, which has the shards that were made.
        newest: The version before it.
        identity: What the run recorded.
        records: Of the shards that were made.

    Raises:
        ConfigMismatchError: If another version was made meanwhile, or image files changed. Writes nothing.
        DatasetFormatError: If the version before it is damaged.
    """
    info, _ = read_version(place, identity)
    if info.parent != newest.manifest.fingerprint:
        raise ConfigMismatchError(
            f"{place}: was begun after another version than {newest.number}, which is the newest now. Run the same "
            "`vlmdata preprocess` command again without --part: it starts the version over."
        )
    compared_ns = place.modified_ns(info.kept_file)
    merged = _merged(place, newest, identity, records)
    shards = len(merged.infos)
    made = Derivation(
        partial(_manifest, newest.manifest, info, identity, merged),
        merged.index.schema,
        row_groups(merged.index, shards),
        (line for _, _, line in merged.ledger),
        tokenizer=partial(take_tokenizer, newest.store, newest.manifest.tokenizer_files, place),
        image_files=partial(
            _write_image_files, place, newest, merged.rows, shards - len(records), records, compared_ns
        ),
        rows=partial(write_row_table, place, row_groups(merged.rows, shards)),
        earlier=newest.listed or (Version(1, newest.manifest.fingerprint),),
    )
    manifest = close(place, lock, made)
    place.delete_folder(PROGRESS_DIR)
    return manifest


def _merged(place: Store, newest: Newest, identity: Mapping[str, Any], records: Sequence[ShardRecord]) -> _Merged:
    info, kept = read_version(place, identity)
    old = read_row_table(newest.store, newest.manifest)
    # Both ascend by row.
    chosen = old.filter(pc.is_in(old["row"], value_set=kept["row"].combine_chunks()))
    for name in ("source_row", "content", *_PLACE[1:]):
        field = old.schema.field(name)
        if name in kept.column_names:
            column = kept[name].cast(field.type)
        else:  # a run of an earlier version began, or the places are not known any more
            column = chosen[name] if name == "content" else pa.nulls(len(chosen), field.type)
        chosen = chosen.set_column(old.schema.get_field_index(name), field, column)
    taken = np.unique(chosen["shard"].to_numpy())
    shards = range(len(records))
    now, shifted = np.searchsorted(taken, np.arange(len(newest.manifest.shards))), np.arange(len(records)) + len(taken)
    made = [with_shards(each, shifted) for each in rows_of_shards(place, shards)]
    rows = pa.concat_tables([with_shards(chosen, now), *made])
    with newest.store.local(INDEX_NAME, LEDGER_NAME) as folder:
        table = DatasetIndex.read(folder / INDEX_NAME).table
        rejections = list(read_ledger(folder / LEDGER_NAME))
    table = table.filter(pc.is_in(table["source_row"], value_set=kept["row"].combine_chunks()))
    contents = [place.read(progress_name(shard, "parquet")) for shard in shards]
    new = [with_shards(pq.read_table(io.BytesIO(content)), shifted) for content in contents]
    index = _concatenated([with_shards(table, now), *new])
    if names := identity["config"]["options"].get("keep_columns"):
        values = list(map(values_of, table.select([field.name for field in source_fields(table.schema)]).to_pylist()))
        values += [row for content in contents for row in source_values(content)]
        index = _with_source_columns(index, values, names)
    ledger = [(each.row, each.reason.value, each.to_line()) for each in _moved(rejections, kept)]
    ledger += _made_rejections(place, records)
    folder_now, before = folder_of(info.number), newest.folder
    infos = [
        replace(each, name=posixpath.relpath(posixpath.join(before, each.name), folder_now))
        for each in (newest.manifest.shards[shard] for shard in taken.tolist())
    ]
    return _Merged(rows, index, ledger, [*infos, *(record.info for record in records)])


def _manifest(parent: Manifest, info: VersionInfo, identity: Mapping[str, Any], merged: _Merged) -> Manifest:
    index, rejects = DatasetIndex(merged.index), Counter(reason for _, reason, _ in merged.ledger)
    numbers = np.unique(merged.rows["row"].to_numpy())
    shards = _counted(index, merged)
    features = tuple(sorted(index.features))
    config, notes = of_samples(identity["config"], features), sum_notes(merged.rows)
    source = dict(identity["source"])
    selection = {
        **source.get(SELECTION, {}),
        **vars(Selection(info.stop, rows_digest(numbers))),
        "version": info.number,
    }
    return replace(
        parent,
        config=config,
        source={**source, SELECTION: selection},
        totals=index.totals(shards, int(pc.sum(merged.rows["file_bytes"]).as_py() or 0)),
        rejects=dict(sorted(rejects.items())),
        shards=shards,
        features=features,
        unused_keys=most_frequent(notes["unused_keys"]),
        unknown_keys=most_frequent(notes["unknown_keys"]),
        turns=notes["turns"],
        version={"number": info.number, "parent": info.parent, "rows": info.changes, "source": source},
    )


def _counted(index: DatasetIndex, merged: _Merged) -> tuple[ShardInfo, ...]:
    """Returns the shards with the counts of the version."""
    count = len(merged.infos)
    of_shard = merged.rows["shard"].to_numpy()
    rows, samples = (np.bincount(each, minlength=count).tolist() for each in (of_shard, index.shard))
    # Rows ascend over all shards.
    rejected = np.array([row for row, _, _ in merged.ledger], np.int64)
    places = of_shard[np.searchsorted(merged.rows["row"].to_numpy(), rejected)]
    rejections = np.bincount(places, minlength=count).tolist()
    return recounted(merged.infos, rows, samples, rejections)


def _concatenated(tables: Sequence[pa.Table]) -> pa.Table:
    """Joins parts of an index; columns of optional members are those that any sample uses."""
    schema = index_schema(supported_features())
    index = DatasetIndex(pa.concat_tables([with_columns(table, schema) for table in tables]))
    used = index_schema(index.features)
    return index.table.select(used.names).cast(used)


def _with_source_columns(index: pa.Table, values: list[dict[str, Any]], names: Sequence[str]) -> pa.Table:
    """Adds the columns of the source that the index keeps. Their types depend on all samples."""
    found = SourceTypes(names)
    found.add(values)
    for name, column in columns_of(values, found.types).items():
        index = index.append_column(name, column)
    return index


def _moved(rejections: Sequence[Rejection], kept: pa.Table) -> Iterator[Rejection]:
    """Yields the rejections of kept rows, with the places that the rows have now."""
    numbers = pa.array([each.row for each in rejections], pa.int64())
    rows = (
        kept.filter(pc.is_in(kept["row"], value_set=numbers))
        .select([name for name in _PLACE if name in kept.column_names])
        .to_pylist()
    )
    places = {each.pop("row"): each for each in rows}
    for each in rejections:
        if (place := places.get(each.row)) is not None:
            known = place.pop("id", None)
            same = known is None or known == str(each.id)
            yield replace(each, **{"file": None, "file_row": None, **place, "id": each.id if same else known})


def _made_rejections(place: Store, records: Sequence[ShardRecord]) -> Iterator[tuple[int, str, bytes]]:
    for shard, record in enumerate(records):
        if record.info.rejected:
            with place.local(progress_name(shard, "jsonl")) as folder:
                for each in read_ledger(folder / progress_name(shard, "jsonl")):
                    yield each.row, each.reason.value, each.to_line()


def _write_image_files(
    place: Store,
    newest: Newest,
    rows: pa.Table,
    kept_shards: int,
    records: Sequence[ShardRecord],
    compared_ns: int,
) -> dict[str, Any]:
    """Writes the list of image files, if there are any. Returns its entry in the manifest's source.

    Args:
        place: The store of the version's files.
        newest: The version before it.
        rows: The rows of the version.
        kept_shards: Number of shards that it shares.
        records: Of the shards that were made.
        compared_ns: When the files of kept rows were compared: later changes count.

    Raises:
        ConfigMismatchError: If a file had different contents for different shards.
    """
    tables = [*_kept_files(newest, rows, kept_shards)]
    standing = place.listing(PROGRESS_DIR)
    for shard in range(len(records)):
        name = progress_name(shard, FILES_SUFFIX)
        if name.removeprefix(f"{PROGRESS_DIR}/") in standing:
            table = pq.read_table(io.BytesIO(place.read(name)), schema=FILES_SCHEMA)
            tables.append(with_shards(table, np.arange(len(records)) + kept_shards))
    if not tables:
        return {}
    versions = FileVersions()
    with place.writing(IMAGE_FILES_NAME) as unnamed:
        file = Hashing(unnamed)
        counts = merge_files(tables, file, versions)
        if versions.several():
            raise files_changed(place)
    place.stamp(IMAGE_FILES_NAME, compared_ns)
    return {IMAGE_FILES: {**counts, "sha256": file.sha256}}


def files_changed(place: Store) -> ConfigMismatchError:
    """Returns the error for image files that changed while a version was made."""
    return ConfigMismatchError(
        f"{place}: image files changed while the version was made. Run the same `vlmdata preprocess` command again "
        "without --part: it compares the files again."
    )


def _kept_files(newest: Newest, rows: pa.Table, kept_shards: int) -> Iterator[pa.Table]:
    """Yields the files that kept rows name, by shard, as the version before lists them."""
    if IMAGE_FILES not in newest.manifest.source:
        return
    with newest.store.local(IMAGE_FILES_NAME) as folder:
        listed = pq.read_table(folder / IMAGE_FILES_NAME, schema=FILES_SCHEMA)
    of_path: dict[str, dict[str, Any]] = {}
    for each in listed.to_pylist():
        known = of_path.setdefault(each["path"], each)
        if not known["xxh3_128"]:  # a row may name a file that it does not read
            of_path[each["path"]] = each
    bounds = np.searchsorted(rows["shard"].to_numpy(), np.arange(kept_shards + 1)).tolist()
    for shard, (first, stop) in enumerate(pairwise(bounds)):
        group = rows.slice(first, stop - first)
        paths = sorted({path for files in group["files"].to_pylist() for path in files or ()})
        if paths:
            yield pa.Table.from_pylist([{**of_path[path], "shard": shard} for path in paths], schema=FILES_SCHEMA)
