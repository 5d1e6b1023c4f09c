"""Chat rows that give no sample: each with its reason, and a message that names field and value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

USER = {"role": "user", "content": "?"}
MARKS, MESSAGES, CONTENT = Reason.IMAGE_COUNT_MISMATCH, Reason.MALFORMED_MESSAGES, Reason.UNSUPPORTED_CONTENT


def rejection(values: dict[str, Any]) -> RowRejected:
    with pytest.raises(RowRejected) as rejected:
        load_recipe("chat")(Row(0, values))
    return rejected.value


def check(values: dict[str, Any], reason: Reason, message: str) -> None:
    found = rejection(values)
    assert (found.reason, re.search(message, found.message) is not None) == (reason, True), found.message


def one(**turn: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", **turn}]}


def assistant(**turn: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "x", **turn}]}


def human(value: Any, **columns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": value}], **columns}


@pytest.mark.parametrize(
    ("values", "reason", "message"),
    [
        (
            {},
            Reason.MISSING_COLUMN,
            "neither messages nor conversations, nor texts, nor a pair .*; columns with values: none",
        ),
        (
            {"text": "x", "messages": None},
            Reason.MISSING_COLUMN,
            "neither messages nor conversations, nor texts, nor a pair .*; columns with values: text",
        ),
        ({"messages": []}, MESSAGES, r"messages is not a list of turns: \[\]"),
        ({"messages": {"role": "user"}}, MESSAGES, "messages is not a list of turns: {'role'"),
        ({"messages": 5}, MESSAGES, "messages is not a list of turns: 5"),
        ({"messages": "hello"}, MESSAGES, "messages is not JSON: .*: hello"),
        ({"messages": '"hello"'}, MESSAGES, "messages is not a list of turns: hello"),
        ({"messages": "[" * 200_000}, MESSAGES, r"messages is not JSON: .*… \(200000 characters\)"),
        ({"conversations": "x"}, MESSAGES, "conversations is not JSON"),
        ({"messages": [USER, "hello"]}, MESSAGES, r"messages\[1\] is not an object: hello"),
        ({"messages": [None]}, MESSAGES, r"messages\[0\] is not an object: None"),
    ],
)
def test_rows_without_turns(values, reason, message):
    check(values, reason, message)


@pytest.mark.parametrize("role", ["bot", "User", "", 7, ["user"], {"name": "user"}])
def test_unknown_roles(role):
    check({"messages": [USER, {"role": role, "content": "x"}]}, MESSAGES, r"messages\[1\]\.role is .*; known: assist")


@pytest.mark.parametrize("missing", [{"content": "x"}, {"role": None, "content": "x"}])
def test_a_turn_without_a_role(missing):
    check({"messages": [missing]}, MESSAGES, r"messages\[0\]\.role is None")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"from": "robot", "value": "x"}, r"conversations\[0\]\.from is robot; known: human, user, gpt"),
        ({"from": ["human"], "value": "x"}, r"conversations\[0\]\.from is \['human'\]"),
        ({"from": "human", "value": None}, r"conversations\[0\]\.value is not text: None"),
        ({"from": "human", "value": ["x"]}, r"conversations\[0\]\.value is not text: \['x'\]"),
        ({"from": "human"}, r"conversations\[0\]\.value is not text: None"),
        ({"from": "function_call", "value": "f(x)"}, r"conversations\[0\]\.value is not JSON: .*: f\(x\)"),
        ({"from": "function_call", "value": "[1]"}, r"conversations\[0\]\.tool_calls\[0\] names no function: 1"),
    ],
)
def test_sharegpt_turns(turn, message):
    check({"conversations": [turn]}, MESSAGES, message)


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (7, MESSAGES, r"messages\[1\]\.content is neither text nor a list: 7"),
        ({"type": "text"}, MESSAGES, r"messages\[1\]\.content is neither text nor a list: {'type'"),
        ([7], MESSAGES, r"messages\[1\]\.content\[0\] is not an object: 7"),
        (["x", None], MESSAGES, r"messages\[1\]\.content\[1\] is not an object: None"),
        ([{"type": "text", "text": 7}], MESSAGES, r"messages\[1\]\.content\[0\]\.text is not text: 7"),
        ([{"type": "text", "text": None}], MESSAGES, r"messages\[1\]\.content\[0\]\.text is not text: None"),
        ([{"type": "text"}], MESSAGES, r"messages\[1\]\.content\[0\]\.text is not text: None"),
        (
            [{"type": "audio", "audio": "a.wav"}],
            CONTENT,
            r"content\[0\]: content of type 'audio'; the recipe reads",
        ),
        ([{"type": ["text"], "text": "x"}], CONTENT, r"content of type \['text'\]"),
        ([{}], CONTENT, "content of type None"),
        ([{"type": "image", "image": ""}], Reason.MISSING_IMAGE, r"messages\[1\]\.content\[0\]: not an image"),
        ([{"type": "image", "image": 7}], Reason.MISSING_IMAGE, r"messages\[1\]\.content\[0\]: not an image: 7"),
        ([{"image": {"bytes": None, "path": None}}], Reason.MISSING_IMAGE, "not an image: None"),
    ],
)
def test_content(content, reason, message):
    check(one(content=content), reason, message)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_in_turns_that_cannot_hold_them(role):
    values = {"messages": [USER, {"role": role, "content": [{"type": "image", "image": b"x"}]}]}
    check(values, CONTENT, rf"messages\[1\]: an image in {'an' if role == 'assistant' else 'a'} {role} turn")


@pytest.mark.parametrize("reasoning", [7, ["x"]])
def test_reasoning(reasoning):
    check(assistant(reasoning_content=reasoning), MESSAGES, r"messages\[1\]\.reasoning_content is not text: ")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({"name": "f"}, r"messages\[1\]\.tool_calls is not a list: {'name': 'f'}"),
        ("f(x)", r"messages\[1\]\.tool_calls is not a list: f\(x\)"),
        (["f"], r"messages\[1\]\.tool_calls\[0\] names no function: f"),
        ([{"name": "f"}, {"arguments": "{}"}], r"messages\[1\]\.tool_calls\[1\] names no function"),
        ([{"function": {"name": None}}], r"tool_calls\[0\] names no function"),
        ([{"function": "f"}], r"tool_calls\[0\] names no function"),
        ([{"name": "f", "arguments": "x = 1"}], r"tool_calls\[0\]\.arguments is not JSON: .*: x = 1"),
        ([{"name": "f", "arguments": "[1]"}], r"tool_calls\[0\]\.arguments is not an object: \[1\]"),
        ([{"name": "f", "arguments": [1]}], r"tool_calls\[0\]\.arguments is not an object: \[1\]"),
        ([{"name": "f", "arguments": 5}], r"tool_calls\[0\]\.arguments is not an object: 5"),
    ],
)
def test_tool_calls(calls, message):
    check(assistant(tool_calls=calls), MESSAGES, message)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("crop", "tools is not JSON: .*: crop"),
        ('{"name": "crop"}', "tools is not a list of objects: {'name': 'crop'}"),
        ({"name": "crop"}, "tools is not a list of objects"),
        (["crop"], r"tools is not a list of objects: \['crop'\]"),
    ],
)
def test_tools(tools, message):
    check({"messages": [USER], "tools": tools}, MESSAGES, message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (human("<image>", images=[]), "<image> is placeholder 1, but the row has 0 images"),
        (human("<image>"), "<image> is placeholder 1, but the row has 0 images"),
        (human("<image><image>", image=b"x"), "<image> is placeholder 2, but the row has 1 image"),
        (human("<image>", images=[b"x", b"y"]), "1 image placeholder in the text for 2 images in images"),
        (human("no mark", images=[b"x"]), "0 image placeholders in the text for 1 image in images"),
        (human("no mark", image=b"x"), "0 image placeholders in the text for 1 image in image"),
        ({"messages": [USER], "images": [b"x"]}, "0 image placeholders in the text for 1 image"),
        ({**one(content="<image>"), "images": [b"x", b"y"]}, "1 image placeholder in the text for 2 images"),
        ({**one(content="<image><image>"), "images": [b"x"]}, "<image> is placeholder 2, but the row has 1 image"),
        (one(content=[{"type": "image"}]), r"messages\[1\]\.content\[0\] is placeholder 1, but the row has 0 images"),
        ({**one(content=[{"type": "image"}]), "images": [b"x", b"y"]}, "1 image placeholder .* for 2 images"),
    ],
)
def test_numbers_of_images_and_placeholders(values, message):
    check(values, MARKS, message)


def test_a_null_in_the_images_column_is_a_missing_image():
    check(human("<image>", images=[None]), Reason.MISSING_IMAGE, r"images\[0\]: not an image: None")
