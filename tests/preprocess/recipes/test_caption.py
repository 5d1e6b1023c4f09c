"""The caption recipe: an image and a text beside it, from WebDataset pairs to a dataset."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest

from tests.conftest import build_dataset, encoded_image
from vlmdata.preprocess.conversation import Conversation, ImagePart, TextPart
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset

IMAGE = {"bytes": b"pixels", "path": "7.jpg"}


def caption(**values: Any) -> Conversation:
    return load_recipe("caption", {"prompt": "What is it?"})(Row(0, {"image": IMAGE, **values}))


@pytest.mark.parametrize("column", ["txt", "text", "caption"])
def test_the_prompt_is_asked_and_the_caption_learned(column):
    made = caption(**{column: " A cat.\n", "__key__": "7", "similarity": 0.3})
    user, assistant = made.messages
    image, question = user.parts
    assert isinstance(image, ImagePart)
    assert (image.data, image.field, question) == (b"pixels", "image[0]", TextPart("What is it?"))
    assert (assistant.role, assistant.parts) == ("assistant", (TextPart("A cat."),))
    assert (made.unused, made.unknown) == (("__key__",), ("similarity",))


def test_marks_that_are_meant_as_text():
    (_, answer) = caption(txt="The tag \\<image>.").messages
    assert answer.parts == (TextPart("The tag <image>."),)


def test_sizes_of_the_row_are_obeyed():
    made = caption(txt="A cat.", image={**IMAGE, "max_pixels": 8000}, min_pixels=2000)
    (image,) = made.images
    assert (image.min_pixels, image.max_pixels, made.unknown) == (2000, 8000, ())


@pytest.mark.parametrize(
    ("pick", "learned"),
    [("first", ["A cat."]), ("common", ["A dog."]), ("each", ["A cat.", "A dog."])],
)
def test_a_list_of_captions(pick: str, learned: list[str]) -> None:
    row = Row(0, {"image": IMAGE, "caption": ["A cat.", "", " A dog.", "A dog."]})
    made = load_recipe("caption", {"pick": pick})(row)
    found = [each for each in (made if isinstance(made, list) else [made]) if isinstance(each, Conversation)]
    assert isinstance(made, list) == (pick == "each")
    assert [each.messages[1].text for each in found] == learned


def test_the_same_caption_twice_is_one():
    assert caption(txt="A cat.\n", caption="A cat.", weight=0.5).loss_weight == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "missing_column: no txt, text, caption; columns are image"),
        ({"txt": "A cat.", "caption": "A dog."}, "malformed_messages: txt and caption hold different captions"),
        ({"txt": 7}, "malformed_messages: txt is not text: 7"),
        ({"txt": " \n"}, "empty_answer: the caption is empty"),
        ({"txt": "A cat.", "image": None}, "missing_image: "),
        ({"txt": "A cat.", "video": b"film"}, "unsupported_content: "),
        ({"txt": "A cat.", "image": [IMAGE, IMAGE]}, "image_count_mismatch: image holds 2 images; a caption needs one"),
        (
            {"txt": "A cat.", "images": [IMAGE, IMAGE]},
            "image_count_mismatch: the columns images and image have different images",
        ),
        ({"txt": "<image> A cat."}, "image_count_mismatch: caption holds the mark <image> in an assistant turn"),
        ({"txt": "<video> A cat."}, "unsupported_content: caption holds the mark <video>"),
    ],
)
def test_what_is_rejected(values, message):
    with pytest.raises(RowRejected) as rejected:
        caption(**values)
    assert str(rejected.value).startswith(message)


def test_pairs_as_img2dataset_writes_them_become_a_dataset(tmp_path):
    with tarfile.open(tmp_path / "00000.tar", "w") as tar:
        for n in range(4):
            download = {"key": f"0000{n}", "caption": f"Noise {n}.", "status": "success", "sha256": "0", "width": 64}
            members = {
                "png": encoded_image(seed=n),
                "txt": f"Noise {n}.".encode(),
                "json": json.dumps(download).encode(),
            }
            for extension, data in members.items():
                info = tarfile.TarInfo(f"0000{n}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    dataset = open_dataset(build_dataset(tmp_path / "00000.tar", tmp_path / "out", recipe="caption"))
    assert len(dataset) == dataset.manifest.totals.items == 4
    assert not dataset.manifest.unknown_keys
    assert verify_dataset(tmp_path / "out").faults == []
