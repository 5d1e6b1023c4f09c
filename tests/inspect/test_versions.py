"""Versions in the page: as recorded by runs, what changed as `vlmdata diff` lists it, and links to samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.changing_source import Team, row
from tests.inspect.browser import Visit
from tests.inspect.conftest import Command
from tests.inspect.serving import serving
from tests.inspect.test_page import blocks, parsed
from tests.preprocess.command_line import Ended


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Team:
    """Three versions: 8 rows (one rejected); an edited image and two more rows; all but the first three rows."""
    team = Team(tmp_path_factory.mktemp("team"))
    team.run()
    team.paint(1, seed=77)
    team.run([*team.rows, row("Row 8"), row("Row 9")])
    team.run(team.rows[3:])
    return team


def test_versions_are_as_the_runs_made_them(team: Team, command: Command) -> None:
    code, out, _ = command(team.out, "--versions", "--json")
    assert code == 0
    found = json.loads(out)["versions"]
    shards = [
        {str((team.version(n).directory / s.name).resolve()) for s in team.version(n).manifest.shards}
        for n in (1, 2, 3)
    ]
    assert [(each["number"], each["parent"], each["samples"]) for each in found] == [(1, None, 7), (2, 1, 9), (3, 2, 6)]
    assert [each["rows"] for each in found] == [
        {},
        {"kept": 7, "made": 3, "removed": 1},
        {"kept": 7, "made": 0, "removed": 3},
    ]
    assert [each["fingerprint"] for each in found] == [team.version(n).manifest.fingerprint for n in (1, 2, 3)]
    assert [each["shards"] for each in found] == [len(each) for each in shards]
    assert found[0]["shards_added"] is None
    for n in (1, 2):
        assert found[n]["shards_added"] == len(shards[n] - shards[n - 1])
        assert found[n]["shards_removed"] == len(shards[n - 1] - shards[n])
    card = command(team.out)[1]
    assert "holdout" not in card
    assert "rows.jsonl" in card
    text = command(team.out, "--versions")[1]
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")] == ["1", "2", "3"]


def test_a_pruned_parent_is_named_so(
    team: Team, tmp_path: Path, command: Command, vlmdata: Callable[..., Ended]
) -> None:
    out = shutil.copytree(team.out, tmp_path / "out", symlinks=True)
    assert vlmdata("prune", out, 1)[0] == 0
    found = json.loads(command(out, "--versions", "--json")[1])["versions"]
    assert [(each["number"], each["parent"]) for each in found] == [(2, None), (3, 2)]
    assert found[0]["parent_fingerprint"]
    assert "pruned" in command(out, "--versions")[1]


def test_a_dataset_without_versions_has_one(demo: Path, tmp_path: Path, command: Command) -> None:
    found = json.loads(command(demo, "--versions", "--json")[1])["versions"]
    assert [(each["number"], each["parent"], each["samples"], each["rows"]) for each in found] == [(1, None, 8, {})]
    assert command(demo, "--html", tmp_path / "page.html", "--samples", 0)[0] == 0
    assert blocks(parsed(tmp_path / "page.html"))["boot"]["comparisons"] == []


def test_the_server_compares_any_two_as_diff_does(team: Team, vlmdata: Callable[..., Ended]) -> None:
    with serving(team.out) as client:
        assert client.ask("/api/versions").json()["shown"] == 3
        assert "<title>out@3 · vlmdata inspect</title>" in client.ask("/").text
        assert client.ask("/api/mixture").json()["datasets"] == ["out@3"]
        for first, second in ((1, 2), (1, 3), (3, 1), (2, 2)):
            found = client.ask(f"/api/versions/compare?first={first}&second={second}").json()
            listed = json.loads(vlmdata("diff", f"{team.out}@{first}", f"{team.out}@{second}", "--json")[1])
            assert (found["equal"], found["samples"]) == (listed["equal"], listed["samples"])
            for kind in ("only_first", "only_second"):
                assert [each["key"] for each in found[kind]["samples"]] == listed[kind]
                assert found[kind]["count"] == len(listed[kind])
                keys = team.version(3).index.keys.to_pylist()
                for each in found[kind]["samples"]:
                    assert each["index"] == (keys.index(each["key"]) if each["key"] in keys else None)
        answer = client.ask("/api/versions/compare?first=1&second=9")
        assert (answer.status, "has no version 9; it has 1, 2, 3" in answer.json()["error"]) == (404, True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "served"])
def test_a_browser_links_to_the_changed_samples(
    team: Team, tmp_path: Path, command: Command, browser: Any, way: str
) -> None:
    with ExitStack() as stack:
        if way == "file":
            assert command(team.out, "--html", tmp_path / "page.html")[0] == 0
            url = (tmp_path / "page.html").as_uri()
        else:
            url = stack.enter_context(serving(team.out)).home
        visit = Visit(browser, f"{url}#versions")
        page = visit.page
        page.wait_for_selector("#versions-diff [data-group=removed]")
        assert page.locator("#versions-table tbody tr").count() == 3
        assert page.inner_text("[data-group=removed] h3") == "3 only in version 2"
        assert page.locator("[data-group=removed] a").count() == 0
        page.select_option("select[aria-label='to version']", "2")
        page.select_option("select[aria-label='from version']", "1")
        page.wait_for_function(
            "() => document.querySelector('[data-group=added] h3')?.textContent === '3 only in version 2'"
        )
        visit.shot(f"versions-{way}")
        page.click("[data-group=added] a >> nth=0")
        page.wait_for_selector(".detail .tokens")
        page.keyboard.press("v")
        page.select_option("select[aria-label='to version']", "3")
        if way == "file":
            page.wait_for_function("() => document.querySelector('#versions-diff .error')")
        else:
            page.wait_for_function(
                "() => document.querySelector('[data-group=removed] h3')?.textContent.endsWith('in version 1')"
            )
        assert visit.complaints == []
