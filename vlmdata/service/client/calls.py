"""Calls to one of several servers: in a thread each, and which errors leave another server to ask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from vlmdata.errors import ConfigMismatchError, ResourceError, UsageError
from vlmdata.loader.fill.fill import DAMAGE
from vlmdata.service.client.connection import ServerLostError

#: Errors after which another server may answer.
OF_ONE_SERVER = (ServerLostError, ConfigMismatchError, UsageError, ResourceError, *DAMAGE)


def more_telling(earlier: Exception | None, error: Exception) -> Exception:
    """Returns the error of a server to show: the latest one, unless only an earlier one says what to do."""
    if isinstance(earlier, ServerLostError) and earlier.has_remedy and isinstance(error, ServerLostError):
        return error if error.has_remedy else earlier
    return error


def in_thread[Result](function: Callable[[], Result]) -> Future[Result]:
    """Runs a function in a thread that does not keep the program alive: gRPC may wait for a dead server."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vlmdata-call", daemon=True).start()
    return future
