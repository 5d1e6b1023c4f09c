"""The process that compiles kernels ahead: what the trainer says of it, and that it ends."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from vlmdata.model.kernels import ahead
from vlmdata.model.kernels.ahead import KernelsAhead, hash_triton
from vlmdata.model.kernels.shapes import DecoderKernels, DeltaNetShape, Kernels

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")

SHAPE = DeltaNetShape(tokens=16384, key_heads=16, value_heads=32, key_width=128, value_width=128, taps=4)


@needs_triton
def test_triton_is_hashed_once() -> None:
    from triton.runtime import cache

    cache.triton_key.cache_clear()
    hash_triton().join()
    assert cache.triton_key.cache_info().currsize == 1


class TestTheWait:
    """What the trainer says of the process."""

    def said(self, code: str) -> list[str]:
        lines: list[str] = []
        with KernelsAhead([sys.executable, "-c", f"import json, sys, os\n{code}"]) as started:
            started.wait(lines.append)
        return lines

    def test_names_what_is_compiled_and_how_long_it_took(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"  # the process runs until its first line is said: it is waited for
        os.mkfifo(pipe)
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            if len(lines) == 1:
                pipe.write_text("go on")

        code = (
            "import json\nprint('of a library')\nprint(json.dumps({'kernels': 2}), flush=True)\n"
            f"open({str(pipe)!r}).read()\n"
            "for cached in (False, True): print(json.dumps({'kernel': 'a', 'cached': cached}))"
        )
        with KernelsAhead([sys.executable, "-c", code]) as started:
            started.wait(say)
        assert lines[0] == "compiling 2 kernels …"
        assert lines[1].startswith("compiled 1 kernel in ")

    def test_says_nothing_if_all_were_cached_and_on_other_gpus(self) -> None:
        assert self.said("print(json.dumps({'kernel': 'a', 'cached': True}))") == []
        assert self.said("") == []

    def test_a_failure_is_a_warning(self) -> None:
        (line,) = self.said("print('add: CompilationError: oh', file=sys.stderr); sys.exit(1)")
        assert line == ("warning: kernels could not be compiled ahead, steps compile them: add: CompilationError: oh")

    def test_training_begins_even_if_compilation_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ahead, "_PATIENCE", 0.1)
        (line,) = self.said("import signal; signal.pause()")
        assert line == "warning: kernels could not be compiled ahead, steps compile them: exit code -9"

    def test_neither_the_process_nor_its_forks_outlive_the_run(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        code = f"import os, signal\nfile = open({str(pipe)!r}, 'wb', 0)\nos.fork()\nfile.write(b'x')\nsignal.pause()"
        started = KernelsAhead([sys.executable, "-c", code])
        with pipe.open("rb") as file:
            assert file.read(2) == b"xx"
            started.close()
            assert file.read() == b"", "the pipe ends when all who may write have ended"

    def test_the_module_ends_quietly_without_a_gpu(self) -> None:
        lines: list[str] = []
        with KernelsAhead(Kernels(DecoderKernels(SHAPE, None), None, None, every=False).command()) as started:
            started.wait(lines.append)
        assert lines == []
