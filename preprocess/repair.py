"""Making again what a finished dataset has lost, and nothing else.

Shards and rejects come from the rows they were made of, the index from the shards, the tokenizer folder from the
tokenizer. Everything is made beside the dataset and takes its place only if it is, byte for byte, what the manifest
says.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq

from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.closing import file_sha256, merged_image_files, merged_index, merged_ledger, saved_tokenizer
from preprocess.counters import Counters
from preprocess.engines.base import Engine, ShardWork, make_shards
from preprocess.shard_job import PROGRESS_DIR, ShardJob, ShardRecord, progress_path
from vlmdata.errors import DatasetFormatError
from vlmdata.format.atomic import sync
from vlmdata.format.index_row import index_table
from vlmdata.format.manifest import Manifest
from vlmdata.format.reindex import index_rows_of
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    TOKENIZER_DIR,
    supported_features,
)
from vlmdata.format.tokenizer_files import hash_tokenizer_files, tokenizer_findings

_SCRATCH = "repair"


@dataclass(frozen=True)
class Damage:
    """What of a finished dataset is missing or not what the manifest says.

    Attributes:
        shards: Numbers of the shards.
        index: Whether the index is.
        ledger: Whether the ledger is.
        image_files: Whether the list of image files is.
        tokenizer: Whether the tokenizer folder is.
    """

    shards: tuple[int, ...] = ()
    index: bool = False
    ledger: bool = False
    image_files: bool = False
    tokenizer: bool = False

    def __bool__(self) -> bool:
        return bool(self.shards or self.index or self.ledger or self.image_files or self.tokenizer)

    def names(self, manifest: Manifest) -> tuple[str, ...]:
        """Names of the damaged files and folders."""
        others = (
            (INDEX_NAME, self.index),
            (LEDGER_NAME, self.ledger),
            (IMAGE_FILES_NAME, self.image_files),
            (TOKENIZER_DIR, self.tokenizer),
        )
        return (*(manifest.shards[n].name for n in self.shards), *(name for name, damaged in others if damaged))


def find_damage(directory: Path, manifest: Manifest) -> Damage:
    """Looks at sizes of shards and hashes of all other files; what is in a shard is for ``vlmdata verify``."""
    return Damage(
        shards=tuple(n for n, info in enumerate(manifest.shards) if _size(directory / info.name) != info.bytes),
        index=_hash(directory / INDEX_NAME) != manifest.index_sha256,
        ledger=_hash(directory / LEDGER_NAME) != manifest.ledger_sha256,
        image_files=_lacks_image_files(directory, manifest),
        tokenizer=any(True for _ in tokenizer_findings(directory, manifest)),
    )


def _lacks_image_files(directory: Path, manifest: Manifest) -> bool:
    recorded = manifest.source.get(IMAGE_FILES)
    return recorded is not None and _hash(directory / IMAGE_FILES_NAME) != recorded["sha256"]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _hash(path: Path) -> str:
    return file_sha256(path) if path.is_file() else ""


@dataclass(frozen=True, eq=False)
class Repair:
    """The repair of one dataset.

    Attributes:
        work: Source, options and directory.
        manifest: What the dataset must be.
        jobs: All shards.
        tokenizer: The tokenizer.
        engine: Makes shards.
        workers: Workers to use.
        counters: Counts rows, for progress.
    """

    work: ShardWork
    manifest: Manifest
    jobs: Sequence[ShardJob]
    tokenizer: ChatTokenizer
    engine: Engine
    workers: int
    counters: Counters

    def mend(self, damage: Damage, shard_done: Callable[[ShardRecord], None]) -> Damage:
        """Makes again what is damaged.

        Args:
            damage: What :func:`find_damage` found.
            shard_done: Called with the record of every shard that was made again.

        Returns:
            What was made again: the damage, and shards that were found to be damaged when the index was made.

        Raises:
            DatasetFormatError: If something made again is not what the manifest says; nothing is replaced by it.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        (self._scratch / PROGRESS_DIR).mkdir(parents=True)
        began_ns = self._scratch.stat().st_mtime_ns
        if damage.index:
            damage = replace(damage, shards=tuple(sorted({*damage.shards, *self._read_index_rows(damage.shards)})))
        self._make_shards(set(damage.shards), self.shards_to_make(damage), shard_done)
        if damage.index:
            every = range(len(self.jobs))
            with merged_index(self._directory, self._scratch, every, self.manifest.features) as path:
                hint = "another version of pyarrow than the one that wrote it writes other bytes"
                self._require(INDEX_NAME, file_sha256(path), self.manifest.index_sha256, hint)
        if damage.ledger:
            with merged_ledger(self._directory, self._scratch, self._rejecting) as path:
                self._require(LEDGER_NAME, file_sha256(path), self.manifest.ledger_sha256, _OTHER_SOURCE)
        if damage.image_files:
            with merged_image_files(self._directory, self._scratch, range(len(self.jobs)), began_ns) as files:
                expected = self.manifest.source[IMAGE_FILES]["sha256"]
                self._require(IMAGE_FILES_NAME, "none" if files is None else files["sha256"], expected, _OTHER_SOURCE)
        if damage.tokenizer:
            with saved_tokenizer(self._directory, self.tokenizer) as folder:
                files = hash_tokenizer_files(folder)
                for name, expected in self.manifest.tokenizer_files.items():
                    hint = "the tokenizer's files changed since"
                    self._require(f"{TOKENIZER_DIR}/{name}", files.get(name, "none"), expected, hint)
        shutil.rmtree(self._scratch)
        return damage

    def shards_to_make(self, damage: Damage) -> set[int]:
        """Numbers of the shards whose rows are needed.

        They are the damaged ones, for the ledger all with rejected rows, and for the list of image files all.
        """
        if damage.image_files:
            return set(range(len(self.jobs)))
        return {*damage.shards, *(self._rejecting if damage.ledger else ())}

    @property
    def _rejecting(self) -> list[int]:
        return [number for number, info in enumerate(self.manifest.shards) if info.rejected]

    @property
    def _directory(self) -> Path:
        return self.work.directory

    @property
    def _scratch(self) -> Path:
        return self._directory / PROGRESS_DIR / _SCRATCH

    def _read_index_rows(self, known: Iterable[int]) -> list[int]:
        """Reads the index rows of all shards that are whole; returns the others' numbers."""
        damaged = set(known)

        image, made = self.manifest.tokenizer.image, self.manifest.model_family

        def read(number: int) -> bool:
            rows = index_rows_of(self._directory, number, self.manifest.shards[number], image, made)
            if rows is None:
                return False
            pq.write_table(index_table(rows, supported_features()), progress_path(self._scratch, number, "parquet"))
            return True

        numbers = [job.number for job in self.jobs if job.number not in damaged]
        with ThreadPoolExecutor(self.workers) as pool:  # hashing, which takes most of the time, releases the GIL
            return [number for number, whole in zip(numbers, pool.map(read, numbers), strict=True) if not whole]

    def _make_shards(self, damaged: set[int], numbers: set[int], shard_done: Callable[[ShardRecord], None]) -> None:
        """Makes shards and their records in the scratch folder; moves the damaged ones to their place."""
        jobs = [job for job in self.jobs if job.number in numbers]
        work = replace(self.work, directory=self._scratch)
        for number, record in make_shards(self.engine, work, jobs, self.workers, self.counters):
            info = self.manifest.shards[number]
            self._require(info.name, record.info.sha256, info.sha256, _OTHER_SOURCE)
            if number in damaged:
                os.replace(self._scratch / info.name, self._directory / info.name)
                sync(self._directory)
            else:
                (self._scratch / info.name).unlink()
            shard_done(record)

    def _require(self, name: str, found: str, expected: str, hint: str) -> None:
        if found != expected:
            raise DatasetFormatError(
                f"{self._directory / name}: made again, it has sha256 {found}, the manifest says {expected}, so it is "
                f"left as it was: {hint}. Restore it from a copy, or make the dataset anew with --overwrite."
            )


_OTHER_SOURCE = "what the rows refer to (image files, URLs, a recipe's packages) changed since"
