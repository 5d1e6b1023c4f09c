"""Recipes and engines by module or file name, and the remedies if Python does not find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmdata.errors import SourceError
from vlmdata.preprocess.engines.base import load_engine
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.registry import Registry, not_callable


def registry(**built_in: str) -> Registry[type]:
    return Registry("recipe", "vlmdata.recipes", "--recipe", not_callable, built_in, SourceError)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("mine_here:Mine", "To use mine_here.py of this folder, set PYTHONPATH=. or write mine_here.py:Mine. Built in"),
        ("folder_here.mine:Mine", "To use folder_here/mine.py of this folder, set PYTHONPATH=. or write folder_here/"),
        ("nowhere.mine:Mine", "Set PYTHONPATH to the module's folder, or write path/to/nowhere/mine.py:Mine. Built in"),
        ("json.mine:Mine", "No module named 'json.mine'. Set PYTHONPATH"),
        ("needy.py:Mine", "cannot load needy.py:Mine: No module named 'absent'. Built in: one."),
        ("mine_here.py:Yours", ": mine_here.py has no attribute 'Yours'. Built in: one."),
        ("wrong.py:Mine", ": SyntaxError: '(' was never closed (wrong.py, line 2). Built in: one."),
        ("raising.py:Mine", ": ZeroDivisionError: division by zero (raising.py, line 2). Built in: one."),
    ],
)
def test_an_import_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    (tmp_path / "folder_here").mkdir()
    for file in ("mine_here.py", "folder_here/mine.py"):
        (tmp_path / file).write_text("class Mine: ...")
    (tmp_path / "needy.py").write_text("import absent")
    (tmp_path / "wrong.py").write_text("\nx = (")
    (tmp_path / "raising.py").write_text("\n1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=f"--recipe {name}: cannot load") as raised:
        registry(one="json:load").find(name)
    assert remedy in str(raised.value)
    assert registry().find("mine_here.py:Mine").__name__ == "Mine"


OWN = """
from dataclasses import dataclass

class WithoutCall: ...

class PlainOptions:
    class Options: ...
    def __init__(self, options): ...
    def __call__(self, row): ...

class Failing:
    def __init__(self): raise KeyError("no model")
    def __call__(self, row): ...

number = 3
"""


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("WithoutCall", ": it has no method __call__(self, row), which converts a row."),
        ("PlainOptions", ": its Options must be a frozen dataclass: write @dataclass(frozen=True)."),
        ("Failing", ": its constructor failed: KeyError: 'no model' (own.py, line 12)"),
        ("number", ": it is an int, not a class."),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, attribute: str, words: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(SourceError) as raised:
        load_recipe(f"{tmp_path}/own.py:{attribute}")
    assert str(raised.value).endswith(f"own.py:{attribute}{words}")


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(SourceError, match=r"own\.py:WithoutCall: it has no method `run`\. Derive it from"):
        load_engine(f"{tmp_path}/own.py:WithoutCall")
