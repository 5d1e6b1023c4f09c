"""The mixture over steps in the page: the numbers of `vlmdata plan`, for one, several and many datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.inspect.browser import Visit, launched
from tests.inspect.conftest import Command
from tests.inspect.serving import Client, mixture_server
from tests.inspect.test_page import blocks, parsed
from tests.preprocess.command_line import Ended

SIZES = ("--capacity", 2048, "--global-batch", 1)


@pytest.fixture
def mixture(demo: Path, mixed: Path, tmp_path: Path) -> Path:
    file = tmp_path / "mixture.toml"
    file.write_text(
        f'[datasets.receipts]\npath = "{demo}"\nweight = 1\n[datasets.chats]\npath = "{mixed}"\nweight = 1\n'
        "[[schedule]]\nstep = 3\nweights = {receipts = 1, chats = 0}\n"
    )
    return file


def in_page(file: Path) -> Any:
    return blocks(parsed(file))["boot"]


def test_the_page_has_the_numbers_of_plan(
    mixture: Path, tmp_path: Path, command: Command, vlmdata: Callable[..., Ended]
) -> None:
    target = tmp_path / "page.html"
    code, _, error = command(mixture, "--html", target, *SIZES, "--steps", 7)
    assert code == 0, error
    boot = in_page(target)
    planned = json.loads(vlmdata("plan", mixture, *SIZES, "--steps", 7, "--json")[1])["mixture"]
    assert boot["mixture"]["parts"] == planned
    assert [part["first_step"] for part in planned] == list(range(7))
    assert [part["first_step"] for part in planned if part["changed"]] == [3]
    assert [part["datasets"][1]["samples"] == 0 for part in planned] == [False] * 3 + [True] * 4
    assert (boot["card"], boot["name"], boot["mixture"]["datasets"]) == (None, "mixture.toml", ["demo", "dataset"])
    assert boot["packs"]["batches"]


def test_one_dataset_has_all_of_each_step(demo: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "page.html"
    assert command(demo, "--html", target, *SIZES, "--samples", 0)[0] == 0
    shares = in_page(target)["mixture"]
    assert shares["datasets"] == ["demo"]
    assert {part["datasets"][0]["token_share"] for part in shares["parts"]} == {1.0}


def test_thousands_of_steps_of_twenty_datasets_are_few_parts(demo: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "page.html"
    code, _, error = command(*[demo] * 20, "--html", target, *SIZES, "--steps", 3000, "--packs", 0)
    assert code == 0, error
    shares = in_page(target)["mixture"]
    assert len(set(shares["datasets"])) == 1
    assert len(shares["parts"]) <= 64
    assert sum(part["steps"] for part in shares["parts"]) == 3000


def test_wrong_requests_say_what_is_right(demo: Path, mixed: Path, tmp_path: Path, command: Command) -> None:
    code, _, error = command(demo, "--steps", 3)
    assert code == 2
    assert "`vlmdata plan --steps` prints the mixture" in " ".join(error.split())
    code, _, error = command(demo, mixed, "--html", tmp_path / "x.html", "--keys", "1")
    assert code == 2
    assert "leave out --keys" in " ".join(error.split())


def test_the_server_of_a_mixture_has_no_samples(mixture: Path) -> None:
    with mixture_server(mixture, steps=7) as client:
        assert client.ask("/").status == 200
        assert len(client.ask("/api/mixture").json()["parts"]) == 7
        assert client.ask("/api/samples").status == 404


def charts(page: Any) -> dict[str, list[float]]:
    """Heights of the bars of the second dataset, by unit."""
    found: dict[str, list[float]] = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.mixture')].map((each) => [each.dataset.unit,"
        " [...each.querySelectorAll('rect[data-dataset=\"1\"]')].map((bar) => Number(bar.getAttribute('height')))]))"
    )
    return found


@pytest.mark.slow
def test_a_browser_draws_the_shares(mixture: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "page.html"
    assert command(mixture, "--html", target, *SIZES, "--steps", 7)[0] == 0
    parts = in_page(target)["mixture"]["parts"]

    def look(url: str, name: str) -> None:
        visit = Visit(browser, url)
        visit.page.wait_for_selector(".mixture")
        fields = {"samples": "sample_share", "tokens": "token_share", "targets": "target_share"}
        assert charts(visit.page) == {
            unit: pytest.approx([120 * part["datasets"][1][field] for part in parts[:3]])
            for unit, field in fields.items()
        }
        assert visit.page.locator(".mixture >> nth=0 >> .change").count() == 1
        assert visit.page.locator("nav a:visible").all_inner_texts() == ["Mixture", "Packs"]
        visit.shot(f"mixture-{name}")
        visit.page.keyboard.press("p")
        visit.page.wait_for_selector(".pack")
        assert visit.complaints == []

    client: Client
    with launched() as browser, mixture_server(mixture, steps=7) as client:
        look(target.as_uri(), "file")
        look(client.home, "served")
