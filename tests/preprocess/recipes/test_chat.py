"""Chat rows: every accepted form of message and image, and every reason to reject."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.preprocess.recipes.chat_recipe import convert, seen, user
from vlmdata.preprocess.sources.open import open_source

NAMES = ("a", "b", "c")


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the files a.png, b.png, c.png, whose bytes are their names."""
    for name in NAMES:
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    return tmp_path


def human(value: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": value}, {"from": "gpt", "value": "yes"}]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


YES = ("assistant", ["yes"])


class TestText:
    @pytest.mark.parametrize(
        "content", ["hello", [text("hello")], ["hello"], [{"text": "hello"}], [{"type": "text", "text": "hello"}]]
    )
    def test_forms(self, content):
        assert seen(convert({"messages": user(content)})) == [("user", ["hello"]), YES]

    def test_pieces_keep_their_order_and_space(self):
        content = [text(" one"), "two ", text("\n")]
        assert seen(convert({"messages": user(content)}))[0] == ("user", [" one", "two ", "\n"])

    def test_rows_without_images_need_no_image_root(self):
        assert list(convert({"messages": user("no image"), "images": None}).images) == []

    def test_all_roles_and_several_turns(self):
        roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
        messages = [{"role": role, "content": role} for role in roles]
        assert seen(convert({"messages": messages})) == [(role, [role]) for role in roles]

    def test_developer_is_system(self):
        assert seen(convert({"messages": [{"role": "developer", "content": "d"}]})) == [("system", ["d"])]

    @pytest.mark.parametrize("content", [None, [], ""])
    def test_no_content_is_an_empty_turn(self, content):
        assert "".join(seen(convert({"messages": user(content)}))[0][1]) == ""

    def test_reasoning_stands_apart_from_the_answer(self):
        messages = [{"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}]
        message = convert({"messages": messages}).messages[0]
        assert (message.text, message.reasoning) == ("4", "2 + 2")

    def test_messages_may_be_json_text(self):
        assert seen(convert({"messages": json.dumps(user("hello"))})) == [("user", ["hello"]), YES]

    def test_other_columns_do_not_matter(self):
        assert seen(convert({"id": 7, "messages": user("hello"), "score": 0.5})) == [("user", ["hello"]), YES]


class TestShareGpt:
    def test_names_of_roles(self):
        names = ["system", "human", "gpt", "user", "assistant", "observation", "tool", "function_response"]
        roles = ["system", "user", "assistant", "user", "assistant", "tool", "tool", "tool"]
        turns = [{"from": name, "value": "v"} for name in names]
        assert [message.role for message in convert({"conversations": turns}).messages] == roles

    def test_function_call_is_a_tool_call_of_the_assistant(self):
        call = {"name": "sum", "arguments": {"a": 1}}
        turns = [{"from": "function_call", "value": json.dumps(call)}, {"from": "observation", "value": "1"}]
        assistant, tool = convert({"conversations": turns}).messages
        assert (assistant.role, assistant.text, assistant.tool_calls) == ("assistant", "", (call,))
        assert (tool.role, tool.text) == ("tool", "1")

    def test_conversations_may_hold_openai_turns(self):
        assert seen(convert({"conversations": user("hello")})) == [("user", ["hello"]), YES]

    def test_both_kinds_of_turns_side_by_side_with_the_nulls_that_arrow_adds(self):
        turns = [
            {"from": "human", "value": "hello", "role": None, "content": None},
            {"from": None, "value": None, "role": "assistant", "content": "yes"},
        ]
        assert seen(convert({"conversations": turns})) == [("user", ["hello"]), YES]

    def test_messages_may_hold_sharegpt_turns(self):
        assert seen(convert({"messages": human("hello")})) == [("user", ["hello"]), YES]


class TestImagesInItems:
    @pytest.mark.parametrize(
        "item",
        [
            {"type": "image", "image": "a.png"},
            {"image": "a.png"},
            {"type": "image", "image": "./b/../a.png"},
            {"type": "image", "image": uri(b"a")},
            {"type": "image", "image": "data:image;base64," + base64.b64encode(b"a").decode()},
            {"type": "image", "image": {"bytes": b"a", "path": None}},
            {"type": "image", "image": {"bytes": b"a"}},
            {"type": "image", "image": {"bytes": None, "path": "a.png"}},
            {"type": "image", "image": b"a"},
            {"type": "image_url", "image_url": {"url": uri(b"a")}},
            {"type": "image_url", "image_url": {"url": uri(b"a"), "detail": "high"}},
            {"type": "image_url", "image_url": uri(b"a")},
            {"image_url": {"url": "a.png"}},
            {"type": "image", "url": "a.png"},
            {"type": "image", "path": "a.png"},
            {"type": "image", "base64": base64.b64encode(b"a").decode()},
            {"type": "image", "base64": uri(b"a")},
            {"type": "image", "image": "a.png", "min_pixels": 3136, "text": None, "video": None},
        ],
    )
    def test_forms(self, root, item):
        (root / "b").mkdir()
        assert seen(convert({"messages": user([item, text("?")])}, root)) == [("user", ["[a]", "?"]), YES]

    def test_a_file_url_and_an_absolute_path_lead_to_the_same_file(self, root):
        (root / "d e#f?.png").write_bytes(b"d")
        forms = [str(root / "d e#f?.png"), f"file://{root}/d e#f?.png", f"file://{root}/d%20e#f?.png"]
        content = [{"type": "image", "image": form} for form in forms]
        assert seen(convert({"messages": user(content)}, root))[0] == ("user", ["[d]"] * 3)

    def test_anywhere_in_any_user_turn_and_in_tool_turns(self, root):
        a, b, c = ({"type": "image", "image": f"{name}.png"} for name in NAMES)
        messages = [*user([text("x"), a, b, text("y")]), {"role": "tool", "content": [c]}, *user([c, text("z"), a])]
        assert seen(convert({"messages": messages}, root)) == [
            ("user", ["x", "[a]", "[b]", "y"]),
            YES,
            ("tool", ["[c]"]),
            ("user", ["[c]", "z", "[a]"]),
            YES,
        ]

    def test_an_images_column_that_repeats_them_is_no_mismatch(self, root):
        content = [{"type": "image", "image": "a.png"}, {"type": "image", "image": "b.png"}]
        for messages in (user(content), json.dumps(user(content))):
            conversation = convert({"messages": messages, "images": ["a.png", "b.png"]}, root)
            assert seen(conversation)[0] == ("user", ["[a]", "[b]"])

    def test_each_image_knows_its_field_and_file(self, root):
        content = [text("x"), {"type": "image", "image": "a.png"}]
        (image,) = convert({"messages": user(content)}, root).images
        assert image.field == "messages[0].content[1] (a.png)"


ITEM = st.one_of(
    st.text("ab", max_size=2).map(text),
    st.sampled_from(NAMES).map(lambda name: {"type": "image", "image": uri(name.encode())}),
    st.sampled_from(NAMES).map(lambda name: {"image": uri(name.encode())}),
    st.sampled_from(NAMES).map(lambda name: {"type": "image_url", "image_url": uri(name.encode())}),
)


@settings(max_examples=60)
@given(contents=st.lists(st.text("ab", max_size=2) | st.lists(ITEM, max_size=4), min_size=1, max_size=4))
def test_order_and_number_of_images_agree_with_qwen_vl_utils(contents):
    from qwen_vl_utils.vision_process import extract_vision_info  # imports torchvision: 2 s in each of pytest's workers

    messages = [turn for content in contents for turn in user(content)]
    expected = [info.get("image") or info["image_url"] for info in extract_vision_info(messages)]
    assert [uri(image.data) for image in convert({"messages": messages}).images] == expected


class TestImagesFromAColumn:
    @pytest.mark.parametrize(
        "placeholder", [{"type": "image"}, {"type": "image", "image": None}, {"type": "image_url"}]
    )
    def test_placeholder_items_take_them_in_order(self, root, placeholder):
        messages = [*user([placeholder, text("and"), placeholder]), *user([placeholder])]
        conversation = convert({"messages": messages, "images": ["b.png", "a.png", "c.png"]}, root)
        assert seen(conversation) == [("user", ["[b]", "and", "[a]"]), YES, ("user", ["[c]"]), YES]

    def test_marks_in_messages_take_them_in_order(self, root):
        messages = [*user("<image>one<image>"), *user([text("two <image>")])]
        conversation = convert({"messages": messages, "images": ["b.png", "a.png", "c.png"]}, root)
        assert seen(conversation) == [("user", ["[b]", "one", "[a]"]), YES, ("user", ["two ", "[c]"]), YES]

    def test_marks_in_sharegpt_take_them_in_order(self, root):
        turns = [*human("<image>\nWhat?"), *human("<image><image>")]
        conversation = convert({"conversations": turns, "images": ["c.png", "b.png", "a.png"]}, root)
        assert seen(conversation) == [("user", ["[c]", "\nWhat?"]), YES, ("user", ["[b]", "[a]"]), YES]

    @pytest.mark.parametrize(
        "column",
        [{"image": "a.png"}, {"image": ["a.png"]}, {"image": {"bytes": b"a", "path": None}}, {"images": [b"a"]}],
    )
    def test_forms_of_the_column(self, root, column):
        assert seen(convert({"conversations": human("<image>?"), **column}, root))[0] == ("user", ["[a]", "?"])

    def test_conversations_with_image_items_may_repeat_them_in_a_column(self, root):
        turns = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, text("?")]}, *human("x")[1:]]
        conversation = convert({"conversations": turns, "images": ["a.png"]}, root)
        assert seen(conversation)[0] == ("user", ["[a]", "?"])

    def test_a_null_images_column_gives_way_to_image(self, root):
        values = {"conversations": human("<image>"), "images": None, "image": "a.png"}
        assert seen(convert(values, root))[0] == ("user", ["[a]"])

    def test_each_image_knows_its_field_and_file(self, root):
        images = convert(
            {"conversations": human("<image><image>"), "images": ["a.png", {"path": "b.png"}]}, root
        ).images
        assert [image.field for image in images] == ["images[0] (a.png)", "images[1] (b.png)"]
        stored = convert({"conversations": human("<image>"), "images": [{"bytes": b"a", "path": "a.png"}]}, root).images
        assert [image.field for image in stored] == ["images[0]"], "the row holds the bytes, and no file is read"

    def test_a_single_image_beside_an_empty_images_column(self, root):
        values = {"messages": user("<image>\nWhat?"), "images": [], "image": "a.png"}
        assert seen(convert(values, root))[0] == ("user", ["[a]", "\nWhat?"])

    def test_both_columns_may_hold_the_same(self, root):
        values = {"messages": user("<image>?"), "images": ["a.png"], "image": "a.png"}
        assert seen(convert(values, root))[0] == ("user", ["[a]", "?"])

    @pytest.mark.parametrize("empty", ["", [], {"bytes": None, "path": None}, {"bytes": b"", "path": ""}])
    def test_an_empty_image_is_none(self, empty):
        assert seen(convert({"conversations": human("hello"), "image": empty}))[0] == ("user", ["hello"])

    def test_marks_in_tool_turns_take_them_too(self, root):
        messages = [*user("<image>?"), {"role": "tool", "content": "<image> found"}, *user("z")]
        conversation = convert({"messages": messages, "images": ["b.png", "a.png"]}, root)
        assert seen(conversation)[2] == ("tool", ["[a]", " found"])

    def test_placeholders_may_number_their_images(self, root):
        content = [{"type": "image", "index": 0, "text": None}, {"type": "text", "index": None, "text": "x"}]
        content += [{"type": "image", "index": 1}]
        conversation = convert({"messages": user(content), "images": ["b.png", "a.png"]}, root)
        assert seen(conversation)[0] == ("user", ["[b]", "x", "[a]"])

    def test_the_column_may_be_json_text(self, root):
        values = {"messages": json.dumps(user("<image>?")), "images": '["a.png"]'}
        assert seen(convert(values, root))[0] == ("user", ["[a]", "?"])


