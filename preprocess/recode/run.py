"""A complete recoding: makes the missing shards, then copies and completes what does not depend on the codec."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError, UsageError
from vlmdata.format.manifest import CODEC_FINGERPRINTS, Manifest, Totals, differences
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    JOINED,
    LEDGER_NAME,
    PROGRESS_DIR,
    ROWS_NAME,
    SCHEMA_VERSION,
    shard_name,
)
from vlmdata.format.source_columns import source_names
from vlmdata.format.tokenizer_files import recorded_tokenizer_files
from vlmdata.locations import is_url
from vlmdata.media.codecs import REGISTRY, codec, libraries_of
from vlmdata.preprocess.config import VideoConfig
from vlmdata.preprocess.engines.base import system_message
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.recode.shard import RecodeWork, named_shard, recode_shard
from vlmdata.preprocess.run.claim import directory_claim
from vlmdata.preprocess.run.closing import merged_index
from vlmdata.preprocess.run.directory import clear_place, is_ours, prepare_place, read_manifest, resource_errors, tidied
from vlmdata.preprocess.run.row_table import take_row_table
from vlmdata.preprocess.shards.fingerprints import (
    as_recorded,
    codec_fingerprints,
    tokenizer_identity,
    video_codec_fingerprints,
)
from vlmdata.preprocess.shards.job import RUN_FILE, ShardJob, ShardRecord, finished_records
from vlmdata.storage import Lock, Store, open_store
from vlmdata.storage.derive import Derivation, close, take_tokenizer
from vlmdata.storage.download import download
from vlmdata.storage.folder import Folder
from vlmdata.workers import WorkersDied, in_workers

_COMMAND = "vlmdata recode"
_PRELOADED = ["vlmdata.preprocess.recode.run"]
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class RecodeResult:
    """Result of a recoding."""

    old: Manifest  # manifest of the old dataset
    was: str  # name of the old codec; of a join of several codecs, their names
    manifest: Manifest  # manifest of the new dataset
    made: int  # number of shards made in this run
    kept: int  # number of shards that were already finished


def recode_dataset(
    location: str | PathLike[str],
    out: Store | str | PathLike[str],
    pixels: str | None,
    video_pixels: str | None = None,
    *,
    workers: int = 1,
    overwrite: bool = False,
    started: Callable[[int, int], None] = lambda shards, kept: None,
    shard_done: Callable[[ShardRecord], None] = lambda record: None,
) -> RecodeResult:
    """Makes, or continues, a copy of a finished dataset with its images in another codec.

    The copy equals, byte for byte, the result of preprocessing with that codec and the same libraries. A copy of a
    dataset of an earlier format has the current one.

    Args:
        location: The finished dataset: a folder, or an fsspec URL.
        out: Destination of the copy: a folder, created if absent, or the URL of a folder in an object store.
        pixels: Name of the codec; None keeps the stored bytes and only brings the dataset up to the current format.
        video_pixels: Name of the codec of videos; None is as in preprocessing: that of images, or ``zstd`` if it is
            ``raw``. Given without ``pixels``, images keep their codec.
        workers: Number of processes; the result does not depend on it.
        overwrite: Whether to remove an existing dataset.
        started: Called once with the number of shards and the number already finished.
        shard_done: Called with the record of each shard made in this run.

    Raises:
        UsageError: If the codec is unknown, the dataset already has it and the current format, or the codec cannot
            store images without their source.
        DatasetFormatError: If the dataset is damaged.
        ConfigMismatchError: If ``out`` contains another dataset or other files.
        ResourceError: If ``out`` is full or not writable, another run is using it, or workers keep dying.
    """
    old, store = OldDataset.open(location), open_store(out) if isinstance(out, str | PathLike) else out
    if pixels is None and video_pixels is not None:
        pixels = codec(old.only_codec()).name  # the dataset names it
    name = None if pixels is None else REGISTRY.find(pixels).name
    videos = None if pixels is None else VideoConfig(pixels=video_pixels).codec(REGISTRY.find(pixels)).name
    if old.has_codecs(name, videos) and old.manifest.schema_version != SCHEMA_VERSION:
        pixels = name = videos = None
    _require_change(old, store, name, videos)
    was, config = " and ".join(old.codecs), _config(old.manifest.config, name, videos)
    given = None if videos is None else video_pixels or videos
    work = RecodeWork(old.manifest, old.directory / INDEX_NAME, old.shards, pixels, given, store)
    with resource_errors(store, "cannot be written"):
        prepare_place(store)
    claim = directory_claim(store, _COMMAND)
    with resource_errors(store, "the run failed"), claim as lock, tidied(store, lock):
        if overwrite:
            clear_place(store)
        jobs = [ShardJob(n, info.row_start, info.row_stop) for n, info in enumerate(old.manifest.shards)]
        finished = _continue(store, old, config)
        if finished is not None:
            started(len(jobs), len(jobs))
            return RecodeResult(old.manifest, was, finished, made=0, kept=len(jobs))
        records = finished_records(store, jobs)
        kept = len(records)
        started(len(jobs), kept)
        missing = [job.number for job in jobs if job.number not in records]
        standing = store.listing()
        store.delete(name for number in missing if (name := shard_name(number)) in standing)
        with closing(_recoded(work, missing, workers)) as made:
            for number, record in made:
                lock.check()
                records[number] = record
                shard_done(record)
        lock.check()
        manifest = _close(store, lock, old, config, [records[job.number] for job in jobs])
        return RecodeResult(old.manifest, was, manifest, made=len(missing), kept=kept)


def _require_change(old: OldDataset, store: Store, pixels: str | None, videos: str | None) -> None:
    if pixels is None:
        if old.manifest.schema_version == SCHEMA_VERSION:
            raise UsageError(
                f"{old.name}: already has the format {SCHEMA_VERSION}; give the codec of the copy as --pixels"
            )
    elif old.has_codecs(pixels, videos):
        others = ", ".join(name for name in REGISTRY if name != pixels and not codec(name).needs_file)
        stored = f"its images with {pixels}" + (f" and its videos with {videos}" if old.video_codecs else "")
        option = "--pixels or --video-pixels" if old.video_codecs else "--pixels"
        raise UsageError(f"{old.name}: already stores {stored}; give another {option} ({others})")
    elif codec(pixels).needs_file:
        remedy = f"Run its `vlmdata preprocess` command with --pixels {pixels} and another --out."
        if JOINED in old.manifest.config:
            remedy = (
                f"Run the `vlmdata preprocess` commands of the joined datasets with --pixels {pixels}, and join the "
                "results."
            )
        raise UsageError(f"--pixels {pixels}: it stores the original files, which the dataset does not have. {remedy}")
    else:
        assert videos is not None
        for name in (pixels, videos):
            libraries_of(codec(name))  # raises an error if the codec's package is not installed
        if codec(videos).needs_file:
            raise UsageError(f"--video-pixels {videos}: it stores files of images. Choose another codec for videos.")
    local = not (is_url(old.name) or is_url(str(store)))
    if old.name == str(store) or (local and Path(old.name).resolve() == Path(str(store)).resolve()):
        raise UsageError(f"--out {store}: is the dataset to read; give another folder")


def _config(config: Mapping[str, Any], pixels: str | None, videos: str | None) -> dict[str, Any]:
    """Returns the configuration of the copy: the old one, and those of joined datasets, with codecs and libraries."""
    changed = dict(config)
    if pixels is not None and videos is not None:
        kept = {name: found for name, found in config["fingerprints"].items() if name not in CODEC_FINGERPRINTS}
        changed["options"] = {**config["options"], "pixels": pixels}
        changed["fingerprints"] = kept | codec_fingerprints(pixels)
        if "video" in config["options"]:
            changed["options"]["video"] = {**config["options"]["video"], "pixels": videos}
        if "video_decoders" in kept:
            changed["fingerprints"] |= video_codec_fingerprints(pixels, videos)
    if JOINED in config:
        changed[JOINED] = [_config(each, pixels, videos) for each in config[JOINED]]
    return changed


def _recoded(work: RecodeWork, numbers: Sequence[int], workers: int) -> Generator[tuple[int, ShardRecord]]:
    """Recodes shards in any order, in this process or in workers."""
    if workers <= 1 or len(numbers) <= 1:
        make = _prepare(work)
        yield from map(make, numbers)
        return
    with closing(in_workers(partial(_prepare, work), numbers, min(workers, len(numbers)), _PRELOADED)) as records:
        try:
            yield from records
        except WorkersDied as error:
            raise ResourceError(
                f"{work.store}: {error.deaths} worker processes died in a row on "
                f"{named_shard(work.manifest.shards[error.job])}. Out of memory? Finished shards are kept; use fewer "
                "--workers and run the same command again to continue."
            ) from None


def _prepare(work: RecodeWork) -> Callable[[int], tuple[int, ShardRecord]]:
    import torch

    torch.set_num_threads(1)  # a worker uses one core
    return partial(_make, work)


def _make(work: RecodeWork, number: int) -> tuple[int, ShardRecord]:
    try:
        return number, recode_shard(number, work)
    except (OSError, MemoryError) as error:
        what = "out of memory" if isinstance(error, MemoryError) else system_message(error)
        remedy = "use fewer --workers" if isinstance(error, MemoryError) else "free space or fix permissions"
        raise ResourceError(
            f"{work.store}: {named_shard(work.manifest.shards[number])} failed: {what}. Finished shards are kept; "
            f"{remedy} and run the same command again to continue."
        ) from error


def _continue(store: Store, old: OldDataset, config: dict[str, Any]) -> Manifest | None:
    """Checks that the store's contents are from the same recoding. Returns its manifest if it is finished."""
    store.tidy(PROGRESS_DIR)
    manifest = read_manifest(store)
    remedy = "Give another --out, or use --overwrite to start over."
    if manifest is not None:
        known = as_recorded(config, manifest.config)
        changed = differences(_of_dataset(manifest, dict(manifest.config)), _of_dataset(old.manifest, known))
        if changed:
            listed = "\n".join(f"  {line}" for line in changed)
            raise ConfigMismatchError(f"{store}: contains another finished dataset:\n{listed}\nGive another --out.")
        standing = store.listing()
        for info in manifest.shards:
            if standing.get(info.name) != info.bytes:
                raise DatasetFormatError(
                    f"{store.path(info.name)}: missing or truncated in a finished dataset. Use --overwrite to "
                    "recode all of it again, or repair it as `vlmdata verify` describes."
                )
        return manifest
    # Preprocessing the source makes the same shards but different records, so neither continues the other.
    identity = {"config": config, "recoded_from": old.manifest.fingerprint}
    if store.size(RUN_FILE) is not None:
        before = json.loads(store.read(RUN_FILE))
        changed = differences(before, {**identity, "config": as_recorded(config, before.get("config", {}))})
        if changed:
            listed = "\n".join(f"  {line}" for line in changed)
            raise ConfigMismatchError(f"{store}: contains an unfinished run of another dataset:\n{listed}\n{remedy}")
        return None
    stray = sorted(name for name in store.listing() if is_ours(name) and name != PROGRESS_DIR)
    if stray:
        raise ConfigMismatchError(
            f"{store}: contains {', '.join(stray[:5])}, but no manifest and no record of the run that made them. "
            f"{remedy}"
        )
    store.put(RUN_FILE, json.dumps(identity, sort_keys=True).encode())
    return None


