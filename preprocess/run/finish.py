"""Completes a dataset whose shards were made in parts. Needs the shards and the tokenizer, but not the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from preprocess.run.claim import Part, directory_claim, named, parts_at_work
from preprocess.run.closing import close_dataset
from preprocess.run.dataset import RunResult
from preprocess.run.directory import ShardPlan, read_identity, read_manifest, tidied
from preprocess.shards.fingerprints import tokenizer_identity
from preprocess.shards.job import finished_records
from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError
from vlmdata.format.manifest import differences
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.storage import Store, open_store


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
    manifest, identity = read_manifest(store), read_identity(store)
    if manifest is not None:
        return RunResult(manifest, made=0, kept=len(manifest.shards))
    if identity is None:
        raise DatasetFormatError(
            f"{store}: has no {MANIFEST_NAME} and no record of a run. Give the --out of the parts."
        )
    with directory_claim(store) as lock:
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
        with tidied(store, lock):
            tokenizer = _tokenizer(store, identity)
            lock.check()
            made = [records[job.number] for job in jobs]
            manifest = close_dataset(store, lock, identity, made, tokenizer, plan.parts)
            return RunResult(manifest, made=0, kept=len(records))


def _tokenizer(store: Store, identity: Mapping[str, Any]) -> ChatTokenizer:
    """Loads the tokenizer that the run recorded, and checks that it is unchanged."""
    options, fingerprints = identity["config"]["options"], identity["config"]["fingerprints"]
    tokenizer = load_tokenizer(options["tokenizer"], options["tokenizer_revision"], options["family"])
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