class TestTools:
    @pytest.mark.parametrize(
        "call",
        [
            {"type": "function", "function": {"name": "crop", "arguments": '{"box": [1, 2], "why": null}'}},
            {"function": {"name": "crop", "arguments": '{"box": [1, 2], "why": null}'}, "id": "c1"},
            {"name": "crop", "arguments": '{"box": [1, 2], "why": null}'},
            {"function": None, "name": "crop", "arguments": '{"box": [1, 2], "why": null}'},
        ],
    )
    def test_arguments_as_json_text_are_what_the_text_says(self, call):
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        known = {"id": call["id"]} if "id" in call else {}
        expected = {**known, "name": "crop", "arguments": {"box": [1, 2], "why": None}}
        assert convert({"messages": messages}).messages[0].tool_calls == (expected,)

    def test_arguments_as_an_object_keep_their_nulls(self):
        call = {"name": "crop", "arguments": {"box": [None], "why": None, "at": {"x": 1, "y": None}}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]
        assert convert({"messages": messages}).messages[0].tool_calls == (call,)

    @pytest.mark.parametrize("arguments", [{}, None, "", "{}"])
    def test_a_call_without_arguments(self, arguments):
        messages = [{"role": "assistant", "tool_calls": [{"name": "now", "arguments": arguments}]}]
        assert convert({"messages": messages}).messages[0].tool_calls == ({"name": "now", "arguments": {}},)

    def test_several_calls_keep_their_order(self):
        calls = [{"name": name, "arguments": "{}"} for name in NAMES]
        messages = [{"role": "assistant", "content": "Wait.", "tool_calls": calls}]
        message = convert({"messages": messages}).messages[0]
        assert (message.text, [call["name"] for call in message.tool_calls]) == ("Wait.", list(NAMES))

    @pytest.mark.parametrize("as_text", [True, False])
    def test_tools_offered(self, as_text):
        tools = [{"type": "function", "function": {"name": "crop", "parameters": {"type": "object"}}}]
        values = {"messages": user("x"), "tools": json.dumps(tools) if as_text else tools}
        assert convert(values).tools == tuple(tools)

    def test_nulls_of_json_are_kept_and_those_of_structs_dropped_and_counted(self, tmp_path):
        """A struct has the keys of all rows. A JSON column, and JSON text, have their own."""
        calls = [{"name": "crop", "arguments": {"box": [1], "why": None}}]
        messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
        tools = [{"name": "crop", "parameters": {"x": {"default": None}}}]
        rows = [{"messages": messages, "tools": tools}, {"messages": user("x"), "tools": [{"name": "g", "n": 1}]}]
        write_jsonl(tmp_path / "rows.jsonl", rows)
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, tmp_path / "rows.parquet")
        Dataset(table).save_to_disk(tmp_path / "saved")
        as_text = [{"messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])} for row in rows]
        pq.write_table(pa.Table.from_pylist(as_text), tmp_path / "text.parquet")
        encoded = Dataset.from_list(rows, features=Features({"messages": Json(), "tools": Json()}))
        encoded.to_parquet(tmp_path / "json.parquet")
        for name in ("rows.jsonl", "text.parquet", "json.parquet"):
            conversation = convert(dict(open_source(str(tmp_path / name)).row(0).values))
            assert conversation.tools == tuple(tools), name
            assert conversation.messages[0].tool_calls == tuple(calls), name
            assert conversation.unused == (), name
        for name in ("rows.parquet", "saved"):
            conversation = convert(dict(open_source(str(tmp_path / name)).row(0).values))
            assert conversation.tools == ({"name": "crop", "parameters": {"x": {}}},), name
            assert conversation.messages[0].tool_calls == ({"name": "crop", "arguments": {"box": [1]}},), name
            assert conversation.unused == ("messages[].tool_calls[].arguments.* (null)", "tools[].* (null)")

    @pytest.mark.parametrize("tools", [None, [], "", "[]"])
    def test_no_tools(self, tools):
        assert convert({"messages": user("x"), "tools": tools}).tools == ()


def test_rows_of_unlike_shapes_survive_arrow_which_fills_them_with_nulls(root):
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, text("look")]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri(b"b")}}]}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [text("thinking")],
                    "reasoning_content": "hm",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
                },
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g"}}]},
            ],
            "tools": [{"name": "f", "description": "d"}, {"name": "g"}],
        },
        {"conversations": [{"from": "human", "value": "<image>hi"}], "image": "c.png"},
    ]
    table = pa.Table.from_pylist([{name: row.get(name) for name in rows[2] | rows[3]} for row in rows])
    pq.write_table(table, root / "rows.parquet")
    source = open_source(str(root / "rows.parquet"))
    filled = [dict(source.row(number).values) for number in range(len(rows))]
    assert filled != rows
    conversations = [convert(row, root) for row in filled]
    assert [seen(conversation) for conversation in conversations] == [
        [("user", ["[a]", "look"])],
        [("user", ["[b]"])],
        [("assistant", ["thinking"]), ("assistant", [])],
        [("user", ["[c]", "hi"])],
    ]
    calls = [message.tool_calls for message in conversations[2].messages]
    assert calls == [({"name": "f", "arguments": {"x": 1}},), ({"name": "g", "arguments": {}},)]
    assert [message.reasoning for message in conversations[2].messages] == ["hm", None]
    assert conversations[2].tools == ({"name": "f", "description": "d"}, {"name": "g"})
