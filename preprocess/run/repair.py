"""Recreates the lost files of a finished dataset, and only these.

Shards and rejects are recreated from their rows, the index from the shards, the tokenizer folder from the tokenizer.
All files are made in a scratch folder, and replace the lost ones only if they match the manifest byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow.parquet as pq

from vlmdata.errors import DatasetFormatError
from vlmdata.format.index_row import index_table
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.format.reindex import index_rows_of
from vlmdata.format.schema import (
    IMAGE_FILES_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    PROGRESS_DIR,
    ROWS_NAME,
    TOKENIZER_DIR,
    supported_features,
)
from vlmdata.format.tokenizer_files import STRAY, hash_tokenizer_files, tokenizer_file_names, tokenizer_findings
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.engines.base import Engine, ShardWork, make_shards
from vlmdata.preprocess.run.closing import merged_image_files, merged_index, merged_ledger, saved_tokenizer
from vlmdata.preprocess.run.row_table import rows_of_shards, write_row_table
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.job import ShardJob, ShardRecord, progress_name
from vlmdata.reasons import Reason
from vlmdata.storage import Store
from vlmdata.storage.derive import writing_index, writing_ledger
from vlmdata.storage.join_checks import shard_sizes

_SCRATCH = f"{PROGRESS_DIR}/repair"
#: An empty file in the scratch folder. Its modification time is when the repair began.
_BEGUN = "begun"


@dataclass(frozen=True)
class Damage:
    """Shards, by number, and other files of a finished dataset that are missing or do not match the manifest."""

    shards: tuple[int, ...] = ()
    others: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shards or self.others)

    def names(self, manifest: Manifest) -> tuple[str, ...]:
        """Returns the names of the damaged files and folders."""
        return (*(manifest.shards[n].name for n in self.shards), *self.others)


def find_damage(store: Store, manifest: Manifest) -> Damage:
    """Checks the sizes of shards and the hashes of all other files. ``vlmdata verify`` checks shard contents."""
    sizes = shard_sizes(store, manifest)
    with store.local(*(f"{TOKENIZER_DIR}/{name}" for name in tokenizer_file_names(manifest))) as folder:
        # Added files are left alone: removing what this program did not make is up to the user.
        tokenizer = any(check != STRAY for _, check, _ in tokenizer_findings(folder, manifest))
    others = [name for name, digest in manifest.small_files.items() if store.sha256(name) != digest]
    shards = tuple(n for n, info in enumerate(manifest.shards) if sizes.get(info.name) != info.bytes)
    return Damage(shards, (*others, *([TOKENIZER_DIR] if tokenizer else [])))


def with_deadly_rows(jobs: Sequence[ShardJob], store: Store, manifest: Manifest) -> list[ShardJob]:
    """Returns all jobs, which reject the rows again that ended their workers, as an intact ledger tells."""
    if Reason.WORKER_DIED not in manifest.rejects or store.sha256(LEDGER_NAME) != manifest.ledger_sha256:
        return list(jobs)
    with store.local(LEDGER_NAME) as folder:
        rejected = read_ledger(folder / LEDGER_NAME)
        deadly = frozenset(each.row for each in rejected if each.reason == Reason.WORKER_DIED)
    return [replace(job, deadly=deadly) for job in jobs]


@dataclass(frozen=True, eq=False)
class Repair:
    """The repair of one dataset, whose files must be as its manifest says."""

    work: ShardWork
    manifest: Manifest
    jobs: Sequence[ShardJob]
    tokenizer: ChatTokenizer
    engine: Engine
    workers: int
    counters: Counters

    def apply(self, damage: Damage, shard_done: Callable[[ShardRecord], None]) -> Damage:
        """Recreates damaged files. Returns them, with shards found to be damaged while rebuilding the index.

        Raises:
            DatasetFormatError: If a recreated file does not match the manifest; it then replaces nothing.
        """
        store, scratch = self.work.store, self._scratch
        store.delete_folder(_SCRATCH)
        scratch.prepare(PROGRESS_DIR)
        scratch.put(_BEGUN, b"")
        if INDEX_NAME in damage.others:
            damage = replace(damage, shards=tuple(sorted({*damage.shards, *self._read_index_rows(damage.shards)})))
        self._make_shards(set(damage.shards), self.shards_to_make(damage), shard_done)
        if INDEX_NAME in damage.others:
            kept, shards = self.work.config.keep_columns, range(len(self.jobs))
            with writing_index(store, *merged_index(scratch, shards, self.manifest.features, kept)) as index:
                hint = "a different version of pyarrow writes different bytes"
                self._require(INDEX_NAME, index.sha256, self.manifest.index_sha256, hint)
        if LEDGER_NAME in damage.others:
            with writing_ledger(store, merged_ledger(scratch, self._rejecting)) as ledger:
                self._require(LEDGER_NAME, ledger.sha256, self.manifest.ledger_sha256, _OTHER_SOURCE)
        if IMAGE_FILES_NAME in damage.others:
            with merged_image_files(store, scratch) as files:
                found = "none" if files is None else files["sha256"]
                self._require(IMAGE_FILES_NAME, found, self.manifest.small_files[IMAGE_FILES_NAME], _OTHER_SOURCE)
            store.stamp(IMAGE_FILES_NAME, scratch.modified_ns(_BEGUN))
        if TOKENIZER_DIR in damage.others:
            self._save_tokenizer()
        shards = range(len(self.jobs))
        if store.size(ROWS_NAME) is None and self.shards_to_make(damage) >= set(shards):
            # Not worth making shards for: only a later version needs it.
            write_row_table(store, rows_of_shards(scratch, shards), self.manifest.index_sha256)
        store.delete_folder(_SCRATCH)
        return damage

    def _save_tokenizer(self) -> None:
        """Replaces the files of the tokenizer folder one by one, so that files of others in it stay."""
        with saved_tokenizer(self._scratch, self.tokenizer) as folder:
            found = hash_tokenizer_files(folder)
            expected = self.manifest.tokenizer_files or found  # a manifest of format 1.0 lists no files
            for name, digest in expected.items():
                hint = "the tokenizer's files have changed"
                self._require(f"{TOKENIZER_DIR}/{name}", found.get(name, "none"), digest, hint)
        self.work.store.prepare(*{f"{TOKENIZER_DIR}/{name}".rpartition("/")[0] for name in expected})
        for name in expected:
            self.work.store.move(f"{_SCRATCH}/{TOKENIZER_DIR}/{name}", f"{TOKENIZER_DIR}/{name}")

    def shards_to_make(self, damage: Damage) -> set[int]:
        """Returns the numbers of the shards whose rows are needed.

        These are the damaged shards, for the ledger all shards with rejected rows, and for image files all shards.
        """
        if IMAGE_FILES_NAME in damage.others:
            return set(range(len(self.jobs)))
        return {*damage.shards, *(self._rejecting if LEDGER_NAME in damage.others else ())}

    @property
    def _rejecting(self) -> list[int]:
        return [number for number, info in enumerate(self.manifest.shards) if info.rejected]

    @property
    def _scratch(self) -> Store:
        return self.work.store.below(_SCRATCH)

    def _read_index_rows(self, known: Iterable[int]) -> list[int]:
        """Reads the index rows of all intact shards. Returns the numbers of the others."""
        damaged = set(known)
        made = self.manifest.model_family
        tokens = self.manifest.tokenizer.placeholders
        store, scratch = self.work.store, self._scratch

        def read(number: int) -> bool:
            info = self.manifest.shards[number]
            with store.local(info.name) as folder:
                rows = index_rows_of(folder, number, info, tokens, made)
            if rows is None:
                return False
            with scratch.writing(progress_name(number, "parquet")) as file:
                pq.write_table(index_table(rows, supported_features()), file)
            return True

        numbers = [job.number for job in self.jobs if job.number not in damaged]
        with ThreadPoolExecutor(self.workers) as pool:  # hashing takes most of the time and releases the GIL
            return [number for number, whole in zip(numbers, pool.map(read, numbers), strict=True) if not whole]

    def _make_shards(self, damaged: set[int], numbers: set[int], shard_done: Callable[[ShardRecord], None]) -> None:
        """Makes shards and their records in the scratch folder, and moves the damaged ones into place."""
        jobs = [job for job in self.jobs if job.number in numbers]
        work = replace(self.work, store=self._scratch)
        for number, record in make_shards(self.engine, work, jobs, self.workers, self.counters):
            info = self.manifest.shards[number]
            self._require(info.name, record.info.sha256, info.sha256, _OTHER_SOURCE)
            if number in damaged:
                self.work.store.move(f"{_SCRATCH}/{info.name}", info.name)
            else:
                self._scratch.delete([info.name])
            shard_done(record)

    def _require(self, name: str, found: str, expected: str, hint: str) -> None:
        if found != expected:
            raise DatasetFormatError(
                f"{self.work.store.path(name)}: recreated with sha256 {found}, but the manifest says {expected}, so "
                f"the old file is kept: {hint}. Restore it from a copy, or recreate the dataset with --overwrite."
            )


_OTHER_SOURCE = "data that the rows refer to (image files, URLs, a recipe's packages) has changed"
