"""What ranks settle among themselves before and after they touch files: one fails, all raise; one decides, all follow.

Everything here is a collective: every rank calls it, in the same order.
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

from model.training.config import ConfigError
from model.training.failure import OtherRankError, said_by_another, say
from vlmdata.errors import ResourceError, VlmdataError

#: Seconds in which a network file system shows one node what another one wrote.
PATIENCE = 10.0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around work without collectives: where it fails on one rank, all raise and end with its exit code.

    Raises:
        VlmdataError: This rank's own error, or else the first one of another rank, in its words.
        OtherRankError: If another rank failed in a way that is no error of ours; it shows the traceback.
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
    """:func:`together` for one call, and what it returns."""
    with together():
        return action()


def raise_together(error: Exception) -> NoReturn:
    """Raises on every rank, once it is said: the first rank to end may hold what the others need to do so."""
    if dist.get_world_size() > 1:
        say(error)
        gathered(None)
    raise error


def _portable(error: Exception | None) -> tuple[type[VlmdataError], str] | None:
    """An error for another process."""
    if isinstance(error, VlmdataError):
        return type(error), str(error)
    return None if error is None else (OtherRankError, "another rank failed, and says why")


def decided[T](action: Callable[[], T]) -> T:
    """What rank 0 finds, on all ranks; only rank 0 looks.

    Raises:
        VlmdataError: If rank 0 raises one.
    """
    box: list[Any] = [on_all_ranks(lambda: action() if dist.get_rank() == 0 else None)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    found: T = box[0]
    return found


def by_leaders(action: Callable[[], object]) -> None:
    """Runs something long, such as a download, on one process of each node, while the others wait.

    They look at the store rather than wait in a collective, which would fail after ``run.timeout_minutes``.

    Raises:
        VlmdataError: If it fails on a node; on all ranks.
    """
    if dist.get_world_size() == 1:
        action()
        return
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    leaders, turn = sum(gathered(leads)), decided(lambda: secrets.token_hex(8))
    store, error = dist.distributed_c10d._get_default_store(), None
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
    """Every rank's value, by rank."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_shared(folder: Path) -> None:
    """Makes a folder, and sees that it can be written and is the same one on every rank.

    Args:
        folder: As this rank names it.

    Raises:
        ResourceError: If rank 0 cannot write there.
        ConfigError: If a rank does not see what rank 0 wrote.
    """
    marker = decided(lambda: _write_marker(folder))
    seen = _appears(folder / marker)
    places = gathered((seen, socket.gethostname(), str(folder.resolve())))  # all have looked once this is through
    if dist.get_rank() == 0:
        (folder / marker).unlink(missing_ok=True)
    blind = [f"rank {rank} on {host} ({path})" for rank, (sees, host, path) in enumerate(places) if not sees]
    if blind:
        _, host, path = places[0]
        more = f" and {len(blind) - 4} more" if len(blind) > 4 else ""
        raise_together(
            ConfigError(
                f"run.out {folder} is not one folder for all processes: what rank 0 on {host} wrote to {path} is not "
                f"seen by {', '.join(blind[:4])}{more}. Give --out as an absolute path on storage that all nodes share"
            )
        )


def _write_marker(folder: Path) -> str:
    name = f".{secrets.token_hex(8)}.seen-by-all"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        raise ResourceError(
            f"run.out {folder.resolve()} cannot be written: {error.strerror or error}. Make room or give the rights, "
            "or choose another --out"
        ) from error
    return name


def _appears(path: Path) -> bool:
    """Whether a file that another node made is seen, for as long as a file system may take to show it."""
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
        if path.parent.is_dir():
            list(path.parent.iterdir())  # asks the server anew
    return True
