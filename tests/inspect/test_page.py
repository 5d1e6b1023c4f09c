"""The one-file page as text: self-contained, its policy true, nothing in it forged by data."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.inspect.conftest import HOSTILE, Command
from tests.inspect.raw import read_samples
from vlmdata.inspect.dataset import describe_dataset
from vlmdata.inspect.page.build import choose_samples, json_block
from vlmdata.storage.open import open_dataset


class Parser(HTMLParser):
    """Collects elements, their attributes, and what scripts and styles hold."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, dict[str, str | None], str]] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append((tag, dict(attrs), ""))
            self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            tag, attributes, text = self.inside[-1]
            self.inside[-1] = (tag, attributes, text + data)


def parsed(path: Path) -> Parser:
    parser = Parser()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


@pytest.fixture
def page(demo: Path, tmp_path: Path, command: Command) -> Path:
    code, _, _ = command(demo, "--html", tmp_path / "demo.html", "--packs", 2)
    assert code == 0
    return tmp_path / "demo.html"


def blocks(parser: Parser) -> dict[str, Any]:
    return {
        str(attributes["id"]): json.loads(text)
        for _, attributes, text in parser.inside
        if attributes.get("type") == "application/json"
    }


def test_nothing_is_asked_of_elsewhere(page: Path) -> None:
    parser = parsed(page)
    for tag, attributes in parser.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    style = next(text for tag, _, text in parser.inside if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_lets_only_this_script_and_style_run(page: Path) -> None:
    parser = parsed(page)
    policy = next(a["content"] for tag, a in parser.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert (rules["default-src"], rules["connect-src"], rules["img-src"]) == ("'none'", "'none'", "data:")
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        texts = [text for each, attributes, text in parser.inside if each == tag and not attributes.get("type")]
        assert len(texts) == 1
        digest = base64.b64encode(hashlib.sha256(texts[0].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_samples_and_pictures_are_those_of_the_shards(page: Path, demo: Path) -> None:
    found = blocks(parsed(page))
    raw = read_samples(demo)
    assert {sample["index"] for sample in found["boot"]["samples"]} == set(range(len(raw)))
    for i, sample in enumerate(raw):
        block = found[f"sample-{i}"]
        assert block["tokens"]["id"] == sample.ids.tolist()
        assert block["tokens"]["mask"] == sample.mask.tolist()
        assert [block["tokens"][axis] for axis in "thw"] == sample.positions.tolist()
        source = block["images"][0]["src"]
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/webp;base64,")))))
        expected = sample.picture(0)
        assert shown.shape == expected.shape
        # WebP loses a little, but it is this picture, upright.
        assert np.abs(shown.astype(float) - expected).mean() < 6


def test_packs_are_in_the_page(page: Path) -> None:
    packs = blocks(parsed(page))["boot"]["packs"]
    assert len(packs["batches"]) == min(2, packs["total"])


def test_hostile_text_forges_no_element(hostile: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "hostile.html"
    assert command(hostile, "--html", target)[0] == 0
    text = target.read_text(encoding="utf-8")
    parser = parsed(target)
    assert {tag for tag, _ in parser.elements} & {"img", "svg", "iframe", "object", "embed"} == set()
    assert len([1 for tag, _ in parser.elements if tag == "script"]) == 2 + len(HOSTILE)
    assert "<img src=x" not in text
    assert "window.pwned" not in parser.inside[-1][2]
    found = blocks(parser)
    for i, attack in enumerate(HOSTILE):
        answer = "".join(span["text"] for span in found[f"sample-{i}"]["spans"] if span["target"])
        # What a browser will show is the text itself, with control characters written out.
        assert (
            "".join(c for c in attack.strip() if c.isprintable() and c.isascii())[:12] in answer or not attack.isascii()
        )


@pytest.mark.parametrize("value", ["</script>", "<!--", "]]>", "\u2028", "\ud800", "&amp;", "'\""])
def test_json_blocks_hold_no_character_that_html_minds(value: str) -> None:
    text = json_block({"x": value})
    assert not set(text) & set("<>&")
    assert text.isascii()
    assert json.loads(text) == {"x": value}


def test_a_folder_name_is_no_markup(demo: Path, copy_of: Any, tmp_path: Path, command: Command) -> None:
    evil = copy_of(demo).rename(tmp_path / "<b onload=x>&amp;")
    assert command(evil, "--html", tmp_path / "page.html", "--samples", 1)[0] == 0
    assert "b" not in [tag for tag, _ in parsed(tmp_path / "page.html").elements]


def test_given_keys_are_shown_in_their_order(demo: Path, tmp_path: Path, command: Command) -> None:
    command(demo, "--html", tmp_path / "page.html", "--keys", "000000005,2")
    shown = blocks(parsed(tmp_path / "page.html"))["boot"]["samples"]
    assert [(sample["index"], sample["why"]) for sample in shown] == [(5, "asked for"), (2, "asked for")]


def test_chosen_samples_are_extremes_then_random_by_seed(demo: Path) -> None:
    dataset = open_dataset(demo)
    card = describe_dataset(dataset)
    assert set(choose_samples(card, 8, 50, 0)) == set(range(8))
    first = choose_samples(card, 1000, 30, 0)
    assert len(first) == 30
    assert first == choose_samples(card, 1000, 30, 0)
    assert first != choose_samples(card, 1000, 30, 1)
    extremes = {sample.index for group in card.extremes for sample in group.samples}
    assert {i for i, why in first.items() if why != "random"} >= extremes
