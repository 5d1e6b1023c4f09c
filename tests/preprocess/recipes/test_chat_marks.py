"""Marks of media in text: each has its image, is escaped, or rejects the row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.preprocess.recipes.chat_recipe import check_rejected, convert, seen, user
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recipes.chat.content import StrayMarks
from vlmdata.preprocess.recipes.chat.recipe import Unmarked
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

COUNT, CONTENT = Reason.IMAGE_COUNT_MISMATCH, Reason.UNSUPPORTED_CONTENT


def forms(text: str) -> list[dict[str, Any]]:
    """Rows of every form with the same question."""
    return [
        {"messages": user(text)},
        {"messages": user([{"type": "text", "text": text}])},
        {"messages": user([text])},
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]},
        {"instruction": text, "output": "yes"},
        {"query": text, "response": "yes"},
        {"prompt": text, "completion": "yes"},
        {"prompt": user(text)[:1], "completion": user(text)[1:]},
    ]


@pytest.mark.parametrize(
    "columns", [{}, {"images": []}, {"images": None}, {"image": None, "images": []}, {"image": ""}]
)
def test_a_mark_without_an_image_rejects_the_row_in_every_form(columns: dict[str, Any]) -> None:
    for row in forms("<image>\nWhat?"):
        pattern = r"<image> is placeholder 1, but the row has 0 images\. To .* write \\<image> or .* stray_marks=plain"
        check_rejected({**row, **columns}, COUNT, pattern)


def test_marks_of_other_media_reject_the_row() -> None:
    for row in forms("<audio>\nWhat?"):
        wanted = "holds the mark <audio>, and the recipe reads text, images and videos only. To keep"
        check_rejected(row, CONTENT, wanted)


@pytest.mark.parametrize("mark", ["<img>scans/0.png</img>", "<image 1>", "<image_12>", "<image1>"])
def test_marks_of_other_notations_reject_the_row(mark: str) -> None:
    for row in forms(f"{mark}\nWhat?"):
        check_rejected(row, CONTENT, rf"holds {mark}, a mark for an image .* Write <image> instead")
        check_rejected({**row, "images": [b"a"]}, CONTENT, "Write <image> instead")


@pytest.mark.parametrize("text", ["<img src='a.png'>", "<img></img>", "a < b <images> <image of a cat>"])
def test_text_that_only_looks_like_a_mark_is_kept(text: str) -> None:
    for row in forms(text):
        assert seen(convert(row))[0] == ("user", [text])


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_marks_in_turns_that_hold_no_images(role: str) -> None:
    row = {"messages": [*user("<image>?"), {"role": role, "content": "an <image>"}], "images": [b"a"]}
    check_rejected(row, COUNT, rf"messages\[2\] holds the mark <image> in an? {role} turn")


def test_marks_beside_items_that_place_the_images() -> None:
    row = {"messages": user([{"type": "image"}, {"type": "text", "text": "<image>\nWhat?"}]), "images": [b"a"]}
    check_rejected(
        row, COUNT, r"messages\[0\]\.content\[1\] holds the mark <image>, but content items of the row place"
    )


@pytest.mark.parametrize("mark", ["<image>", "<video>", "<audio>", "<img>0.png</img>", "<image 1>"])
def test_a_backslash_makes_a_mark_text_in_every_form(mark: str) -> None:
    for row in forms(f"What is \\{mark}?"):
        assert seen(convert(row))[0] == ("user", [f"What is {mark}?"])
    for role in ("assistant", "system", "tool"):
        messages = [{"role": role, "content": f"\\{mark} is a tag"}, *user("x")]
        assert seen(convert({"messages": messages}))[0] == (role, [f"{mark} is a tag"])


PIECES = st.lists(
    st.sampled_from(["<image>", "\\<image>", "\\<video>", "\\\\<image>", "a", "\\a", "\n", "<img>"]), max_size=8
)


@given(pieces=PIECES)
def test_marks_and_escapes_side_by_side(pieces: list[str]) -> None:
    """Every mark takes its image, escapes lose one backslash, all else stays."""
    count = pieces.count("<image>")
    row = {"messages": user("".join(pieces)), "images": [f"{n}".encode() for n in range(count)]}
    shown, number = [], 0
    for piece in pieces:
        shown.append(f"[{number}]" if piece == "<image>" else piece.replace("\\<", "<"))
        number += piece == "<image>"
    assert "".join(seen(convert(row))[0][1]) == "".join(shown)


class TestPlain:
    """``--recipe-option stray_marks=plain``."""

    def test_rows_without_images_keep_marks_as_text(self) -> None:
        for text in ("Explain <image>.", "a <video> and <audio>", "\\<image>"):
            for row in forms(text):
                assert seen(convert(row, stray=StrayMarks.PLAIN))[0] == ("user", [text.replace("\\", "")])

    def test_turns_and_rows_where_items_place_images_keep_them_too(self) -> None:
        row = {"messages": [*user([{"type": "image"}, "<image>?"]), *user("x")], "images": [b"a"]}
        row["messages"][1]["content"] = "<image>!"
        conversation = convert(row, stray=StrayMarks.PLAIN)
        assert seen(conversation)[:2] == [("user", ["[a]", "<image>?"]), ("assistant", ["<image>!"])]

    @pytest.mark.parametrize("text", ["<image><image>", "no mark"])
    def test_rows_with_images_must_still_agree(self, text: str) -> None:
        with pytest.raises(RowRejected, match="image"):
            convert({"messages": user(text), "images": [b"a"]}, stray=StrayMarks.PLAIN)


def test_images_named_by_items_must_be_as_many_as_in_a_column_that_repeats_them() -> None:
    item = {"type": "image", "image": b"a"}
    check_rejected(
        {"messages": user([item]), "images": [b"a", b"b"]}, COUNT, "1 image named by content items .*2 images"
    )


@pytest.mark.parametrize("index", [1, "0", -1])
def test_placeholders_numbered_out_of_order(index: Any) -> None:
    row = {"messages": user([{"type": "image", "index": index}]), "images": [b"a", b"b"]}
    check_rejected(row, COUNT, r"content\[0\]\.index is .*, but placeholders take the images of images in order")


class TestUnmarked:
    """``--recipe-option unmarked=first``."""

    def made(self, values: dict[str, Any]) -> list[tuple[str, list[str]]]:
        media = MediaLoader(None, allow_urls=False)
        return seen(Chat(Chat.Options(unmarked=Unmarked.FIRST), media)(Row(0, values)))

    def test_images_come_before_the_first_question(self) -> None:
        turns = [{"role": "system", "content": "Be brief."}, *user("What?"), *user("And?")]
        shown = self.made({"messages": turns, "images": [b"a", b"b"]})
        assert shown[:2] == [("system", ["Be brief."]), ("user", ["[a]", "[b]", "What?"])]
        assert [parts for _, parts in shown[2:]] == [["yes"], ["And?"], ["yes"]]

    def test_rows_with_marks_stay_as_they_are(self) -> None:
        for row in forms("What is <image>?"):
            assert self.made({**row, "images": [b"a"]})[0] == ("user", ["What is ", "[a]", "?"])
        items = {"messages": user([{"type": "text", "text": "?"}, {"type": "image"}]), "images": [b"a"]}
        assert self.made(items)[0] == ("user", ["?", "[a]"])

    def test_fewer_marks_than_images_are_still_a_mismatch(self) -> None:
        with pytest.raises(RowRejected, match="1 image placeholder in the text for 2 images in images"):
            self.made({"messages": user("<image>?"), "images": [b"a", b"b"]})

    def test_the_rejection_names_the_option(self) -> None:
        check_rejected({"messages": user("?"), "images": [b"a"]}, COUNT, "belongs, or give -O unmarked=first$")
