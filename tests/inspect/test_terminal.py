"""What the terminal shows: pinned for the demo dataset, and harmless for hostile data.

``VLMDATA_UPDATE_GOLDEN=1 pytest tests/inspect/test_terminal.py`` writes the pinned texts anew; look at the difference.
"""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

import pytest

from tests.inspect.conftest import HOSTILE, Command
from vlmdata.inspect.text import visible
from vlmdata.storage.open import open_dataset

GOLDEN = Path(__file__).parent / "golden"
VIEWS: dict[str, list[str]] = {
    "card": [],
    "sample": ["--sample", "000000002", "--tokens"],
    "find": ["--find", "target<40% describe"],
    "pack": ["--pack", "1", "--capacity", "2048", "--cp", "2", "--tp", "2"],
    "step": ["--step", "0:0", "--capacity", "2048", "--global-batch", "2", "--dp", "2"],
    "row": ["--row", "5", "--capacity", "2048"],
}


def plain(text: str, directory: Path) -> str:
    """Without what differs between machines and library versions: path, hashes, trailing spaces."""
    text = text.replace(str(directory), "DEMO")
    text = re.sub(r"\b[0-9a-f]{16}\b", "0123456789abcdef", text)
    text = re.sub(r"vlmdata \d\S* +", "vlmdata VERSION ", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("view", VIEWS)
def test_the_demo_looks_as_it_did(view: str, demo: Path, command: Command) -> None:
    code, out, _ = command(demo, *VIEWS[view])
    assert code == 0
    path = GOLDEN / f"{view}.txt"
    if os.environ.get("VLMDATA_UPDATE_GOLDEN"):
        path.write_text(plain(out, demo))
    assert plain(out, demo) == path.read_text()


def test_all_samples_of_a_row_are_shown(lists: Path, command: Command) -> None:
    code, out, _ = command(lists, "--row", "1")
    assert code == 0
    path = GOLDEN / "row_of_samples.txt"
    text = plain(out, lists)
    if os.environ.get("VLMDATA_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_documents_are_shown(texts: Path, command: Command) -> None:
    _, out, _ = command(texts, "--row", 2)
    assert "source row 2: 3 of 3 samples accepted" in out
    assert out.count("turns       none") == 3
    assert out.count("truncated") == 2
    assert out.count("⟦") == out.count("⟧") == 3 + 3 + 1  # legends, pieces, and the text after the image
    for view in ((), ("--pack", "0"), ("--find", "word1")):
        code, out, _ = command(texts, *view)
        assert code == 0
        assert "no_turn" not in out


def test_no_line_is_wider_than_the_terminal(demo: Path, command: Command) -> None:
    for name in ("card", "sample", "pack", "row"):
        _, out, _ = command(demo, *VIEWS[name])
        free = [line for line in out.splitlines() if not line.startswith((str(demo), "    0", "next:", "cu_seqlens"))]
        assert max(map(len, free)) <= 100


def harmless(out: str) -> bool:
    hidden = {c for c in out if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return hidden <= {"\n", "\u200d"}


@pytest.mark.parametrize(
    "view", [[], ["--pack", "0"], ["--step", "0:0"], ["--find", "a"], ["--row", str(len(HOSTILE))]]
)
def test_hostile_text_cannot_steer_the_terminal(hostile: Path, command: Command, view: list[str]) -> None:
    code, out, _ = command(hostile, *view)
    assert code == 0
    assert harmless(out)


@pytest.mark.parametrize("i", range(len(HOSTILE)))
def test_hostile_samples_are_shown_as_they_are_written(hostile: Path, command: Command, i: int) -> None:
    code, out, _ = command(hostile, "--sample", i, "--tokens")
    assert code == 0
    assert harmless(out)
    composed = unicodedata.normalize("NFC", HOSTILE[i].strip())  # as the tokenizer does
    assert "".join(visible(composed).split()) in "".join(out.split())


def test_targets_are_between_brackets(demo: Path, command: Command) -> None:
    _, out, _ = command(demo, "--sample", "0")
    body = out.split("newline\n", 1)[1]
    inside = body[body.index("⟦") + 1 : body.index("⟧")]
    assert inside.startswith("<s_")
    assert inside.rstrip().endswith("<|im_end|>↵")
    assert body.count("⟦") == body.count("⟧") == 1


def test_image_tokens_are_folded_with_their_number(demo: Path, command: Command) -> None:
    dataset = open_dataset(demo)
    _, out, _ = command(demo, "--sample", "0")
    assert f"<|image_pad|> × {int(dataset.index.num_patches[0]) // 4:,}" in out
    assert out.count("<|image_pad|>") == 1
