"""Collectives by which ranks agree around file access: if one rank fails, all raise; if rank 0 decides, all follow.

All ranks must call each of these functions, in the same order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from vlmdata.errors import ResourceError, VlmdataError
from vlmdata.model.training.processes.failure import OtherRankError, said_by_another, say, store_of_all
from vlmdata.model.training.settings.config import ConfigError

#: Seconds that a network file system may take to show one node what another node wrote.
PATIENCE = 10.0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Wraps work without collectives: if it fails on one rank, all ranks raise and exit with the same code.

    A rank raises its own error, or else the first error of another rank: with its message if it is a VlmdataError, or
    an OtherRankError; that rank shows the traceback.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    errors = [each for each in gathered(_portable(error)) if each is not None]
    if errors:
        kind, message = errors[0]
        raise_together(error or said_by_another(kind(message)))


def on_all_ranks[T](action: Callable[[], T]) -> T:
    """Runs one call in :func:`together` and returns its result."""
    with together():
        return action()


def raise_together(error: Exception) -> NoReturn:
    """Prints the error, then raises it on every rank. The first rank to exit may hold the store that others need."""
    if dist.get_world_size() > 1:
        say(error)
        gathered(None)
    raise error


def _portable(error: Exception | None) -> tuple[type[VlmdataError], str] | None:
    """Returns an error in a form that can be sent to another process."""
    if isinstance(error, VlmdataError):
        return type(error), str(error)
    return None if error is None else (OtherRankError, "another rank failed and printed the reason")


def decided[T](action: Callable[[], T]) -> T:
    """Runs ``action`` on rank 0 only and returns its result on all ranks; a VlmdataError if rank 0 raises one."""
    box: list[Any] = [on_all_ranks(lambda: action() if dist.get_rank() == 0 else None)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    found: T = box[0]
    return found


def by_leaders(action: Callable[[], object]) -> None:
    """Runs a long action, such as a download, on one process per node. If it fails on one, all ranks raise its error.

    The others poll the store; a collective would fail after ``run.timeout_minutes``.
    """
    if dist.get_world_size() == 1:
        action()
        return
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    leaders, turn = sum(gathered(leads)), decided(lambda: secrets.token_hex(8))
    store, error = store_of_all(), None
    if leads:
        try:
            action()
        except Exception as caught:
            error = caught
        store.add(f"vlmdata/done/{turn}", 1)
    while store.add(f"vlmdata/done/{turn}", 0) < leaders:
        time.sleep(0.2)
    with together():
        if error is not None:
            raise error


def gathered[T](value: T) -> list[T]:
    """Returns the values of all ranks, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_shared(folder: Path) -> None:
    """Creates a folder, and checks that it is writable (ResourceError) and the same on every rank (ConfigError)."""
    marker = decided(lambda: _write_marker(folder))
    seen = _appears(folder / marker)
    places = gathered((seen, socket.gethostname(), str(folder.resolve())))  # after this, all ranks have looked
    if dist.get_rank() == 0:
        (folder / marker).unlink(missing_ok=True)
    blind = [f"rank {rank} on {host} ({path})" for rank, (sees, host, path) in enumerate(places) if not sees]
    if blind:
        _, host, path = places[0]
        more = f" and {len(blind) - 4} more" if len(blind) > 4 else ""
        raise_together(
            ConfigError(
                f"run.out {folder} is not the same folder for all processes: what rank 0 on {host} wrote to {path} is "
                f"not visible to {', '.join(blind[:4])}{more}. Set --out to an absolute path on storage that all nodes "
                "share"
            )
        )


def _write_marker(folder: Path) -> str:
    name = f".{secrets.token_hex(8)}.seen-by-all"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except FileExistsError as error:
        raise ConfigError(f"run.out {folder.resolve()} is a file; choose another --out") from error
    except OSError as error:
        raise ResourceError(
            f"run.out {folder.resolve()} cannot be written: {error.strerror or error}. Free space or fix permissions, "
            "or choose another --out"
        ) from error
    return name


def _appears(path: Path) -> bool:
    """Waits until a file that another node wrote is visible; False after the time limit."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
        if path.parent.is_dir():
            list(path.parent.iterdir())  # makes the client ask the server again
    return True
