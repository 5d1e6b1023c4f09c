"""Starts compilation of a run's kernels next to the imports and the building of the model. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from vlmdata.wording import counted, duration

#: Seconds that a process may compile, from its start. After that, the trainer compiles what is missing by itself.
_PATIENCE = 600.0


class KernelsAhead:
    """A process that compiles kernels into Triton's cache, by :meth:`vlmdata.model.kernels.shapes.Kernels.command`."""

    def __init__(self, command: Sequence[str]):
        self._begun = time.perf_counter()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # In a session of its own: ctrl-C is the trainer's, which ends this process.
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
            text=True,
        )

    def wait(self, say: Callable[[str], None]) -> None:
        """Waits until the process ends, and says how many kernels it compiled, or why it failed."""
        compiled, waited = 0, self._process.poll() is None
        timer = threading.Timer(max(0.0, self._begun + _PATIENCE - time.perf_counter()), self._kill)
        timer.daemon = True
        timer.start()
        try:
            for found in self._lines():
                if "kernels" in found and waited:
                    say(f"compiling {counted(found['kernels'], 'kernel')} …")
                compiled += found.get("cached") is False
            failed = self._process.wait()
        finally:
            timer.cancel()
        if failed:
            say(f"warning: kernels could not be compiled ahead, steps compile them: {self._last_error()}")
        elif compiled:
            took = duration(time.perf_counter() - self._begun)
            say(f"compiled {counted(compiled, 'kernel')} in {took}, during the start")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yields the reports of the process, one per line of JSON. Skips what libraries print."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and its forks."""
        if self._process.poll() is None:
            self._kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> KernelsAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hash_triton() -> threading.Thread:
    """Has Triton hash its library of 400 MB in a thread, for which the first kernel would wait."""
    from triton.runtime import cache

    thread = threading.Thread(target=getattr(cache, "triton_key", lambda: None), daemon=True)
    thread.start()
    return thread


def can_compile_ahead() -> bool:
    """True if flash-linear-attention, whose kernels are compiled, is installed."""
    return importlib.util.find_spec("fla") is not None
