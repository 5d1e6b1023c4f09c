"""``docs/architecture.md`` walks three ways through the code; each is what happens when the code runs.

A step is a numbered line, ``1. `path/to/file.py` `Class.method`: what it does.`` The functions are called in the order
of the page, at most ten files are named, and between two steps no other file of the product stands on the stack.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.ways import ROOT, WAYS

PAGE = ROOT / "docs" / "architecture.md"
MOST_FILES = 10
_STEP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)` `(?P<name>[\w.]+)`", re.MULTILINE)

Call = tuple[str, str]


def steps_of(way: str) -> list[Call]:
    """The steps of a section of the page."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (section,) = [each for each in sections if each.startswith(f"{way}\n")]
    numbered = len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    steps = [(found["file"], found["name"]) for found in _STEP.finditer(section)]
    assert len(steps) == numbered, f"{PAGE.name}, {way}: not every step has the form of {_STEP.pattern}"
    return steps


def first_calls(way: str, out: Path) -> dict[Call, list[Call]]:
    """For each function of the product that the way calls, in order of first calls, the stack of that call."""
    finished = run_forked(str(ROOT / "tests" / "ways.py"), way, out, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr[-4000:]
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"call"')]
    return {(line["call"][0], line["call"][1]): [(file, name) for file, name in line["stack"]] for line in lines}


@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_the_page_is_what_the_code_does(way: str, tmp_path: Path) -> None:
    if way == "A batch to its loss":
        pytest.importorskip("megatron.core")
    steps = steps_of(way)
    files = {file for file, _ in steps}
    assert len(files) <= MOST_FILES, sorted(files)
    calls = first_calls(way, tmp_path)
    absent = [step for step in steps if step not in calls]
    assert not absent, f"not called: {absent}"
    order = {call: number for number, call in enumerate(calls)}
    assert steps == sorted(steps, key=order.__getitem__), "the code calls them in another order"
    for step in steps:
        stack = calls[step]
        begin = stack.index(steps[0]) if steps[0] in stack else len(stack)
        between = [call for call in stack[begin:] if call[0] not in files]
        assert not between, f"{step}: the way passes {between}, which the page does not name"
