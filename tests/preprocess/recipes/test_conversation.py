"""Wrongly built conversations: the message names the field, what it is and what it must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.list_recipe import NAME
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.recipes.base import load_recipe, unexpected
from vlmdata.preprocess.row import Row

TEXT = TextPart("a")

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: TextPart(None), r"TextPart.text is None \(NoneType\); it must be a str"),  # type: ignore[arg-type]
    (lambda: TextPart(3), r"TextPart.text is 3 \(int\); it must be a str"),  # type: ignore[arg-type]
    (lambda: ImagePart("a.png"), "ImagePart.data is of type str; it must be the bytes .*MediaLoader.load"),  # type: ignore[arg-type]
    (lambda: ImagePart(b"", min_pixels=0), "ImagePart.min_pixels is 0; it must be a positive int"),
    (lambda: ImagePart(b"", max_pixels=True), "ImagePart.max_pixels is True; it must be a positive int"),
    (lambda: ImagePart(b"", resized_width=32), "resized_height and resized_width must be given together"),
    (lambda: Message("bot", (TEXT,)), "Message.role is 'bot'; known roles: assistant, system, tool, user"),  # type: ignore[arg-type]
    (lambda: Message("user", "hi"), "Message.parts is of type str; it must be a tuple of TextPart, ImagePart"),  # type: ignore[arg-type]
    (lambda: Message("user", [TEXT]), r"Message.parts is of type list; .*; write tuple\(…\) around the list"),  # type: ignore[arg-type]
    (lambda: Message("user", TEXT), r"Message.parts is of type TextPart; .*; write \(value,\) with a comma"),  # type: ignore[arg-type]
    (lambda: Message("user", (TEXT, "b")), r"Message.parts\[1\] is of type str"),  # type: ignore[arg-type]
    (lambda: Message("user", (TEXT,), reasoning=3), "Message.reasoning is of type int"),  # type: ignore[arg-type]
    (lambda: Message("assistant", (TEXT,), tool_calls=("f",)), r"Message.tool_calls\[0\] is of type str"),  # type: ignore[arg-type]
    (lambda: Message("user", (TEXT,), loss_weight=0), "loss_weight is 0 in a user turn; only assistant turns"),
    (lambda: Message("assistant", (TEXT,), loss_weight="1"), "Message.loss_weight is '1'"),  # type: ignore[arg-type]
    (lambda: Conversation(Message("user", (TEXT,))), r"Conversation.messages is of type Message; .*\(value,\)"),  # type: ignore[arg-type]
    (lambda: Conversation((TEXT,)), r"Conversation.messages\[0\] is of type TextPart; it must be a tuple of Message"),  # type: ignore[arg-type]
    (lambda: Conversation((), unused=("a", 1)), r"Conversation.unused\[1\] is of type int"),  # type: ignore[arg-type]
    (lambda: Conversation((), loss_weight=None), "Conversation.loss_weight is None"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_what_is_wrongly_built_is_named(build: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@given(weight=st.one_of(st.floats(max_value=-1e-9), st.just(math.nan), st.just(math.inf)))
def test_weights_are_finite_and_not_negative(weight: float) -> None:
    for build in (lambda: Conversation((), loss_weight=weight), lambda: Message("assistant", (), loss_weight=weight)):
        with pytest.raises(ValueError, match="it must be finite and at least 0"):
            build()


def test_the_place_of_an_error_is_in_the_recipe_not_where_a_library_raised_it() -> None:
    recipe = load_recipe(NAME)
    row = Row(0, {"form": "list", "samples": [3]})  # TextPart(3) raises within vlmdata.preprocess.conversation
    with pytest.raises(TypeError) as raised:
        recipe(row)
    assert raised.traceback[-1].path.name == "conversation.py"
    assert "(in _made, tests/list_recipe.py:" in unexpected(raised.value, recipe).message


def test_the_place_of_an_error_may_be_in_another_module_of_the_recipes_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "recipes_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "reading.py").write_text("import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    (package / "main.py").write_text(
        "from recipes_of_mine.reading import read\n\n\nclass Mine:\n"
        "    def __call__(self, row):\n        return read(row.values['a'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe("recipes_of_mine.main:Mine")
    with pytest.raises(ValueError, match="Expecting value") as raised:
        recipe(Row(0, {"a": "no JSON"}))
    assert unexpected(raised.value, recipe).message.endswith("(in read, recipes_of_mine/reading.py:5)")
    with pytest.raises(KeyError) as missing:
        recipe(Row(0, {}))
    assert unexpected(missing.value, recipe).message == "KeyError: 'a' (in __call__, recipes_of_mine/main.py:6)"


def test_the_place_of_an_error_in_a_recipes_file_is_the_same_in_any_folder(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(
            "class Mine:\n    def __call__(self, row):\n        return row.values['a']\n"
        )
        recipe = load_recipe(f"{tmp_path / folder / 'mine.py'}:Mine")
        with pytest.raises(KeyError) as raised:
            recipe(Row(0, {}))
        assert unexpected(raised.value, recipe).message == "KeyError: 'a' (in __call__, mine.py:3)"


def test_an_error_outside_the_recipe_is_placed_where_it_was_raised() -> None:
    recipe = load_recipe(NAME)
    with pytest.raises(ValueError, match="not a number") as raised:
        _raise()
    assert unexpected(raised.value, recipe).message.startswith("ValueError: not a number (in _raise, tests/preprocess/")


def _raise() -> None:
    raise ValueError("not a number")
