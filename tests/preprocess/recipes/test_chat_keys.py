"""Every key of a chat row is used, refused with its reason, or reported as not used."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.preprocess.recipes.chat_recipe import answer, check_rejected, convert, seen, user
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

CONTENT, MESSAGES, PREFERENCE = Reason.UNSUPPORTED_CONTENT, Reason.MALFORMED_MESSAGES, Reason.PREFERENCE_DATA
PLAIN: dict[str, Any] = {"messages": user("hello")}
EMPTY = [None, "", [], {}, [None], {"ref": [], "bbox": None}]


@pytest.mark.parametrize(
    ("columns", "reason", "message"),
    [
        ({"audios": ["a.mp3"]}, CONTENT, r"audios holds \['a.mp3'\]; the recipe reads text, images and videos only"),
        ({"audios": ["a.wav"]}, CONTENT, "audios holds"),
        ({"audio": {"array": [0.0], "sampling_rate": 16000}}, CONTENT, "audio holds"),
        ({"rejected_response": "no"}, PREFERENCE, "rejected_response holds no: preference data.*drop this column"),
        ({"chosen": "yes", "rejected": "no"}, PREFERENCE, "chosen holds yes: preference data"),
        ({"rejected_messages": user("x")}, PREFERENCE, "rejected_messages holds"),
        ({"non_preferred_output": user("x")}, PREFERENCE, "non_preferred_output holds"),
        ({"label": False}, PREFERENCE, "label is False: .*KTO.*Keep the rows with good answers"),
        ({"label": True}, PREFERENCE, "label is True"),
        ({"label": "true"}, PREFERENCE, "label is true"),
        ({"kto_tag": True}, PREFERENCE, "kto_tag is True"),
        ({"chat_template_kwargs": ["enable_thinking"]}, MESSAGES, "chat_template_kwargs is not an object"),
        ({"chat_template_kwargs": "{"}, MESSAGES, "chat_template_kwargs is not JSON"),
        ({"chat_template_kwargs": {"x": b"1"}}, MESSAGES, r"chat_template_kwargs\.x is b'1', which JSON does not hold"),
        ({"history": [["a", "b"]]}, MESSAGES, "history and messages are both given; move its turns into messages"),
        ({"conversations": user("x")}, MESSAGES, "turns are in both messages and conversations"),
        (
            {"images": [b"a"], "image": b"b"},
            Reason.IMAGE_COUNT_MISMATCH,
            "the columns images and image have different images",
        ),
    ],
)
def test_columns_that_cannot_be_obeyed(columns, reason, message):
    check_rejected({**PLAIN, **columns}, reason, message)


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(
    "column",
    ["videos", "audio", "rejected", "label", "history", "objects", "chat_template_kwargs", "conversations", "x"],
)
def test_columns_without_content_say_nothing(column, empty):
    conversation = convert({**PLAIN, column: empty})
    assert (seen(conversation), conversation.unused, conversation.unknown) == (seen(convert(PLAIN)), (), ())


def test_preference_rows_without_turns_are_called_what_they_are():
    check_rejected({"prompt": "?", "chosen": "yes", "rejected": "no"}, PREFERENCE, "chosen holds yes")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": True}]},
            "a turn is learned as a whole or not at all",
        ),
        ({"images": ["a.png"]}, r"messages\[1\]\.images holds .*; images of a turn belong in its content"),
        ({"audio": {"id": "a"}}, r"messages\[1\]\.audio holds"),
        ({"refusal": "No."}, r"messages\[1\]\.refusal holds No\.; write the refusal as the turn's content"),
    ],
)
def test_keys_of_turns_that_cannot_be_obeyed(turn, message):
    check_rejected(answer(**turn), CONTENT, message)


def test_of_several_reasons_the_same_is_given_in_every_process():
    media = ("videos", "video", "images", "image", "audios", "audio")
    for turn in (dict.fromkeys(media, "x"), dict.fromkeys(reversed(media), "x")):
        check_rejected(answer(**turn), CONTENT, r"messages\[1\]\.audio holds")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"])
def test_what_only_the_assistant_has_is_refused_in_other_turns(key):
    value = [{"name": "f"}] if key == "tool_calls" else {"name": "f"} if key == "function_call" else "hm"
    check_rejected({"messages": user("?", **{key: value})}, CONTENT, rf"messages\[0\]\.{key} in a user turn")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "text", "text": "x", "image": "a.png"}, "is a text item, but holds image too: a.png"),
        ({"type": "text", "text": "x", "video": "a.mp4"}, "is a text item, but holds video too: a.mp4"),
        ({"text": "x", "image_url": {"url": "a.png"}}, "is a text item, but holds image_url too"),
        ({"type": "image", "image": b"a", "text": "x"}, "is an image item, but holds text too: x"),
        ({"type": "image", "image": b"a", "video": "a.mp4"}, "is an image item, but holds video too"),
        ({"type": "image", "image": b"a", "path": "b.png"}, "names several images: image, path"),
    ],
)
def test_items_that_say_two_things(item, message):
    check_rejected({"messages": user([item])}, CONTENT, rf"messages\[0\]\.content\[0\] {message}")


@pytest.mark.parametrize("key", ["source", "file", "data", "bytes", "image_path"])
def test_an_image_item_whose_file_is_named_otherwise_takes_no_image_of_the_row(key):
    item = {"type": "image", key: "a.png"}
    message = rf"messages\[0\].content\[0\] holds {key}: a.png; an image item names its file in one of image, image_url"
    check_rejected({"messages": user([item]), "images": [b"another"]}, CONTENT, message)


def test_json_text_in_which_a_key_stands_twice_is_refused():
    turns = '[{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes", "content": "no"}]'
    check_rejected({"messages": turns}, MESSAGES, "messages is not JSON: the key 'content' occurs twice in one object")


def test_a_turn_that_says_things_twice():
    for turn in ({"from": "human", "role": "user", "value": "x"}, {"role": "user", "content": "x", "value": "y"}):
        check_rejected({"messages": [turn]}, MESSAGES, r"messages\[0\] has both .* and .*; keep only one")


BOXES = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<ref-object> at <bbox>"}]}


class TestBoxes:
    def test_marks_that_another_column_would_fill_are_refused(self):
        message = "the mark <bbox> for the content of bbox; the recipe reads boxes from objects"
        check_rejected({**BOXES, "bbox": [[1, 2, 3, 4]]}, CONTENT, message)

    def test_without_the_column_they_are_text(self):
        assert seen(convert(BOXES))[1] == ("assistant", ["<ref-object> at <bbox>"])

    def test_without_marks_the_column_is_reported(self):
        conversation = convert({**PLAIN, "objects": {"bbox": [[1, 2, 3, 4]]}})
        assert (conversation.unused, conversation.unknown) == ((), ("objects",))


class TestReported:
    def test_harmless_keys_and_unknown_keys_by_place(self):
        item = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low", "zoom": 2}, "caption": "c"}
        item["image_url"]["url"] = "data:image/png;base64,YQ=="
        call = {"id": "c", "type": "function", "index": 0, "note": "n", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": [item, {"type": "text", "text": "x", "cache_control": {"a": 1}, "lang": "en"}]},
            {"role": "assistant", "content": "y", "name": "bot", "mood": "fine", "tool_calls": [call]},
            {"role": "tool", "content": "z", "tool_call_id": "c"},
        ]
        row = {"id": 1, "question_id": 2, "source": "web", "score": 0.0, "flag": False, "messages": messages}
        conversation = convert(row)
        assert conversation.unused == (
            "id",
            "messages[].content[].cache_control",
            "messages[].content[].image_url.detail",
            "messages[].name",
            "messages[].tool_calls[].index",
            "question_id",
            "source",
        )
        assert conversation.unknown == (
            "flag",
            "messages[].content[].caption",
            "messages[].content[].image_url.zoom",
            "messages[].content[].lang",
            "messages[].mood",
            "messages[].tool_calls[].note",
            "score",
        )

    def test_other_text_beside_the_turns_is_unknown(self):
        conversation = convert({**PLAIN, "prompt": "hello", "text": "user: hello"})
        assert conversation.unknown == ("prompt", "text")

    def test_keys_of_images_in_a_column(self):
        image = {"bytes": b"a", "path": None, "caption": "c"}
        conversation = convert({"messages": user("<image>?"), "images": [image]})
        assert conversation.unknown == ("images[].caption",)

    def test_a_label_that_is_a_class_is_unknown(self):
        assert convert({**PLAIN, "label": 3}).unknown == ("label",)

    @settings(max_examples=50)
    @given(
        extra=st.dictionaries(st.text("xyz", min_size=1, max_size=3), st.integers() | st.text("a", min_size=1)),
        level=st.sampled_from(["row", "turn", "item"]),
    )
    def test_no_key_is_lost_at_any_level_and_none_changes_the_conversation(self, extra, level):
        item = {"type": "text", "text": "hello", **(extra if level == "item" else {})}
        turn = {"role": "user", "content": [item], **(extra if level == "turn" else {})}
        row = {"messages": [turn, {"role": "assistant", "content": "yes"}], **(extra if level == "row" else {})}
        prefix = {"row": "", "turn": "messages[].", "item": "messages[].content[]."}[level]
        conversation = convert(row)
        assert conversation.unknown == tuple(sorted(prefix + key for key in extra))
        assert conversation.messages == convert(PLAIN).messages

    def test_nulls_that_arrow_adds_are_no_keys(self):
        rows = [PLAIN, {"messages": [{"role": "assistant", "content": "x", "mood": "fine"}], "videos": ["a.mp4"]}]
        row = pa.Table.from_pylist([{"videos": None, **row} for row in rows]).to_pylist()[0]
        assert convert(row).unknown == ()


class TestSystemPrompts:
    @pytest.mark.parametrize("column", ["system", "system_prompt"])
    def test_a_column_is_the_first_turn(self, column):
        assert seen(convert({**PLAIN, column: "Be brief."})) == [("system", ["Be brief."]), *seen(convert(PLAIN))]

    def test_a_system_turn_may_repeat_it(self):
        row = {"messages": [{"role": "system", "content": "Be brief."}, *user("x")], "system": "Be brief.\n"}
        assert seen(convert(row)) == seen(convert({"messages": row["messages"]}))
        assert seen(convert({**PLAIN, "system": "Be brief.", "system_prompt": "Be brief."}))[0][0] == "system"

    def test_an_empty_system_turn_gives_way(self):
        row = {"messages": [{"role": "system", "content": [{"type": "text", "text": ""}]}, *user("x")], "system": "S"}
        assert seen(convert(row)) == [("system", ["S"]), *seen(convert({"messages": user("x")}))]

    def test_different_ones_are_refused(self):
        pattern = "hold different system prompts: 'S' and 'T'. Keep one"
        check_rejected({**PLAIN, "system": "S", "system_prompt": "T"}, MESSAGES, f"system and system_prompt {pattern}")
        row = {"messages": [{"role": "system", "content": ["T"]}, *user("x")], "system": "S"}
        check_rejected(row, MESSAGES, rf"system and messages\[0\] {pattern}")

    def test_it_is_text(self):
        check_rejected({**PLAIN, "system": 7}, MESSAGES, "system is not text: 7")
        assert seen(convert({**PLAIN, "system": " "})) == seen(convert(PLAIN))


class TestCalls:
    @pytest.mark.parametrize(
        "turn",
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
            {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "function_call", "value": '[{"name": "f", "arguments": {"x": 1}}]'},
        ],
    )
    def test_other_forms_of_a_call(self, turn):
        message = convert({"messages": [*user("?"), turn]}).messages[-1]
        assert (message.role, message.text) == ("assistant", "")
        assert message.tool_calls == ({"name": "f", "arguments": {"x": 1}},)

    @pytest.mark.parametrize("role", ["function", "tool_response"])
    def test_other_names_of_a_result(self, role):
        turn = {"role": role, "content": "1", "name": "f"}
        conversation = convert({"messages": [*user("?"), turn]})
        assert (conversation.messages[-1].role, conversation.messages[-1].tool_name) == ("tool", "f")
        assert conversation.unused == ()

    def test_calls_in_turns_of_their_own_are_refused(self):
        call = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}
        check_rejected(
            {"messages": [*user("?"), call, call]}, MESSAGES, r"messages\[2\] and messages\[3\] are calls in"
        )

    def test_two_kinds_of_calls_are_refused(self):
        row = answer(tool_calls=[{"name": "f"}], function_call={"name": "g"})
        check_rejected(row, MESSAGES, r"messages\[1\] has both tool_calls and function_call")

    def test_a_turn_that_is_a_call_and_has_calls_is_refused(self):
        call = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}', "tool_calls": [{"name": "g"}]}
        check_rejected({"messages": [*user("?"), call]}, MESSAGES, "is a tool_call turn and has tool_calls; keep one")

    def test_functions_are_tools(self):
        function = {"name": "f", "parameters": {"type": "object"}}
        expected = ({"type": "function", "function": function},)
        assert convert({**PLAIN, "functions": [function]}).tools == expected
        assert convert({**PLAIN, "functions": json.dumps([function])}).tools == expected


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_names_of_reasoning(key):
    assert convert(answer(**{key: "hm"})).messages[1].reasoning == "hm"


def test_two_reasonings_are_refused():
    check_rejected(answer(reasoning="a", thinking="b"), MESSAGES, "reasoning and thinking differ; keep one")
    assert convert(answer(reasoning="a", thinking="a")).messages[1].reasoning == "a"


def test_cord_rows_report_theirs_too():
    siblings = {key: {"a": 1} for key in ("meta", "valid_line", "roi", "repeating_symbol", "dontcare")}
    truth = json.dumps({"gt_parse": {"total": "1"}, **siblings, "extra": [1]})
    conversation = load_recipe("cord_v2")(Row(0, {"image": b"a", "ground_truth": truth, "id": 1, "note": "x"}))
    assert conversation.unused == (*(f"ground_truth.{key}" for key in sorted(siblings)), "id")
    assert conversation.unknown == ("ground_truth.extra", "note")
