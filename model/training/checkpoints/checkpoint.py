"""Checkpoints: the model and optimizer in megatron-core's format, which any layout can load, and the run's position.

A folder ``step-00000050`` under ``checkpoints/`` is complete: it is written under a temporary name and renamed when all
ranks are done. Checksums of its files are computed in the background after that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from vlmdata import StreamingLoader
from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import architecture_to_hf
from vlmdata.model.parallel.separation import separation
from vlmdata.model.training.checkpoints.base import require_same_base
from vlmdata.model.training.checkpoints.best import BestCheckpoint
from vlmdata.model.training.checkpoints.folder import newest_in, put_aside, remove, remove_leftovers
from vlmdata.model.training.checkpoints.learner_state import gather_weights, load_state, state_to_save
from vlmdata.model.training.checkpoints.model_state import content, with_common_state_of
from vlmdata.model.training.checkpoints.random_state import restore_random_state, write_random_state
from vlmdata.model.training.checkpoints.run_state import (
    RunState,
    changes_since,
    optimizer_form,
    read_state,
    require_planned,
    require_resumable,
    unsuitable,
)
from vlmdata.model.training.checkpoints.write_results import start_write_results
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.optimizer.learner import Learner
from vlmdata.model.training.processes.agreement import decided, on_all_ranks, require_shared, together
from vlmdata.model.training.processes.interruption import shielding_children
from vlmdata.model.training.processes.run_lock import claim
from vlmdata.model.training.settings.config import ConfigError, TrainConfig
from vlmdata.model.weights.checksums import require_sound, without_checksum, write_checksums
from vlmdata.model.weights.output import described, refusal_of
from vlmdata.model.weights.places import checkpoints_in
from vlmdata.model.weights.store import save_strategy


class Checkpoints:
    """The checkpoints of one run, written in the background with ``async_save``."""

    def __init__(self, config: TrainConfig, architecture: Architecture, place: RankPlace, async_save: bool):
        self._config, self._architecture, self._place = config, architecture, place
        self._folder = Path(config.run.out) / "checkpoints"
        self._queue = AsyncCallsQueue() if async_save else None
        self._pending: Path | None = None
        self._checksums: Thread | None = None
        self._size = 0
        #: Digest of the frozen weights, with adapters (:mod:`vlmdata.model.training.checkpoints.base`).
        self.base: str | None = None
        self.best = BestCheckpoint(self._folder)  # of the lowest evaluation loss

    def agree_on_latest(self) -> Path | None:
        """Returns the newest complete checkpoint that rank 0 sees. A collective.

        First checks that ``run.out`` is shared by all ranks (or a ConfigError), not in use by another run (ConfigError)
        and writable (ResourceError). Removes incomplete files of earlier runs that were killed.
        """
        require_shared(self._folder.parent)
        name = decided(self._tidy)
        return None if name is None else self._folder / name

    def _tidy(self) -> str | None:
        self._lock = claim(self._folder.parent)
        remove_leftovers(self._folder)
        found = newest_in(self._folder)
        return None if found is None else found.name

    def all(self) -> list[Path]:
        """Returns the complete checkpoints that this rank sees, oldest first."""
        return checkpoints_in(self._folder)

    def path_of(self, step: int) -> Path:
        """Returns the path of a step's checkpoint, which may not exist yet."""
        return self._folder / f"step-{step:08d}"

    def save(self, step: int, learner: Learner, loader: dict[str, Any]) -> None:
        """Writes a checkpoint of completed steps and the loader's state, in the background with ``async_save``.

        A ResourceError if space is short or the files cannot be written. Earlier checkpoints stay.
        """
        self.wait()
        gather_weights(learner)
        final = self.path_of(step)
        temporary = self._folder / f".{final.name}.tmp"
        config, model = self._config.to_dict(), architecture_to_hf(self._architecture)
        state = RunState(step, loader, self._layout(), config, model, optimizer_form(learner), self.base)
        sharded = state_to_save(learner)
        if (sides := separation()) is not None and "language" not in self._config.model.freeze:
            sharded = with_common_state_of(sharded, sides.vision)
        self._size = _bytes_of(sharded)
        decided(partial(self._prepare, temporary))
        if self._queue is not None:
            start_write_results()
        with self._writing(temporary):
            request = dist_checkpointing.save(
                sharded,
                str(temporary),
                sharded_strategy=save_strategy(self._size // self._place.world),
                async_sharded_save=self._queue is not None,
                async_strategy="mcore",
                content_metadata=content(),
            )
        with together(), self._writing(temporary):
            if self._place.rank == 0:
                state.write(temporary)
                (temporary / "config.toml").write_text(self._config.to_toml())
            write_random_state(temporary / self._random_state)
        finish = partial(self._finish, temporary, final)
        if self._queue is None:
            finish()
            return
        request.add_finalize_fn(finish)
        self._pending = temporary
        with shielding_children():
            self._queue.schedule_async_request(request)

    @property
    def pending_bytes(self) -> int:
        """Size of the checkpoint that is being written in the background; 0 if there is none."""
        return self._size if self._queue is not None and self._queue.get_num_unfinalized_calls() else 0

    def poll(self) -> None:
        """Finishes a background save whose files are written. All ranks must call it at the same steps."""
        self._finalize(blocking=False)

    def wait(self) -> None:
        """Waits for a background save and its checksums, and finishes them."""
        self._finalize(blocking=True)
        if self._checksums is not None:
            self._checksums.join()
            self._checksums = None

    def _finalize(self, blocking: bool) -> None:
        if self._queue is not None:
            with self._writing(self._pending):
                self._queue.maybe_finalize_async_calls(blocking=blocking)

    def load(self, path: Path, learner: Learner) -> tuple[RunState, list[str]]:
        """Restores model, optimizer, schedule and, on the same layout, random state. Returns the run's state and notes.

        Learning rates and similar settings come from the run, not from the checkpoint. A ConfigError if the checkpoint
        is damaged, or of another model or optimizer.
        """
        try:
            state = read_state(path)
        except ValueError as error:
            raise self._unreadable(path, str(error)) from error
        with self._reading(path):
            require_resumable(path, state, self._config.to_dict(), self._architecture, learner)
            if self.base is not None:
                require_same_base(path, state, self.base, self._config.model.weights or self._config.model.hf)
            notes = on_all_ranks(partial(self._check_files, path, state)) if self._config.run.verify else []
        sound = self._config.run.verify and not notes
        with self._reading(path, state, sound):
            load_state(path, state, learner)
        if state.layout == self._layout():
            with together(), self._reading(path):
                restore_random_state(path / self._random_state)
        return state, notes

    @property
    def _random_state(self) -> str:
        return f"random-{self._place.rank:05d}.pt"

    def load_data(self, path: Path, state: RunState, loader: StreamingLoader) -> None:
        """Moves the loader to the position of a loaded checkpoint.

        A ConfigError if data or plan are others, and may not change, or if the position is of another step.
        """
        loader.load_state_dict(state.loader, change=self._config.data.change)
        if state.checksum is None:
            try:
                require_planned(state, loader)
            except ValueError as error:
                raise self._unreadable(path, str(error)) from error

    def _check_files(self, path: Path, state: RunState) -> list[str]:
        """Checks this rank's share of the files against their checksums. Returns a line if some have none."""
        with self._reading(path):
            try:
                unchecked = require_sound(path, self._place.rank, self._place.world)
                return without_checksum(path, (["run.json"] if state.checksum is None else []) + unchecked)
            except ValueError as error:
                raise self._unreadable(path, str(error)) from error

    def _layout(self) -> dict[str, int]:
        parallel = self._config.parallel
        sizes = {"world": self._place.world, **{name: getattr(parallel, name) for name in ("tp", "cp", "pp", "ep")}}
        return sizes | ({"vision_gpus": parallel.vision_gpus} if parallel.vision_gpus else {})

    def _prepare(self, temporary: Path) -> None:
        """Creates an empty folder on a disk with enough space."""
        with self._writing(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            disk = shutil.disk_usage(temporary)
            if disk.total and disk.free < self._size:  # some remote file systems do not report their size
                temporary.rmdir()
                raise self._failed(None, "not enough disk space")

    def _finish(self, temporary: Path, final: Path) -> None:
        """Renames the finished checkpoint and removes old ones except the best."""
        torch.distributed.barrier()
        decided(partial(self._rename, temporary, final))
        self._checksums = Thread(target=_note_checksums, args=(final, self._place.rank), name="checksums")
        self._checksums.start()

    def _rename(self, temporary: Path, final: Path) -> None:
        with self._writing(temporary):
            replaced = put_aside(final) if final.exists() else None  # a run resumed from an earlier step
            os.rename(temporary, final)
            if replaced is not None:
                shutil.rmtree(replaced)
            self.best.note(final.name)
            keep = self._config.run.keep
            for old in checkpoints_in(self._folder)[:-keep] if keep else []:
                if old.name != self.best.name:
                    remove(old)

    @contextlib.contextmanager
    def _writing(self, temporary: Path | None) -> Iterator[None]:
        """Converts write failures to :class:`ResourceError` and removes the incomplete checkpoint."""
        try:
            yield
        except OSError as error:
            raise self._failed(temporary, reason(error), not isinstance(error, ConnectionError)) from error
        except CheckpointException as error:  # raised on all ranks; rank 0 has the error of each
            with together():
                if self._place.rank == 0:
                    raise self._failed(temporary, reason(error), by_disk=False) from error

    def _failed(self, temporary: Path | None, why: str, by_disk: bool = True) -> ResourceError:
        """The error, with a remedy that fits: whether the disk refused may be known, or is tried out."""
        if temporary is not None:
            # One of the ranks may have removed the folder.
            refusal = refusal_of(temporary / f"probe-{self._place.rank}")
            if refusal is not None and not isinstance(refusal, FileNotFoundError):
                by_disk, why = True, refusal.strerror or why
            if self._place.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
        folder = self._folder if self._folder.is_dir() else self._folder.parent
        kept = newest_in(self._folder)
        newest = "there is none yet" if kept is None else f"{kept.name} is the newest complete one"
        free = shutil.disk_usage(folder).free
        remedy = (
            "Free space or fix permissions, and continue with --resume"
            if by_disk or free < self._size
            else "The folder accepts files. Continue with --resume; if it happens again, set run.async_save=false"
        )
        return ResourceError(
            f"{self._folder.resolve()}: a checkpoint of {megabytes(self._size)} could not be saved: {why}; "
            f"{megabytes(free)} free. Earlier checkpoints are unchanged ({newest}). {remedy}"
        )

    @contextlib.contextmanager
    def _reading(self, path: Path, state: RunState | None = None, sound: bool = False) -> Iterator[None]:
        """Converts errors of megatron-core and torch to ConfigErrors. The run does not fit files that are ``sound``."""
        try:
            yield
        except VlmdataError:
            raise
        except (Exception, CheckpointException) as error:
            changes = [] if state is None else changes_since(state, self._config.to_dict())
            if state is not None and sound:
                raise unsuitable(path, state, reason(error), changes) from error
            raise self._unreadable(path, reason(error), changes) from error

    def _unreadable(self, path: Path, why: str, changes: Sequence[str] = ()) -> ConfigError:
        earlier = [each for each in checkpoints_in(self._folder) if each.name < path.name]
        way_out = (
            f"To continue from {earlier[-1].name}, the previous checkpoint, move {path.name} out of {self._folder} and "
            "use --resume again"
            if earlier
            else "There is no earlier checkpoint: start a new run with another --out"
        )
        other = f", unless changed settings are the reason ({'; '.join(changes)})" if changes else ""
        return ConfigError(f"{path} cannot be loaded; its files seem damaged: {why}{other}. {way_out}")


def _note_checksums(path: Path, rank: int) -> None:
    """Writes checksums. Runs in a thread, since reading takes long and nothing waits for it."""
    try:
        write_checksums(path, rank)
    except OSError as error:
        if path.is_dir():  # it may have been removed as an old checkpoint
            print(f"warning: {path}: complete, but without checksums: {error.strerror}", file=sys.stderr, flush=True)


def _bytes_of(sharded: dict[str, Any]) -> int:
    """Returns the total tensor bytes that all ranks write."""
    mine = sum(
        entry.data.nbytes
        for entry in nested_values(sharded)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
        and entry.data is not None
        and is_main_replica(entry.replica_id)
    )
    total = torch.tensor([float(mine)], dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(total)
    return int(total.item())


def megabytes(count: float) -> str:
    """A size for people: ``31.0 GB``, ``0.4 MB``."""
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"


def reason(error: BaseException) -> str:
    """Formats an error as one line. For an error of several ranks, uses the first rank's."""
    where = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
        where = f"on rank {rank} " if torch.distributed.get_world_size() > 1 else ""
    elif isinstance(error, CheckpointException):
        return "another rank printed the reason"
    return where + described(error)