def _of_dataset(manifest: Manifest, config: dict[str, Any]) -> dict[str, Any]:
    """Returns what two datasets of the same samples and codec share."""
    return {
        "config": config,
        "source": dict(manifest.source),
        "tokenizer": tokenizer_identity(manifest.tokenizer),
        "ledger_sha256": manifest.ledger_sha256,
        "samples": manifest.totals.samples,
    }


def _close(store: Store, lock: Lock, old: OldDataset, config: dict[str, Any], records: list[ShardRecord]) -> Manifest:
    """Merges the index, copies the other files, and writes the manifest last."""
    features = tuple(sorted({feature for record in records for feature in record.features}))
    kept = source_names(pq.read_schema(old.directory / INDEX_NAME))
    schema, index = merged_index(store, range(len(records)), features, kept)
    manifest = dataclasses.replace(
        old.manifest,
        config=config,
        totals=dataclasses.replace(
            Totals.summed(record.totals for record in records), file_bytes=old.manifest.totals.file_bytes
        ),
        shards=tuple(record.info for record in records),
        features=features,
        version={},
    )
    tokenizer_files = recorded_tokenizer_files(old.directory, old.manifest)
    made = Derivation(
        lambda: manifest,
        schema,
        index,
        _pieces(old.directory / LEDGER_NAME),
        tokenizer=partial(take_tokenizer, Folder(old.directory), tokenizer_files, store),
        image_files=partial(_copy_image_files, old, store),
        rows=partial(_copy_rows, old, store),
    )
    return close(store, lock, made)


def _copy_image_files(old: OldDataset, store: Store) -> Mapping[str, Any]:
    """Copies the list of image files, if there is one. Its entry of the manifest stays as it is."""
    if IMAGE_FILES in old.manifest.source:
        with store.writing(IMAGE_FILES_NAME) as file:
            for piece in _pieces(old.directory / IMAGE_FILES_NAME):
                file.write(piece)
        store.stamp(IMAGE_FILES_NAME, old.files_compared_ns)
    return {}


def _copy_rows(old: OldDataset, store: Store, index_sha256: str) -> None:
    if is_url(old.name):
        with suppress(FileNotFoundError, DatasetFormatError):
            download(f"{old.name}/{ROWS_NAME}", old.directory / ROWS_NAME, None)
    take_row_table(Folder(old.directory), old.manifest, store, index_sha256)


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as content:
        while piece := content.read(_COPIED_BYTES):
            yield piece
