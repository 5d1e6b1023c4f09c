"""What a recipe may know of its run, and the columns that it attaches to samples."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vlmdata
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.families.reference import FAMILIES
from tests.preprocess.command_line import Ended
from tests.preprocess.extend_pages import write_example
from vlmdata.families import family
from vlmdata.inspect.sample import describe_sample
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import encode_image
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recipes.context import RecipeContext
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.verify.dataset import verify_dataset


def png(height: int, width: int, orientation: int = 1) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height), "white").save(file, "PNG", exif=exif)
    return file.getvalue()


sides, bounds = st.integers(8, 300), st.none() | st.integers(4096, 65_536)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(FAMILIES)),
    height=sides,
    width=sides,
    turned=st.booleans(),
    most=bounds,
    size=st.none() | st.tuples(sides, sides),
)
def test_the_final_size_is_that_of_the_stored_image(
    name: str, height: int, width: int, turned: bool, most: int | None, size: tuple[int, int] | None
) -> None:
    config = ImageConfig(4096, 65_536)
    context = RecipeContext.of(PreprocessConfig(family=name, image=config))
    wanted = {} if size is None else {"resized_height": size[0], "resized_width": size[1]}
    image = ImagePart(png(height, width, 6 if turned else 1), max_pixels=most, **wanted)
    (view,) = encode_image(image, config, family(name), "image")
    stored = view.size
    assert context.final_size(image) == stored
    if size is None and most is None:
        assert context.final_size((width, height) if turned else (height, width)) == stored


def test_an_image_that_cannot_be_used_rejects_the_row() -> None:
    context = RecipeContext.of(PreprocessConfig())
    for image in (ImagePart(b"no image", "scan"), (1, 1000)):
        with pytest.raises(RowRejected):
            context.final_size(image)


class Knowing:
    """Tells its context, in an answer and in columns."""

    def __init__(self, context: RecipeContext):
        self._context = context

    def __call__(self, row: Row) -> Conversation | Document:
        """Returns a document for rows of text."""
        text, columns = TextPart(str(self._context.final_size((640, 480)))), row.values["columns"]
        if row.values["kind"] == "document":
            return Document((text,), columns=columns)
        turns = (Message("user", (TextPart("?"),)), Message("assistant", (text,)))
        return Conversation(turns * 2, columns=columns)


def test_a_recipe_gets_the_context_of_the_run(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"kind": "chat", "columns": {}}])
    for name, least in (("qwen3_5", 65_536), ("qwen2_5_vl", 1_000_000)):
        config = {"family": name, "image": ImageConfig(least, 2_000_000), "recipe": f"{__name__}:Knowing"}
        dataset = vlmdata.open_dataset(build_dataset(source, tmp_path / name, **config))
        expected = str(family(name).image_size(640, 480, least, 2_000_000))
        assert expected in "".join(span.text for span in describe_sample(dataset, 0).spans)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"))
)
columns = st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), scalars | st.lists(scalars), max_size=4)


@settings(max_examples=100, deadline=None)
@given(columns)
def test_any_columns_are_kept(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(dict(Conversation((), columns=found).columns))) == found
    assert Document((), columns=found).columns == found


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"a": float("nan")}, r"columns\['a'\] holds nan; numbers must be finite"),
        ({"a": [1, float("inf")]}, r"columns\['a'\] holds inf"),
        ({"a": {"b": 1}}, r"columns\['a'\] holds {'b': 1} \(dict\); it may hold str, int"),
        ({"a": [[1]]}, r"columns\['a'\] holds \[1\] \(list\)"),
        ({"a": b"x"}, r"holds b'x' \(bytes\)"),
        ({"": 1}, "it must map names to values"),
        ({1: 1}, "it must map names to values"),
        ([1], "it must map names to values"),
        ({"a": "\ud800"}, "text that is not Unicode"),
    ],
)
def test_other_columns_are_refused(found: Any, wrong: str) -> None:
    for make in (Conversation, Document):
        with pytest.raises((TypeError, ValueError), match=wrong):
            make((), columns=found)


@pytest.mark.parametrize("turns", [TrainTurns.ALL, TrainTurns.EACH])
def test_columns_are_stored_shown_and_sound(tmp_path: Path, turns: TrainTurns) -> None:
    found = {"lang": "de", "ids": [1, 2.5, None, True], "none": None}
    rows = [{"kind": kind, "columns": found if number else {}} for kind in ("chat", "document") for number in (0, 1)]
    source = write_jsonl(tmp_path / "rows.jsonl", [{**row, "columns": json.dumps(row["columns"])} for row in rows])
    out = build_dataset(source, tmp_path / "out", recipe=f"{__name__}:Stored", train_turns=turns)
    dataset = vlmdata.open_dataset(out)
    assert verify_dataset(out).faults == []
    for i, row in enumerate(dataset.index.source_row.tolist()):
        assert dataset.metadata(i).get("columns", {}) == json.loads(json.dumps(rows[row]["columns"]))
        assert describe_sample(dataset, i).columns == dataset.metadata(i).get("columns", {})
        assert ("columns" in dataset.metadata(i)) == bool(rows[row]["columns"])


class Stored(Knowing):
    """Reads its columns from text, as tables of rows give each column one type."""

    def __call__(self, row: Row) -> Conversation | Document:
        """Reads the columns."""
        return super().__call__(Row(row.number, {**row.values, "columns": json.loads(row.values["columns"])}))


def test_inspect_shows_columns(tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"kind": "chat", "columns": '{"lang": "de"}'}])
    out = build_dataset(source, tmp_path / "out", recipe=f"{__name__}:Stored")
    assert "lang = de" in vlmdata("inspect", out, "--row", 0).stdout


def test_the_pages_recipe_scales_to_the_final_size(tmp_path: Path) -> None:
    file = tmp_path / f"{write_example('recipe.md', tmp_path, 2)}.py"
    values = {"image": encoded_image(), "height": 400, "width": 200, "object": "cat", "x": 100, "y": 200}
    context = RecipeContext.of(PreprocessConfig())
    made = load_recipe(f"{file}:Boxes", context=context)(Row(0, values))
    assert isinstance(made, Conversation)
    height, width = context.final_size((400, 200))
    assert made.columns == {"object": "cat", "at": [round(width / 2), round(height / 2)]}
