"""Runs a script of ``benchmarks/`` with smaller constants; the programs that it starts are forked, which costs 0.1 s.

The script's process is forked, too. What it starts as ``vlmdata``, ``python -c CODE`` or ``python SCRIPT`` is forked
from the server of commands, where a start would take seconds of imports. Such a program is no child of the script, so
the system counts no CPU time and no memory of it for the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from tests.forked import COMMANDS, ROOT, SHARED, Forked, completed, server_address

BENCHMARKS = ROOT / "benchmarks"
_SIZES = "VLMDATA_TESTS_SIZES"
_FORKED_OPTIONS = {"stdin", "stdout", "stderr", "env", "cwd", "start_new_session", "text"}


def run_toy(
    script: str, *arguments: str, sizes: dict[str, Any], server: str = COMMANDS
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end.

    Args:
        script: Its name in ``benchmarks/``.
        arguments: Of its command line.
        sizes: Values of constants, by ``MODULE.NAME``.
        server: The module with which the server was started that forks the script.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = {**os.environ, _SIZES: json.dumps(sizes), SHARED[COMMANDS]: server_address(COMMANDS)}
    line = [str(BENCHMARKS / script), *arguments]
    return completed(Forked(f"{__name__}:run_script", line, server=server, nurseries=3, **pipes), 550)


def run_script() -> None:
    """Runs the script of the command line with the sizes in the environment, as the interpreter would."""
    subprocess.Popen = _Popen  # type: ignore[assignment, misc]
    os.wait = _no_children
    path = Path(sys.argv[0])
    sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(script)
    for place, value in json.loads(os.environ.get(_SIZES, "{}")).items():
        module, name = place.split(".")
        constants = vars(script if module == path.stem else sys.modules[module])
        constants[name] = type(constants[name])(value)
    script.main()


def _no_children() -> tuple[int, int]:
    """In place of :func:`os.wait`: the only children of a script are those that forking needs, which end with it."""
    raise ChildProcessError


def run_code() -> None:
    """Runs ``python -c CODE``; the code stands where the name of the program does."""
    subprocess.Popen = _Popen  # type: ignore[assignment, misc]
    code, sys.argv[0] = sys.argv[0], "-c"
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


class _Popen(subprocess.Popen[Any]):
    """A process that is forked, if it is one of ours."""

    def __new__(cls, line: Sequence[str | Path] = (), **options: Any) -> Any:
        texts = [] if isinstance(line, str) else [os.fspath(text) for text in line]
        while texts[1:2] == ["-W"]:
            del texts[1:3]
        if cls is _Popen and texts and set(options) <= _FORKED_OPTIONS:
            if Path(texts[0]).name == "vlmdata":
                return Forked("vlmdata.cli.main:main", texts, **options)
            if texts[0] == sys.executable and texts[1] == "-c":
                return Forked(f"{__name__}:run_code", texts[2:], **options)
            if texts[0] == sys.executable and Path(texts[1]).parent == BENCHMARKS:
                return Forked(f"{__name__}:run_script", texts[1:], **options)
        return super().__new__(cls)
