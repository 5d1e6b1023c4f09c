"""What a release carries besides code: its version, its history, and how to cite it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from vlmdata import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_open_version_is_the_first_of_the_history_and_the_cited_one_the_last_closed() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == (__version__.partition(".dev")[0], "not released") or (
        versions[0][0] == __version__ and versions[0][1] != "not released"
    )
    closed = next(each for each in versions if each[1] != "not released")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == closed
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]


def test_the_workflows_test_each_python_that_is_classified() -> None:
    classified = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each}
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    tested = {(ROOT / ".python-version").read_text().strip(), *re.findall(r"3\.\d\d\b", workflows)}
    assert classified == tested
    assert PROJECT["requires-python"] == f">=3.12,<3.{max(int(each[2:]) for each in classified) + 1}"
