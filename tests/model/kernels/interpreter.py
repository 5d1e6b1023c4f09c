"""Triton's interpreter, which runs kernels on a CPU. Run as a module, it calls functions in processes of their own.

    python -m tests.model.kernels.interpreter MODULE:FUNCTION…

Triton interprets from the start of a process or not at all. The processes are forked from one that has imported torch,
Triton and megatron-core, which takes longer than most functions. Prints a line of JSON: the error of each, or null.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any


def run_interpreted(calls: Sequence[str]) -> dict[str, str | None]:
    """Calls functions, given as ``module:function``, with kernels interpreted.

    Returns:
        For each the traceback with which it ended, or None.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, *calls],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _in_a_fork(call: str) -> str | None:
    """Calls a function in a forked process; its error, or None."""
    module, function = call.split(":")
    importlib.import_module(module)
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            code = 1
            try:
                getattr(importlib.import_module(module), function)()
                code = 0
            except BaseException:
                traceback.print_exc(file=said)
                said.flush()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return said.read() or f"it ended with {status}" if status else None


def accept_scalar_bounds() -> None:
    """Lets loops end at a kernel's argument: the interpreter of Triton 3.6 converts it as NumPy 2.4 no longer does."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = and_index


def patch_once_per_launch() -> None:
    """Lets calls between kernels' functions leave ``triton.language`` as the launch has patched it.

    The interpreter searches all of it for functions to patch at each call, and restores it at the end of the launch
    only: calls find nothing to patch, which takes a quarter of the time of kernels that call many functions.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def once(function: Any) -> Any:
        languages = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        if languages and not any(tl.core.is_builtin(each.load) for each in languages):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = once


if __name__ == "__main__":
    for each in (
        "triton.language",
        "vlmdata.model.families.qwen3_5.gated_delta_net",
        "vlmdata.model.network.attention",
    ):
        importlib.import_module(each)
    patch_once_per_launch()
    found = {call: _in_a_fork(call) for call in sys.argv[1:]}
    print("\n" + json.dumps(found))
