"""Mixture files: names, groups, limits, temperature and schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader.helpers import stream
from tests.loader.test_config import run as run  # the fixture
from tests.packing.helpers import make_table
from vlmdata.errors import UsageError
from vlmdata.loader.mixture import mixture_in, read_mixture
from vlmdata.packing import concatenate_tables, passes_per_epoch
from vlmdata.packing.config import Blend, Change

#: Tokens of three datasets: 100, 300 and 600; samples: 10, 10 and 60.
TABLE = concatenate_tables([make_table([10] * 10), make_table([30] * 10), make_table([10] * 60)])


def packing(tmp_path: Path, text: str) -> dict[str, Any]:
    file = tmp_path / "mixture.toml"
    file.write_text(text)
    return read_mixture(file).packing(TABLE)


ONE = "weight = 1"
DATASETS = """
[datasets.a]
path = "a"
{a}
[datasets.text]
{text}
[datasets.text.b]
path = "b"
{b}
[datasets.text.c]
path = "c"
{c}
"""


@pytest.mark.parametrize(
    ("head", "lines", "weights"),
    [
        ("", {}, (1, 3, 6)),  # by size: one pass over each
        ('by = "samples"', {}, (1, 1, 6)),
        ("", {"a": "weight = 1", "text": "weight = 3"}, (1, 1, 2)),
        ("", {"a": "weight = 0.5", "text": "weight = 0.5", "b": "weight = 2", "c": "weight = 3"}, (5, 2, 3)),
        ("", {"a": ONE, "text": f"{ONE}\ntemperature = 2", "b": "weight = 4", "c": "weight = 9"}, (5, 2, 3)),
        ("temperature = 2", {"a": "weight = 1", "text": "weight = 4", "b": "weight = 1", "c": "weight = 0"}, (1, 2, 0)),
        ('by = "epochs"', {"a": "weight = 2.5", "text": "weight = 3", "b": "weight = 0.5"}, (2.5, 1.5, 3)),
        ("", {"c": "max_samples = 10"}, (1, 3, 1)),
    ],
)  # fmt: skip
def test_weights_are_exact(tmp_path: Path, head: str, lines: dict[str, str], weights: tuple[float, ...]) -> None:
    values = dict.fromkeys(("a", "text", "b", "c"), "") | lines
    found = packing(tmp_path, head + DATASETS.format(**values))
    assert found["blend"].weights == weights
    assert found["schedule"] == ()
    if not lines and not head:
        assert passes_per_epoch(TABLE, found["blend"]) == (1, 1, 1)


def test_a_schedule_is_the_mixture_with_other_values(tmp_path: Path) -> None:
    text = DATASETS.format(a="weight = 1", text="weight = 1", b="weight = 1", c="weight = 1\nmax_samples = 7")
    found = packing(
        tmp_path,
        text
        + """
        [[schedule]]
        step = 0
        max_length = 20
        weights = {text.b = 0}
        [[schedule]]
        step = 100
        weights = {a = 3, "text.c" = 0}
        max_samples = {a = 5}
        seed = 9
        """,
    )
    assert found["blend"] == Blend("tokens", (1, 0, 1), (None, None, 7), 20)
    assert found["schedule"] == (Change(100, Blend("tokens", (3, 1, 0), (5, None, 7)), 9),)


def test_a_loader_and_the_commands_take_a_file(
    chat: Path, receipts: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    for name, folder in (("chat", chat), ("receipts", receipts)):
        (tmp_path / name).symlink_to(folder)
    file = tmp_path / "mixture.toml"
    file.write_text(
        '[datasets.chat]\npath = "chat"\nweight = 1\n[datasets.receipts]\npath = "receipts"\nweight = 3\n'
        "[[schedule]]\nstep = 2\nweights = {receipts = 0}"
    )
    with stream(file, parts=()) as mixed, stream([chat, receipts], parts=(), **options_of(file, mixed)) as plain:
        assert [name for name, _ in mixed.fingerprints] == [str(tmp_path / "chat"), str(tmp_path / "receipts")]
        assert mixed.plan_config == plain.plan_config
        assert mixed.plan().num_steps == 2
    sizes = ["--capacity", 832, "--global-batch", 4, "--max-patches", 200]
    report = json.loads(run("plan", file, *sizes, "--steps", 4, "--json")[1])
    assert [part["datasets"][1]["token_share"] > 0 for part in report["mixture"]] == [True, True, False, False]
    assert len(json.loads(run("inspect", file, *sizes, "--step", "1:0", "--json")[1])["datasets"]) == 2
    assert run("plan", file, *sizes, "--weights", "1,2")[0] == 2
    with pytest.raises(UsageError, match="give it alone"):
        mixture_in([file, chat])


def options_of(file: Path, loader: Any) -> dict[str, Any]:
    return read_mixture(file).packing(loader.plan().table)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no datasets"),
        ("by = 'bytes'", "by is 'bytes'; it must be one of epochs, tokens, samples, targets"),
        ("[datasets]\na = 5", "datasets.a is 5"),
        ("[datasets.a]", "datasets.a has neither a path nor members"),
        ("[datasets.a]\npath = 5", "datasets.a.path is 5"),
        ("[datasets.a]\npath = 'a'\nwieght = 5", "unknown key datasets.a.wieght; known are path, weight"),
        ("[datasets.a]\npath = 'a'\nweight = -1", "datasets.a.weight is -1; it must be a number of at least 0"),
        ("[datasets.a]\npath = 'a'\nmax_samples = 0", "datasets.a.max_samples is 0"),
        ("[datasets.a]\npath = 'a'\nweight = 0", "all members of the mixture have weight 0"),
        ("[datasets.a]\npath = 'a'\nweight = 1\n[datasets.b]\npath = 'b'", "but b has none"),
        ("by = 'epochs'\ntemperature = 2\n[datasets.a]\npath = 'a'", "a temperature"),
        ("temperature = 0\n[datasets.a]\npath = 'a'", "temperature is 0; it must be a number above 0"),
        ("schedule = 5\n[datasets.a]\npath = 'a'", "schedule is 5"),
        ("[datasets.a]\npath = 'a'\n[[schedule]]\nstep = -1", r"schedule\[0\].step is -1"),
        ("[datasets.a]\npath = 'a'\n[[schedule]]\nstep = 1\nseed = 'x'", r"schedule\[0\].seed is 'x'"),
        ("[datasets.a]\npath = 'a'\n[[schedule]]\nstep = 1\nweights = {b = 1}", r"weights is 'b'; it must be one of a"),
        ("[datasets.a]\npath = 'a'\n[[schedule]]\nstep = 1\nweights = {a = 0}", "all members of the mixture"),
        ("[datasets.a]\npath = 'a'\n[[schedule]]\nstep = 2\n[[schedule]]\nstep = 1", r"schedule.step is \[2, 1\]"),
        ("[datasets.'a.b']\npath = 'a'", "a name without dots"),
        ("datasets = [", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=rf"mixture\.toml.*{problem}"):
        packing(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read: No such file"):
        read_mixture(tmp_path / "none.toml")
