"""Loss weights in every view: shown where a sample has them, absent where all its targets weigh 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat_rows import turn
from tests.inspect.browser import Visit, launched
from tests.inspect.conftest import Command, once
from tests.weighted import build_weighted
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect import describe_dataset, describe_sample
from vlmdata.inspect.page.payload import sample_payload
from vlmdata.storage.open import open_dataset

WEIGHTED, UNWEIGHTED, ZERO = "000000000", "000000001", "000000002"


@pytest.fixture(scope="module")
def weighted(shared_folder: Path) -> Path:
    """A chat whose two answers weigh 0.05 and 2, one without weights, and one whose first answer is not learned."""
    talk = [turn("user", "Two and two?"), turn("assistant", "Four."), turn("user", "Sure?"), turn("assistant", "Yes.")]
    weights: list[dict[str, Any]] = [{"of_sample": 0.5, "of_turns": [0.1, 4]}, {}, {"of_turns": [0, None]}]

    def make(folder: Path) -> None:
        build_weighted(folder, [{"messages": talk, **extra} for extra in weights])

    return once(shared_folder, "loss-weights", make) / "dataset"


@pytest.fixture(scope="module")
def dataset(weighted: Path) -> VlmDataset:
    return open_dataset(weighted)


def test_spans_and_tokens_have_the_weights_of_the_sample(dataset: VlmDataset) -> None:
    found, sample = describe_sample(dataset, WEIGHTED), dataset.sample(WEIGHTED)
    assert sample.loss_weights is not None
    assert found.tokens.weights is not None
    assert np.array_equal(found.tokens.weights, sample.loss_weights[: sample.length])
    for span in found.spans:
        assert {span.weight} == set(sample.loss_weights[span.start : span.stop].tolist())
    assert {span.weight for span in found.spans if span.target} == {float(np.float32(0.05)), 2.0}
    for key in (UNWEIGHTED, ZERO):
        plain = describe_sample(dataset, key)
        assert plain.tokens.weights is None
        assert {span.weight for span in plain.spans} == {None}


def test_weights_are_no_finding(dataset: VlmDataset) -> None:
    assert describe_dataset(dataset, check=None).findings == ()
    assert all(describe_sample(dataset, key).findings == () for key in (WEIGHTED, UNWEIGHTED, ZERO))


def test_the_terminal_shows_them(weighted: Path, command: Command) -> None:
    _, out, _ = command(weighted, "--sample", WEIGHTED, "--tokens")
    assert "weights 0.05 to 2" in out
    assert "⟦×0.05 Four.<|im_end|>↵\n⟧" in out
    assert "⟦×2 Yes." in out
    header = next(line for line in out.splitlines() if "index" in line and "mask" in line)
    assert header.split()[3:6] == ["label", "mask", "weight"]
    for key, text in ((UNWEIGHTED, "⟦Four."), (ZERO, "⟦Yes.")):
        _, out, _ = command(weighted, "--sample", key, "--tokens")
        assert text in out
        assert "weigh" not in out
        assert "×" not in out


def test_json_has_them(weighted: Path, command: Command) -> None:
    for key, own in ((WEIGHTED, True), (UNWEIGHTED, False)):
        code, out, _ = command(weighted, "--sample", key, "--json")
        assert code == 0
        assert (json.loads(out)["tokens"]["weights"] is not None) == own


def test_the_page_has_them_as_they_were_written(dataset: VlmDataset) -> None:
    tokens = sample_payload(describe_sample(dataset, WEIGHTED))["tokens"]
    assert set(tokens["weight"]) == {0.0, 0.05, 2.0}
    assert len(tokens["weight"]) == len(tokens["mask"])
    assert "weight" not in sample_payload(describe_sample(dataset, UNWEIGHTED))["tokens"]


@pytest.fixture
def visit(weighted: Path, tmp_path: Path, command: Command) -> Iterator[Visit]:
    with launched() as browser:
        assert command(weighted, "--html", tmp_path / "page.html")[0] == 0
        found = Visit(browser, (tmp_path / "page.html").as_uri())
        yield found
        assert found.complaints == []


def test_a_token_on_the_page_tells_its_weight(visit: Visit, dataset: VlmDataset) -> None:
    visit.open_sample(0)
    first = int(dataset.sample(WEIGHTED).loss_mask.argmax())
    visit.page.hover(f".tok[data-i='{first}']")
    assert visit.field("weight") == "0.05"
    visit.page.keyboard.press("t")
    headers = visit.page.locator("#token-table th").all_inner_texts()
    assert [header.lower() for header in headers] == ["index", "id", "text", "label", "mask", "weight", "t", "h", "w"]
    assert visit.page.locator(f"#token-table tr[data-i='{first}'] td >> nth=5").inner_text() == "0.05"
    visit.open_sample(1)
    visit.page.hover(f".tok[data-i='{first}']")
    assert visit.page.locator('#strip [data-field="weight"]').count() == 0
