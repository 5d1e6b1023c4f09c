"""Runs README's lines from a dataset id to a batch, in an environment with nothing but the wheel: see `make wheel`.

Drawn receipts and the embedded tokenizer stand for what comes from the Hub.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

README = Path(__file__).resolve().parents[1] / "README.md"
STANDS_FOR = {"naver-clova-ix/cord-v2": "demo", "--split train": "--limit 32", "Qwen/Qwen3.5-9B": "embedded"}


def main() -> None:
    section = README.read_text(encoding="utf-8").split("\n## From a dataset id to a batch\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    assert [language for language, _ in blocks[:3]] == ["console", "json", "python"], "README is in another order"
    (_, commands), (_, row), (_, program), *_ = blocks
    for there, here in STANDS_FOR.items():
        assert there in commands, f"README no longer has {there}"
        commands = commands.replace(there, here)
    Path("images").mkdir()
    for number in (7, 8):
        Image.new("RGB", (300, 200), (number, 0, 0)).save(f"images/{number}.png")
    Path("chats.jsonl").write_text(row)
    for line in commands.splitlines():
        vlmdata, *words = shlex.split(line.removeprefix("$ "))
        subprocess.run([Path(sys.executable).with_name(vlmdata), *words], check=True)

    steps: list[int] = []

    def step(ids: Any, *others: Any) -> None:
        assert len(others) == 5
        steps.append(ids.numel())

    made: dict[str, Any] = {"step": step, "checkpoint": {}}
    exec(compile(program, "README.md", "exec"), made)
    assert steps, "the loader has given no batch"
    assert made["checkpoint"]["data"]
    print(f"{len(steps)} batches of {sum(steps)} tokens")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
