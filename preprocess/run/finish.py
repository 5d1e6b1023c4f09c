"""Completes a dataset whose shards were made in parts. Needs the shards and the tokenizer, but not the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError
from vlmdata.families import Family
from vlmdata.families.processor import PROCESSOR
from vlmdata.format.manifest import differences
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from vlmdata.preprocess.run.claim import Part, directory_claim, named, parts_at_work
from vlmdata.preprocess.run.closing import close_dataset
from vlmdata.preprocess.run.dataset import RunResult
from vlmdata.preprocess.run.directory import ShardPlan, read_identity, tidied
from vlmdata.preprocess.run.version_closing import close_version
from vlmdata.preprocess.run.versions import Newest, begun_version, read_version
from vlmdata.preprocess.shards.fingerprints import tokenizer_identity
from vlmdata.preprocess.shards.job import ShardRecord, finished_records
from vlmdata.storage import Store, open_store
from vlmdata.storage.versions import folder_of


@dataclass(frozen=True)
class Missing:
    """Numbers of the shards that are absent or incomplete, ascending, and the parts that are being made now."""

    plan: ShardPlan
    shards: tuple[int, ...]
    at_work: tuple[Part, ...]

    @property
    def by_part(self) -> Mapping[Part, list[int]]:
        """The missing shards, by the part that makes them."""
        parts: dict[Part, list[int]] = {}
        for shard in self.shards:
            parts.setdefault(Part.for_shard(shard, self.plan.parts), []).append(shard)
        return dict(sorted(parts.items()))


def finish_dataset(out: Store | str | PathLike[str]) -> RunResult | Missing:
    """Completes a dataset if all its shards exist. A finished dataset stays unchanged.

    Args:
        out: The ``--out`` of the parts.

    Returns:
        The finished dataset, or the missing shards. If shards are missing, nothing is written.

    Raises:
        ConfigMismatchError: If the tokenizer has changed since the shards were made, or image files changed in between.
        DatasetFormatError: If the directory has no run.
        ResourceError: If another run or the last part is still at work there, or the disk is full.
        SourceError: If the tokenizer cannot be loaded.
    """
    store = open_store(out) if isinstance(out, str | PathLike) else out
    newest, identity = Newest.read(store), read_identity(store)
    if newest is not None:
        return _finish_version(store, newest)
    if identity is None:
        raise DatasetFormatError(
            f"{store}: has no {MANIFEST_NAME} and no record of a run. Give the --out of the parts."
        )
    with directory_claim(store) as lock:
        found = _made_shards(store)
        if isinstance(found, Missing):
            return found
        plan, made = found
        with tidied(store, lock):
            tokenizer = _tokenizer(store, identity)
            lock.check()
            manifest = close_dataset(store, lock, identity, made, tokenizer, plan.parts)
            return RunResult(manifest, made=0, kept=len(made), closed=True)


def _finish_version(store: Store, newest: Newest) -> RunResult | Missing:
    """Completes the version that parts have made; returns the newest version if none is begun."""
    begun = begun_version(store, newest)
    if begun is None:
        return RunResult(newest.manifest, made=0, kept=len(newest.manifest.shards), folder=newest.folder)
    place, identity = begun
    with directory_claim(store) as lock, tidied(store, lock), directory_claim(place):
        found = _made_shards(place)
        if isinstance(found, Missing):
            return found
        place.tidy(PROGRESS_DIR)
        info, _ = read_version(place, identity)
        lock.check()
        manifest = close_version(lock, place, newest, identity, found[1])
    return RunResult(manifest, made=0, kept=len(manifest.shards), folder=folder_of(info.number), version=info)


def _made_shards(store: Store) -> tuple[ShardPlan, list[ShardRecord]] | Missing:
    """Returns the plan of a run and the records of its shards, in order, if all are made.

    Raises:
        DatasetFormatError: If the run is of an earlier version.
        ResourceError: If a part is still at work.
    """
    plan, at_work = ShardPlan.read(store), tuple(parts_at_work(store))
    if plan is None:
        raise DatasetFormatError(
            f"{store}: has a run of an earlier vlmdata, which did not record its number of shards. Run the same "
            "`vlmdata preprocess` command again to continue it."
        )
    jobs = plan.jobs
    records = finished_records(store, jobs)
    if missing := tuple(job.number for job in jobs if job.number not in records):
        return Missing(plan, missing, at_work)
    if at_work:
        raise ResourceError(
            f"{store}: all shards are made, but {named(at_work)} still at work there; wait for it or stop it"
        )
    return plan, [records[job.number] for job in jobs]


def _tokenizer(store: Store, identity: Mapping[str, Any]) -> ChatTokenizer:
    """Loads the tokenizer that the run recorded, and checks that it is unchanged."""
    options, fingerprints = identity["config"]["options"], identity["config"]["fingerprints"]
    family: str | Family = options["family"]
    if family == PROCESSOR:  # without code of its own, which a run could name
        from vlmdata.preprocess.processor import load_processor  # imports torch

        family = load_processor(options["processor"], options["tokenizer_revision"]).family
    tokenizer = load_tokenizer(options["tokenizer"], options["tokenizer_revision"], family)
    info = tokenizer.info
    recorded = {
        **identity["tokenizer"],
        "fingerprint": fingerprints["tokenizer"],
        "chat_template": fingerprints["chat_template"],
    }
    now = {**tokenizer_identity(info), "fingerprint": info.fingerprint, "chat_template": info.chat_template}
    if changed := differences(recorded, now):
        raise ConfigMismatchError(
            f"{store}: --tokenizer {options['tokenizer']} has changed since the shards were made "
            f"({'; '.join(changed)}). Restore its files and run `vlmdata finish` again."
        )
    return tokenizer
