"""Ends all ranks when one fails. The failing rank prints the reason once.

It must not wait for the others: its clean-up may itself be a collective, or wait for a GPU that waits for another rank.
So it allows its clean-up a few seconds, and exits without leaving the process groups. The launcher stops the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from vlmdata.errors import ResourceError, VlmdataError

#: Seconds for a failed rank of several to close files and workers; then the kernel kills it.
_CLOSING_SECONDS = 15


class NotFiniteError(VlmdataError):
    """The loss or gradient of a step is infinite or NaN."""


class OtherRankError(VlmdataError):
    """Another rank failed and prints the reason itself."""


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Wraps work in which a single rank may fail: that rank prints the reason first, then must exit within seconds."""
    try:
        yield
    except BaseException as error:
        if _world() > 1:
            # The kernel's default action works even if the process hangs.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_CLOSING_SECONDS)
        say(error)
        raise


def end_process(error: Exception) -> NoReturn:
    """Prints the error, unless already printed, and ends the process with :func:`exit_code`."""
    say(error)
    if _world() > 1:
        sys.stdout.flush()
        os._exit(exit_code(error))  # a normal exit would wait for the process groups
    if _in_groups():
        import torch.distributed as dist

        dist.destroy_process_group()
    sys.exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error.

    It is 2 for invalid options, data or configuration, 3 for resources, 4 for a loss or gradient that is not finite,
    and 1 for everything else, and if only another rank failed.
    """
    if isinstance(error, OtherRankError) or not isinstance(error, VlmdataError):
        return 1
    return {ResourceError: 3, NotFiniteError: 4}.get(type(error), 2)


def say(error: BaseException) -> None:
    """Prints an error: one line, or a traceback if unexpected. Only one rank prints the same message."""
    if isinstance(error, OtherRankError | KeyboardInterrupt | SystemExit) or getattr(error, "was_said", False):
        return
    error.was_said = True  # type: ignore[attr-defined]
    if isinstance(error, VlmdataError):
        text = str(error)
    elif _is_lost_peer(error):
        text = f"another rank has exited or hangs: see its output or the launcher's ({str(error).splitlines()[0]})"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    if _is_first_to_say(error, text):
        name = f"rank {os.environ.get('RANK', '0')}: " if _world() > 1 else ""
        print(f"error: {name}{text}", file=sys.stderr, flush=True)


def said_by_another(error: Exception) -> Exception:
    """Marks an error of another rank, so that :func:`say` leaves printing it to that rank."""
    error.was_said = True  # type: ignore[attr-defined]
    return error


def _is_lost_peer(error: BaseException) -> bool:
    """Tells whether a collective failed because another rank is gone or hangs.

    NCCL's failures have classes. gloo raises a plain RuntimeError, whose text names its source file.
    """
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _is_first_to_say(error: BaseException, text: str) -> bool:
    if _world() == 1:
        return True
    # If torchrun does not hold the store, a rank does, and that rank may be the lost one.
    if _is_lost_peer(error) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    if not _in_groups():
        # A configuration error before ranks are connected occurs on all ranks, at least on those of a node.
        return os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, ResourceError)
    try:
        return bool(store_of_all().add(f"vlmdata/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1)
    except (RuntimeError, ValueError):  # the rank that holds the store has exited
        return True


def store_of_all() -> Any:
    """Returns the store of torch.distributed that all ranks share. Process groups must exist."""
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def _in_groups() -> bool:
    """True if process groups exist. Without torch there are none, so this avoids importing it."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_initialized()


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
