"""Property tests draw the same examples each time, unless they explore."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import explore, property_tests


def run_there(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder whose modules and those of these tests can be imported."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # most of a start are plugins that these tests do not need
        "PYTEST_PLUGINS": "_hypothesis_pytestplugin",
    }
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def drawn() -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=150)
    @given(st.one_of(st.text(), st.integers()))
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def test_examples_are_the_same_each_time() -> None:
    assert settings.get_current_profile_name() == property_tests.REPEATABLE
    assert drawn() == drawn()


def test_constants_of_the_code_do_not_change_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    module = ModuleType("imported_during_the_tests")
    module.__file__ = str(tmp_path / "module.py")
    Path(module.__file__).write_text("\n".join(f"'constant {n}', {4_000_000_000 + n}" for n in range(500)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert drawn() == before


class TestExplore:
    def test_a_failure_is_found_and_its_command_repeats_it(self, tmp_path: Path) -> None:
        (tmp_path / "conftest.py").write_text(
            "from tests import property_tests\n"
            "property_tests.load_profiles()\n"
            "def pytest_collection_finish():\n    property_tests.fix_constants()\n"
        )
        (tmp_path / "test_it.py").write_text(
            "from hypothesis import given, strategies as st\n\n\n"
            "@given(st.integers(0, 10**9))\ndef test_it(n):\n    assert n < 1000\n\n\n"
            "@given(st.text())\ndef test_it_holds(text):\n    pass\n\n\n"
            "def test_another():\n    assert False\n"
        )
        options = ["--minutes", "5", "--out", str(tmp_path / "out"), "--most-runs", "2", "."]
        run = run_there(tmp_path, "-m", "tests.explore", *options)
        assert run.returncode == 1, run.stdout + run.stderr
        assert "Failing test case: test_it(\n" in run.stdout
        assert "2 runs of 1 file; 1 test failed\n" in run.stdout
        (command,) = {line.strip() for line in run.stdout.splitlines() if line.startswith("  .venv/bin/python")}
        program, *repeat = shlex.split(command)
        assert program == ".venv/bin/python"
        again = run_there(tmp_path, *repeat)
        assert again.returncode == 1
        assert "Failing test case: test_it(\n" in again.stdout
        assert "1 failed" in again.stdout
        (kept,) = (tmp_path / "out").iterdir()
        assert "Failing test case" in kept.read_text()

    def test_a_folder_without_property_tests_is_an_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert explore.main(["--minutes", "1", str(tmp_path)]) == 2
        assert "no property test" in capsys.readouterr().err
