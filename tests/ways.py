"""Runs one way through the house and prints which functions of the product it calls: ``ways.py NAME OUT``.

Each printed line is JSON: the file and the qualified name of a function at its first call, and the product files on
the stack of that call, outermost first, as ``[file, name]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from sys import monitoring
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("vlmdata/", "preprocess/", "model/", "train.py")
Call = tuple[str, str]


class FirstCalls:
    """Records the first call of each function of the product, with its stack."""

    def __init__(self) -> None:
        self.stacks: dict[Call, list[Call]] = {}
        self._files: dict[str, str | None] = {}

    def __enter__(self) -> FirstCalls:
        monitoring.use_tool_id(monitoring.PROFILER_ID, "ways")
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, self._begin)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
        return self

    def __exit__(self, *error: object) -> None:
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(monitoring.PROFILER_ID)

    def _begin(self, code: CodeType, offset: int) -> Any:
        if (call := self._call(code)) is not None and call not in self.stacks:
            self.stacks[call] = self._stack(sys._getframe(1))
        return monitoring.DISABLE  # of this function, its first call is enough

    def _call(self, code: CodeType) -> Call | None:
        name = code.co_filename
        if name not in self._files:
            path = Path(name).resolve()  # vlmdata/preprocess and vlmdata/model are links
            inside = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            self._files[name] = inside if inside.startswith(PRODUCT) else None
        file = self._files[name]
        return None if file is None else (file, code.co_qualname.replace(".<locals>", ""))

    def _stack(self, frame: FrameType | None) -> list[Call]:
        stack: list[Call] = []
        while frame is not None:
            if (call := self._call(frame.f_code)) is not None:
                stack.append(call)
            frame = frame.f_back
        return stack[::-1]


def row_to_shard(out: Path) -> None:
    """Two rows of the demo, in this process."""
    from vlmdata.cli.main import app

    command = ["preprocess", "demo", "--limit", "2", "--workers", "1", "--out", str(out / "data")]
    app(command, standalone_mode=False)


def index_row_to_batch(out: Path) -> None:
    """The first batch of a dataset, made in this process."""
    from vlmdata import StreamingLoader

    row_to_shard(out)
    with StreamingLoader(out / "data", capacity=4096, global_batch=1, num_workers=0) as loader:
        next(iter(loader))


def batch_to_loss(out: Path) -> None:
    """One step of the smallest model on a CPU."""
    from vlmdata import train

    row_to_shard(out)
    settings = {"data": out / "data", "out": out / "run", "preset": "tiny", "capacity": 4096, "global_batch": 1}
    options = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    train.app([*options, "--steps", "1", "--workers", "0"], standalone_mode=False)


WAYS: dict[str, Callable[[Path], None]] = {
    "A source row to its shard": row_to_shard,
    "An index row to its batch": index_row_to_batch,
    "A batch to its loss": batch_to_loss,
}

if __name__ == "__main__":
    with FirstCalls() as calls:
        WAYS[sys.argv[1]](Path(sys.argv[2]))
    for called, stack in calls.stacks.items():
        print(json.dumps({"call": called, "stack": stack}))
