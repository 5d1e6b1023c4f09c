"""Makes the next version of a finished dataset: whole, or one part of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vlmdata.errors import ConfigMismatchError, DatasetFormatError
from vlmdata.format.schema import PROGRESS_DIR
from vlmdata.machine import available_cores
from vlmdata.preprocess.run.claim import Part, part_claim, whole_claim
from vlmdata.preprocess.run.directory import ShardPlan, identity_of, prepare_place, resource_errors, some
from vlmdata.preprocess.run.making import PartResult, Run, RunResult, Watcher
from vlmdata.preprocess.run.repair import find_damage
from vlmdata.preprocess.run.row_table import read_row_table
from vlmdata.preprocess.run.version_closing import close_version, files_changed
from vlmdata.preprocess.run.versions import Newest, VersionPlan, begin_version, differs_in_rows, plan_version
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.fingerprints import identity_changes, refusal
from vlmdata.storage import Lock, Store
from vlmdata.storage.versions import folder_of


@dataclass(frozen=True)
class Changes:
    """What may have changed since a dataset was finished."""

    source: Sequence[str]  # differences of the identities of the source, one line each
    files: Mapping[int, Sequence[str]]  # image files that have changed, by shard
    looked_ns: int  # time.monotonic_ns() before the image files were compared


def changes_since(run: Run, newest: Newest) -> Changes | None:
    """Returns which rows and image files may have changed since a version was made.

    None if nothing has, or if other things have that make it another run.
    """
    lines = identity_changes(identity_of(newest.manifest), run.identity)
    begins_anew = not newest.folder and newest.manifest.totals.samples == 0
    if begins_anew or (lines and not differs_in_rows(lines)):
        return None
    looked_ns = time.monotonic_ns()
    files = replace(run.earlier, store=newest.store).changed_since(newest.manifest)
    return Changes(lines, files, looked_ns) if lines or files else None


def make_version(run: Run, store: Store, newest: Newest, changes: Changes, lock: Lock, watcher: Watcher) -> RunResult:
    """Makes the next version of a finished dataset, unless all rows are as before."""
    plan = _compared(run, store, newest, changes, watcher)
    if plan is None:
        return as_before(newest)
    prepare_place(plan.store)
    with whole_claim(plan.store) as own:
        version = _run_of_version(run, plan)
        begin_version(plan, version.identity, changes.looked_ns, restart=True)
        plan.store.tidy(PROGRESS_DIR)
        (ShardPlan.read(plan.store) or version.plan).write(plan.store)
        records, made = version.make(version.jobs, watcher, own)
        _require_unchanged(run, newest, plan, changes)
        lock.check()
        manifest = close_version(lock, plan.store, newest, version.identity, records)
    return RunResult(manifest, made, len(manifest.shards) - made, folder=folder_of(plan.info.number), version=plan.info)


def make_part_of_version(
    run: Run, store: Store, newest: Newest, changes: Changes, part: Part, watcher: Watcher
) -> PartResult | None:
    """Makes one part of the shards of the next version; None if all rows are as before."""
    if (plan := _compared(run, store, newest, changes, watcher)) is None:
        return None
    prepare_place(plan.store)
    with resource_errors(plan.store, "the run failed"), part_claim(plan.store, part) as own:
        version = _run_of_version(run, plan)
        begin_version(plan, version.identity, changes.looked_ns, restart=False)
        replace(version.plan, parts=part.parts).write(plan.store)
        jobs = [job for job in version.jobs if part.has(job.number)]
        records, made = version.make(jobs, watcher, own)
        _require_unchanged(run, newest, plan, changes)
    return PartResult(part, tuple(records), made=made, kept=len(records) - made)


def as_before(newest: Newest) -> RunResult:
    """Returns the result of a run that found nothing to do."""
    return RunResult(newest.manifest, made=0, kept=len(newest.manifest.shards), folder=newest.folder)


def require_whole(newest: Newest) -> None:
    """Raises a DatasetFormatError if a file of a dataset is lost or damaged that this run does not make again."""
    if damage := find_damage(newest.store, newest.manifest):
        names = some([newest.store.path(name) for name in damage.names(newest.manifest)])
        how = "Files of a version after the first are not made again"
        if not newest.folder:
            how = "This command makes them again if the source is as it was"
        raise DatasetFormatError(
            f"{names}: missing, or not as the manifest says. {how}. Run `vlmdata verify "
            f"{shlex.quote(str(newest.store))}` to see all damage and its repair."
        )


def _compared(run: Run, store: Store, newest: Newest, changes: Changes, watcher: Watcher) -> VersionPlan | None:
    """Returns the version to make; None if all rows are as before.

    Raises:
        ConfigMismatchError: If the rows of the newest version are not known, or none of them is in the source.
    """
    require_whole(newest)
    before, earlier = identity_of(newest.manifest), replace(run.earlier, store=newest.store)
    try:
        rows = read_row_table(newest.store, newest.manifest)
    except DatasetFormatError as error:
        if not changes.source:
            raise earlier.refusal(newest.manifest, changes.files, str(error)) from None
        refused = refusal(store, True, changes.source, before, run.identity)
        raise ConfigMismatchError(f"{refused}\n{error}") from None
    paths = {path for each in changes.files.values() for path in each}
    workers = min(run.workers, available_cores())
    id_column, source = run.work.config.id_column, run.work.source
    plan = plan_version(
        store, newest, rows, source, paths, id_column=id_column, workers=workers, on_rows=watcher.rows_compared
    )
    if plan is not None and not plan.info.kept:
        if not changes.source:
            remedy = "No other row is left. Restore them, or give another --out."
            raise earlier.refusal(newest.manifest, changes.files, remedy)
        refused = refusal(store, True, changes.source, before, run.identity)
        raise ConfigMismatchError(f"{refused}\nNone of its {plan.info.removed:,} rows is in the source.")
    return plan


def _require_unchanged(run: Run, newest: Newest, plan: VersionPlan, changes: Changes) -> None:
    """Raises a ConfigMismatchError if image files changed since they were compared."""
    compared_ns = plan.store.modified_ns(plan.info.kept_file)
    files = replace(run.earlier, store=newest.store, hash_source=False).changed_since(newest.manifest, compared_ns)
    if {path for each in files.values() for path in each} - {path for each in changes.files.values() for path in each}:
        raise files_changed(plan.store)


def _run_of_version(run: Run, plan: VersionPlan) -> Run:
    """Returns the run that makes what a version lacks, in the folder of the version."""
    shards = ShardPlan.of(plan.source.num_rows, run.work.config.rows_per_shard)
    return replace(
        run,
        work=replace(run.work, source=plan.source, store=plan.store),
        plan=shards,
        identity=plan.identity(run.identity),
        earlier=replace(run.earlier, store=plan.store),
        jobs=shards.jobs,
        counters=Counters(max(1, len(shards.jobs))),
    )
