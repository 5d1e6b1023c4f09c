"""Rows of a question and its answer: alpaca's, ms-swift's and TRL's columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.preprocess.recipes.chat_recipe import check_rejected, convert, seen, user
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recipes.chat.recipe import Unmarked
from vlmdata.preprocess.recipes.choice import recipes_for
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

PAIRS = [("instruction", "output"), ("query", "response"), ("prompt", "completion")]
TEXT = st.text("ab <>", min_size=1, max_size=6)
MESSAGES = Reason.MALFORMED_MESSAGES


@settings(max_examples=60)
@given(
    pair=st.sampled_from(PAIRS),
    question=TEXT,
    answer=TEXT,
    history=st.lists(st.tuples(TEXT, TEXT).map(list), max_size=3),
    system=st.none() | st.text("ab", min_size=1),
    as_json=st.booleans(),
)
def test_a_pair_is_what_the_same_turns_as_messages_are(pair, question, answer, history, system, as_json):
    turns = [*history, [question, answer]]
    roles = ("user", "assistant")
    messages = [{"role": roles[i], "content": text} for turn in turns for i, text in enumerate(turn)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    row = {pair[0]: question, pair[1]: answer, "system": system}
    row["history"] = json.dumps(history) if as_json else history
    conversation = convert(row)
    assert conversation == convert({"messages": messages})
    assert (conversation.unused, conversation.unknown) == ((), ())


def test_alpacas_input_follows_the_instruction():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert seen(convert(row)) == [("user", ["Add.\n1 2"]), ("assistant", ["3"])]
    assert seen(convert({**row, "input": ""}))[0] == ("user", ["Add."])
    assert seen(convert({**row, "instruction": ""}))[0] == ("user", ["1 2"])
    assert convert({**row, "text": "Below is…"}).unknown == ("text",)


@pytest.mark.parametrize(("question", "answer"), PAIRS)
def test_images_stand_at_marks(tmp_path: Path, question: str, answer: str):
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    row = {question: "<image>and <image>?", answer: "yes", "images": ["a.png", "b.png"]}
    assert seen(convert(row, tmp_path)) == [("user", ["[a]", "and ", "[b]", "?"]), ("assistant", ["yes"])]
    check_rejected({**row, "images": []}, Reason.IMAGE_COUNT_MISMATCH, rf"{question}: <image> is placeholder 1, but")
    check_rejected({**row, question: "?"}, Reason.IMAGE_COUNT_MISMATCH, "0 image placeholders in the text for 2 images")


def test_images_in_the_history_come_first(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    row = {"query": "<image>2", "response": "y", "history": [["<image>1", "x"]], "images": ["a.png", "b.png"]}
    assert seen(convert(row, tmp_path))[::2] == [("user", ["[a]", "1"]), ("user", ["[b]", "2"])]


class TestOtherTools:
    """Forms of LLaMA-Factory and ms-swift, by the rows of their pages."""

    def test_content_parts_with_value(self, tmp_path: Path):
        (tmp_path / "a.png").write_bytes(b"a")
        content = [{"type": "image_url", "value": "a.png"}, {"type": "text", "value": "What?"}]
        answer = {"role": "assistant", "content": [{"type": "text", "value": "yes"}], "loss_weight": 1.0}
        row = {"messages": [{"role": "user", "content": content}, answer]}
        assert seen(convert(row, tmp_path)) == [("user", ["[a]", "What?"]), ("assistant", ["yes"])]
        assert convert(row, tmp_path).unknown == ()
        padded = [{"type": "text", "text": "What?", "value": None, "image_url": None}]
        assert seen(convert({"messages": [{"role": "user", "content": padded}, answer]}))[0] == ("user", ["What?"])

    def test_a_value_beside_the_part_itself_is_an_unknown_key(self):
        both = [{"type": "text", "text": "What?", "value": "x"}]
        assert convert({"messages": user(both)}).unknown == ("messages[].content[].value",)

    @pytest.mark.parametrize(
        "part", [{"type": "reasoning", "value": "x"}, {"value": "x"}, {"type": "text", "value": 5}]
    )
    def test_other_parts_are_refused(self, part: dict[str, Any]):
        with pytest.raises(RowRejected):
            convert({"messages": user([part])})

    @pytest.mark.parametrize("as_text", [False, True])
    def test_conversations_of_human_and_assistant(self, as_text: bool):
        turns = [{"human": "1", "assistant": "x"}, {"human": "2", "assistant": "y", "id": 3}]
        found = convert({"system": "S", "conversation": json.dumps(turns) if as_text else turns})
        wanted = [("system", "S"), ("user", "1"), ("assistant", "x"), ("user", "2"), ("assistant", "y")]
        assert seen(found) == [(role, [text]) for role, text in wanted]
        assert (found.unused, found.unknown) == (("messages[].id",), ())

    def test_an_answer_that_is_not_text_is_refused(self):
        row = {"conversation": [{"human": "1", "assistant": None}]}
        check_rejected(row, MESSAGES, r"conversation\[0\].assistant is not text: None")


PROMPT = [{"role": "system", "content": "S"}, *user("1"), {"role": "user", "content": "2"}]


class TestPromptsOfMessages:
    def test_only_the_completion_is_learned(self):
        row = {"prompt": PROMPT, "completion": [{"role": "assistant", "content": "y"}, *user("3")]}
        conversation = convert(row)
        assert seen(conversation) == seen(convert({"messages": [*row["prompt"], *row["completion"]]}))
        assert [message.loss_weight for message in conversation.messages] == [None, None, 0, None, None, None, None]

    def test_the_completion_may_be_text(self):
        assert seen(convert({"prompt": PROMPT, "completion": "y"}))[-1] == ("assistant", ["y"])

    def test_they_may_be_json_text_as_in_csv(self):
        row = {"prompt": json.dumps(PROMPT), "completion": json.dumps(user("?")[1:])}
        assert convert(row) == convert({name: json.loads(text) for name, text in row.items()})

    @pytest.mark.parametrize("text", ["[{", '[{"a": 1}]', "[1]", "[{]"])
    def test_other_text_in_brackets_is_text(self, text):
        assert seen(convert({"prompt": text, "completion": text})) == [("user", [text]), ("assistant", [text])]

    def test_turns_are_checked_as_anywhere(self):
        check_rejected({"prompt": "?", "completion": [{"role": "bot"}]}, MESSAGES, r"completion\[0\]\.role is bot")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "?", "output": 5}, "output is not text: 5"),
        ({"instruction": "?", "input": 5, "output": "x"}, "input is not text: 5"),
        ({"query": {"a": 1}, "response": "x"}, "query is not text: {'a': 1}"),
        ({"query": "?", "response": "x", "history": "a"}, "history is not JSON: .*: a"),
        ({"query": "?", "response": "x", "history": {"a": "b"}}, "history is not a list of exchanges: {'a': 'b'}"),
        ({"query": "?", "response": "x", "history": ["a"]}, r"history\[0\] is not a question and its answer: a"),
        ({"query": "?", "response": "x", "history": [["a"]]}, r"history\[0\] is not a question and its answer"),
        ({"query": "?", "response": "x", "history": [["a", None]]}, r"history\[0\]\[1\] is not text: None"),
        (
            {"query": "?", "response": "x", "instruction": "?", "output": "y"},
            "two pairs .*instruction/output and query",
        ),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], message: str):
    check_rejected(row, MESSAGES, message)


@pytest.mark.parametrize("row", [{"query": "?"}, {"response": "x"}, {"query": "?", "prompt": "?", "response2": "x"}])
def test_rows_without_a_question_or_an_answer(row: dict[str, Any]):
    check_rejected(row, Reason.MISSING_COLUMN, "nor a pair such as instruction and output; columns with values: ")


@pytest.mark.parametrize(("question", "answer"), PAIRS)
def test_an_empty_answer_is_left_to_be_rejected_as_such(question: str, answer: str):
    assert seen(convert({question: "?", answer: ""})) == [("user", ["?"]), ("assistant", [""])]


def test_question_and_answer_may_be_of_different_pairs():
    conversation = convert({"prompt": "?", "response": "x", "completion": None})
    assert seen(conversation) == [("user", ["?"]), ("assistant", ["x"])]


def test_messages_win_over_a_pair_whose_columns_are_then_reported():
    conversation = convert({"messages": user("hello"), "prompt": "hello", "completion": "yes"})
    assert (len(conversation.messages), conversation.unknown) == (2, ("completion", "prompt"))


@pytest.mark.parametrize(("question", "answer"), PAIRS)
def test_the_columns_fit_the_recipe(question: str, answer: str):
    assert recipes_for([question, answer, "images"]) == ["chat"]
    assert recipes_for([question]) == recipes_for([answer]) == []


class TestTexts:
    """The column of the Cauldron and FineVision."""

    ROW: ClassVar[dict[str, Any]] = {
        "images": [b"a"],
        "texts": [
            {"user": "One?", "assistant": "Yes.", "source": "AI2D"},
            {"user": "Two?", "assistant": "No.", "source": "AI2D"},
        ],
    }

    def test_exchanges_become_turns_after_the_image(self) -> None:
        made = Chat(Chat.Options(unmarked=Unmarked.FIRST), MediaLoader(None, False))(Row(0, self.ROW))
        turns = [("user", ["[a]", "One?"]), ("assistant", ["Yes."]), ("user", ["Two?"]), ("assistant", ["No."])]
        assert seen(made) == turns
        assert (made.unused, made.unknown) == (("messages[].source",), ())

    def test_without_the_option_the_message_names_it(self) -> None:
        check_rejected(self.ROW, Reason.IMAGE_COUNT_MISMATCH, "or give -O unmarked=first")

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["Before.", None], r"texts\[0\] is not an object with user and assistant: Before.*--recipe text reads"),
            ([{"user": "One?"}], r"texts\[0\] is not an object with user and assistant"),
            ([{"user": 1, "assistant": "a"}], r"texts\[0\]\.user is not text: 1"),
        ],
    )
    def test_what_is_rejected(self, texts: Any, message: str) -> None:
        check_rejected({"texts": texts}, Reason.MALFORMED_MESSAGES, message)

    def test_the_recipe_for_documents_names_this_one(self) -> None:
        with pytest.raises(RowRejected, match="questions and answers are read by --recipe chat"):
            load_recipe("text")(Row(0, {"texts": self.ROW["texts"]}))
