"""What happens when a rank cannot go on: every rank ends, soon, and whoever knows why says it once.

Ranks wait for each other in collectives, so a rank that fails must not wait for the others: whatever it does in order
to close may itself be a collective, or wait for a GPU that waits for another rank. It says what is wrong, gives its
clean-up a few seconds, and ends without leaving the process groups. Its end is what ends the other ranks: torchrun and
``srun --kill-on-bad-exit`` stop them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

from vlmdata.errors import ResourceError, VlmdataError

#: Seconds that a failed rank of several may take to close files and workers; then the kernel ends it.
_CLOSING_SECONDS = 15
#: How a message of torch.distributed over gloo says that the other side is gone; it has no exception of its own.
_GLOO = "gloo"


class NotFiniteError(VlmdataError):
    """Loss or gradient of a step are infinite or no number."""


class OtherRankError(VlmdataError):
    """Another rank failed, and says itself why."""


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Around what only one of the ranks may fail in: it says why before it closes anything, and is gone soon after."""
    try:
        yield
    except BaseException as error:
        if _world() > 1:
            # The kernel's own, so that nothing the process is stuck in can keep it.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_CLOSING_SECONDS)
        say(error)
        raise


def end_process(error: Exception) -> NoReturn:
    """Says what is wrong, unless that was done, and ends the process with :func:`exit_code`."""
    say(error)
    if _world() > 1:
        sys.stdout.flush()
        os._exit(exit_code(error))  # the interpreter's own end would wait for the process groups
    if _in_groups():
        import torch.distributed as dist

        dist.destroy_process_group()
    sys.exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """What the process ends with.

    Returns:
        2 for wrong options, data or configuration; 3 for resources; 4 for a loss or gradient that is not finite; 1 for
        everything else, and where only another rank failed.
    """
    if isinstance(error, OtherRankError) or not isinstance(error, VlmdataError):
        return 1
    return {ResourceError: 3, NotFiniteError: 4}.get(type(error), 2)


def say(error: BaseException) -> None:
    """Prints an error: one line, or a traceback if it is a fault of ours. The same words are said by one rank only."""
    if isinstance(error, OtherRankError | KeyboardInterrupt | SystemExit) or getattr(error, "was_said", False):
        return
    error.was_said = True  # type: ignore[attr-defined]
    if isinstance(error, VlmdataError):
        text = str(error)
    elif _is_lost_peer(error):
        first = _first_line(error)
        text = f"a rank that this one waited for has ended or hangs: see what it or the launcher says ({first})"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    if _is_first_to_say(error, text):
        name = f"rank {os.environ.get('RANK', '0')}: " if _world() > 1 else ""
        print(f"error: {name}{text}", file=sys.stderr, flush=True)


def said_by_another(error: Exception) -> Exception:
    """Marks an error that another rank had: :func:`say` leaves it to that one, whose number belongs to it."""
    error.was_said = True  # type: ignore[attr-defined]
    return error


def _is_lost_peer(error: BaseException) -> bool:
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _is_first_to_say(error: BaseException, text: str) -> bool:
    if _world() == 1:
        return True
    # Unless torchrun holds the store a rank does, and may be the one that is lost.
    if _is_lost_peer(error) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    if not _in_groups():
        # A configuration that is refused before ranks know each other is refused by all, at least by those of a node.
        return os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, ResourceError)
    import torch.distributed as dist

    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add(f"vlmdata/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1)
    except (RuntimeError, ValueError):  # the rank that holds the store has ended
        return True


def _in_groups() -> bool:
    """Whether there are process groups. Importing torch, which takes seconds, makes none."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_initialized()


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
