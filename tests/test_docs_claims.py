"""Claims of the docs that the code can check: numbers, lists of names, paths of files, order of imports."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from vlmdata import workers
from vlmdata.cli.main import COMMANDS
from vlmdata.families import DEFAULT_FAMILY, family
from vlmdata.format.index_row import index_schema
from vlmdata.format.schema import SCHEMA_VERSION, supported_features
from vlmdata.loader.config import PARTS, LoaderConfig, Service
from vlmdata.loader.fill import filler
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.packing.config import ALGORITHM_VERSION
from vlmdata.preprocess.cli.command import PreprocessCommand
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.recipes import web_images
from vlmdata.preprocess.registries import ENGINES, RECIPES
from vlmdata.reasons import Reason
from vlmdata.service.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
WORDS = {3: "three", 4: "four", 5: "five"}
FAMILY = family(DEFAULT_FAMILY)
GROUPS = [each.name for each in dataclasses.fields(LoaderConfig)]


def text(page: str) -> str:
    """The page in one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def first_cells(page: str, header: str) -> list[str]:
    """The first cell of each row of the table that begins with ``header``."""
    lines = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{header}\n")[2].splitlines()
    assert lines, f"{page} has no table {header}"
    rows = lines[1 : next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [row.replace(r"\|", "¦").split("|")[1] for row in rows]


def names_in(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("docs/loader.md", f"default and limits, in {WORDS[len(GROUPS)]} groups"),
        ("docs/loader.md", f"After {WORDS[filler._MAX_DEATHS]} deaths over the same batch"),
        ("docs/engines.md", f"After {WORDS[workers.MAX_DEATHS]} deaths in a row"),
        ("docs/glossary.md", f"one of the {WORDS[len(PARTS)]} groups of tensors, `tokens`, `labels` or `pixels`"),
        ("docs/data-format.md", f"The schema version is **{SCHEMA_VERSION}**"),
        ("docs/packing.md", f"The algorithm has a version, {ALGORITHM_VERSION}."),
        ("docs/preprocess.md", f"{FAMILY.min_pixels:,} to {FAMILY.max_pixels:,} pixels by default for `{FAMILY.name}`"),
        ("docs/codecs.md", f"the default `--max-pixels` of Qwen3.5 ({FAMILY.max_pixels:,})"),
        ("docs/preprocess.md", f"Samples of more than {PreprocessConfig.max_length:,} tokens are rejected"),
        ("docs/preprocess.md", f"(default {PreprocessCommand.max_reject_rate:g})"),
        ("docs/sources.md", f"has not arrived after {web_images._DEADLINE_SECONDS:g} seconds"),
        ("docs/service.md", f"no answer within `hedge` seconds ({Service.hedge:g} by default"),
        ("docs/service.md", f"| {ServerConfig.max_calls} queries at the same time"),
        ("docs/service.md", f"| `--stall` ({ServerConfig.stall:g} s) |"),
        ("docs/service.md", f"| {ServerConfig.timeout:g} s | the longest wait of a query"),
        ("docs/service.md", f"| `--ahead` ({ServerConfig.ahead}) |"),
    ],
)
def test_the_page_has_the_number_of_the_code(page: str, sentence: str) -> None:
    assert sentence in text(page)


def test_the_groups_of_the_loaders_options_are_listed() -> None:
    assert names_in(first_cells("docs/loader.md", "| group | controls |")) == GROUPS


def test_codecs_recipes_and_engines_are_listed() -> None:
    assert names_in(first_cells("docs/codecs.md", "| `--pixels` | stores | choose it if |")) == list(CODECS)
    assert set(names_in(first_cells("docs/recipes.md", "| recipe | reads | makes |"))) == set(RECIPES)
    assert {f"--engine {name}" in text("docs/engines.md") for name in ENGINES} == {True}


def test_the_data_format_lists_reasons_columns_and_features() -> None:
    page = "docs/data-format.md"
    reasons = names_in(first_cells(page, "| reason | meaning |"))
    assert sorted(reasons) == sorted(Reason)
    columns = names_in(first_cells(page, "| column | type | meaning |"))
    assert sorted(columns) == sorted(index_schema(supported_features()).names)
    features = set(names_in(first_cells(page, "| feature | since | means |")))
    assert {each if not each.startswith("patches-") else "patches-NAME" for each in supported_features()} <= features


def test_the_readme_is_short_and_lists_every_command() -> None:
    commands = " ".join(first_cells("README.md", "| command | what it does |"))
    assert set(re.findall(r"vlmdata ([\w-]+)", commands)) == set(COMMANDS)
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_the_page_of_versions_has_those_of_the_project_and_the_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in project["dependencies"])  # type: ignore[union-attr]
    locked = dict(line.split("==") for line in (ROOT / "requirements/lock.txt").read_text().split())
    page = (ROOT / "docs/compatibility.md").read_text()
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    told = {name: (least, lock) for name, least, lock in rows if name != "Python"}
    assert told == {name: (lowest[name], locked[name]) for name in told}
    pins = [line.split("==")[0] for line in (ROOT / "requirements/pins.txt").read_text().splitlines() if "==" in line]
    assert [name for name in pins if name not in page] == []


def test_every_path_that_a_page_names_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    folders = "vlmdata|preprocess|model|tests|tools|benchmarks|examples|docs|requirements"
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    missing = {(page, path) for page, path in named if "/X/" not in path and not (ROOT / path).exists()}
    assert not missing


def test_contributing_says_where_tests_stand() -> None:
    assert "Tests of `vlmdata/X/` are in `tests/X/`" in text("CONTRIBUTING.md")
    without = set()
    for package, tests in (("vlmdata", "tests"), ("preprocess", "tests/preprocess"), ("model", "tests/model")):
        folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        without |= {f"{package}/{name}" for name in folders if not (ROOT / tests / name).is_dir()}
    assert without == {"vlmdata/cli", "preprocess/shards", "model/weight_names"}, "the page names these three"


def test_contributing_lists_the_layers_in_the_order_of_the_import_contract() -> None:
    (listed,) = re.findall(r"The folders of `vlmdata` are layers: ([^;]+);", text("CONTRIBUTING.md"))
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (tower,) = [each["layers"] for each in contracts if each.get("containers") == ["vlmdata"]]
    level = {name: -number for number, layer in enumerate(tower) for name in layer.split(" : ")}
    levels = [level[name] for name in re.findall(r"\w+", listed)]
    assert levels == sorted(levels)
