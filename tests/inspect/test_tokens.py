"""What tokens spell, against the tokenizer itself, and what may reach a terminal."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.inspect.conftest import Command
from tests.verify.rewriting import rotate_ids
from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.inspect.text import one_line, visible
from vlmdata.inspect.tokens import TokenTexts, find_turns


@pytest.fixture(scope="module")
def texts(demo: Path) -> TokenTexts:
    return TokenTexts(demo, Manifest.read(demo))


@given(text=st.text())
@example("漢字 e\u0301 👩\u200d👧 \x00\x1b")
def test_texts_of_tokens_join_to_what_was_encoded(texts: TokenTexts, tokenizer: Any, text: str) -> None:
    ids = tokenizer.hf.encode(text, add_special_tokens=False)
    whole = tokenizer.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert texts.decode(ids) == whole
    assert "".join(texts.decode_each(ids)) == whole


@given(ids=st.lists(st.integers(0, 6200), max_size=40))
def test_any_ids_have_texts_that_join(texts: TokenTexts, ids: list[int]) -> None:
    each = texts.decode_each(ids)
    assert len(each) == len(ids)
    assert "".join(each) == texts.decode(ids)


def test_a_character_spread_over_tokens_belongs_to_the_first(texts: TokenTexts, tokenizer: Any) -> None:
    ids = tokenizer.hf.encode("𝕳", add_special_tokens=False)
    assert len(ids) > 1
    assert texts.decode_each(ids) == ["𝕳"] + [""] * (len(ids) - 1)
    assert "\\x" in texts.decode(ids[:1])


def test_ids_beyond_the_vocabulary_are_named(texts: TokenTexts) -> None:
    assert texts.decode([999_999]) == "<unknown id 999999>"


def test_special_tokens_are_what_the_tokenizer_says(texts: TokenTexts, tokenizer: Any) -> None:
    ids = set(range(len(tokenizer.hf)))
    assert {i for i in ids if texts.is_special(i)} == set(tokenizer.hf.all_special_ids) | {
        i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special
    }


def test_a_dataset_without_tokenizer_is_refused_with_the_path(tmp_path: Path, demo: Path) -> None:
    with pytest.raises(DatasetFormatError, match=r"tokenizer/tokenizer\.json.*same `vlmdata preprocess` command"):
        TokenTexts(tmp_path, Manifest.read(demo))


@pytest.mark.parametrize("hashed", [True, False], ids=["format 1.1", "format 1.0"])
def test_another_tokenizer_is_refused_instead_of_spelling_other_words(
    demo: Path, copy_of: Callable[[Path], Path], hashed: bool
) -> None:
    damaged = copy_of(demo)
    rotate_ids(damaged)
    manifest = Manifest.read(damaged)
    if not hashed:
        manifest = dataclasses.replace(manifest, tokenizer_files={})
    with pytest.raises(
        DatasetFormatError, match=r"tokenizer\.json: not the tokenizer that .*preprocess` command again"
    ):
        TokenTexts(damaged, manifest)


def test_the_command_says_so_in_one_line(demo: Path, copy_of: Callable[[Path], Path], command: Command) -> None:
    damaged = copy_of(demo)
    rotate_ids(damaged)
    code, out, error = command(damaged, "--sample", "0")
    assert (code, out) == (2, "")
    assert "not the tokenizer that the dataset was made with" in " ".join(error.split())


@given(text=st.text(st.characters()))
@example("\x1b[31m\x9b\x07\u202e\u2066\ufeff\u2028\ud800\U000e0001")
def test_nothing_visible_steers_a_terminal_or_reorders_text(text: str) -> None:
    shown = visible(text)
    allowed = "\n\t\u200c\u200d"
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in allowed]
    assert not set(one_line(text)) & {"\n", "\t", "\r"}


@given(text=st.text(st.characters(categories=["L", "N", "P", "S", "Zs", "M"])))
def test_ordinary_text_is_left_as_it_is(text: str) -> None:
    assert visible(text) == text


class _Llamas:
    """Texts of a format with special tokens after the role, and two newlines after these."""

    WORDS = ("<|start|>", "<|end_header|>", "<|end|>", "assistant", "us", "er", "\n", "Hi", "\n\n", "tool 2")

    def bytes_of(self, token: int) -> bytes:
        return self.WORDS[token].encode()

    def is_special(self, token: int) -> bool:
        return token < 3

    def decode(self, ids: list[int]) -> str:
        return "".join(self.WORDS[token] for token in ids)


@pytest.mark.parametrize(
    ("assistant", "turn", "role", "body"),
    [
        ((3, 1, 6, 6), [0, 4, 5, 1, 6, 6, 7, 2], "user", 6),
        ((3, 1, 6, 6), [0, 3, 1, 6, 6, 7, 2], "assistant", 5),
        ((3, 1, 8), [0, 4, 5, 1, 8, 7, 2], "user", 5),
        ((3, 1, 8), [0, 9, 1, 8, 7, 2], "tool 2", 4),
        ((3, 6), [0, 4, 5, 6, 7, 2], "user", 4),
        ((3, 6), [0, 4, 5, 8, 7, 2], "user", 4),
        ((3, 6), [0, 4, 5, 1, 2], "", 1),
    ],
)
def test_roles_end_before_a_newline_or_a_special_token(
    tokenizer: Any, assistant: tuple[int, ...], turn: list[int], role: str, body: int
) -> None:
    turns = dataclasses.replace(tokenizer.info.turns, start=0, end=2, assistant=assistant)
    info = dataclasses.replace(tokenizer.info, turns=turns)
    ids = np.array(turn)
    (found,) = find_turns(ids, np.zeros_like(ids), info, _Llamas())  # type: ignore[arg-type]
    assert (found.role, found.body) == (role, body)
