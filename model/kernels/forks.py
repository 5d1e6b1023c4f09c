"""Runs calls in forks and checks for a Hopper GPU, for the processes that compile kernels. Needs no torch."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from model.kernels.configurations import HOPPER


def in_forks(calls: Sequence[Callable[[], dict[str, Any]]], processes: int) -> int:
    """Runs each call in a fork, up to ``processes`` at a time, and prints a line of JSON for each: result and seconds.

    If a call fails, its error goes to standard error instead. Returns the number of calls that failed.
    """
    failed, running, waiting = 0, 0, list(calls)
    while waiting or running:
        if waiting and running < processes:
            call = waiting.pop(0)
            if os.fork() == 0:
                os._exit(_report(call))
            running += 1
        else:
            _, status = os.wait()
            running -= 1
            failed += status != 0
    return failed


def _report(call: Callable[[], dict[str, Any]]) -> int:
    """Runs a call and prints its line. Returns the exit code."""
    begun = time.perf_counter()
    try:
        found = call()
    except Exception as error:  # the trainer meets it again, in the launch itself
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    line = json.dumps(found | {"seconds": round(time.perf_counter() - begun, 2)})
    os.write(1, (line + "\n").encode())  # one write, so that lines of several processes do not mix
    return 0


def machine_has_hopper() -> bool:
    """True if the first GPU is a Hopper GPU. A fork asks CUDA's driver, so that this process never uses CUDA."""
    asking = os.fork()
    if asking == 0:
        os._exit(0 if _capability() == HOPPER else 1)
    return os.waitpid(asking, 0)[1] == 0


def _capability() -> tuple[int, int] | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, values = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for attribute, value in zip((75, 76), values, strict=True):  # COMPUTE_CAPABILITY_MAJOR, _MINOR
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return values[0].value, values[1].value
