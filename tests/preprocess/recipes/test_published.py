"""Every command of docs/published-datasets.md, on rows with the columns of the dataset's card."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import encoded_image
from tests.preprocess.command_line import SMALL_IMAGES, Ended
from vlmdata import open_dataset
from vlmdata.inspect import describe_sample
from vlmdata.preprocess.recipes.choice import choose_recipe
from vlmdata.preprocess.sources.open import open_source

PAGE = Path(__file__).parents[3] / "docs" / "published-datasets.md"
#: A line of a table whose last cell is a command.
_COMMAND = re.compile(r"^\|.*\| `(vlmdata preprocess [^`]+)` \|$", re.MULTILINE)
COMMANDS = [shlex.split(command)[2:] for command in _COMMAND.findall(PAGE.read_text())]
#: Options that choose a part of a dataset on the hub.
_OF_HUB = ("--subset", "--split")

FILE = encoded_image(width=80, height=60)
IMAGE = {"bytes": FILE, "path": "7.png"}
URL = "data:image/png;base64," + base64.b64encode(FILE).decode()
SHA256 = hashlib.sha256(FILE).hexdigest()
COCO_PATH = "coco/train2014/COCO_train2014_000000000009.png"
RATINGS = ("relevance", "image_correspondence", "visual_dependency", "formatting")


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


def said(answer: str, id: int) -> dict[str, Any]:
    """An answer of VQAv2."""
    return {"answer": answer, "answer_confidence": "yes", "answer_id": id}


#: Rows of each dataset, and the answers that they teach.
ROWS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "lmms-lab/LLaVA-OneVision-Data": (
        [
            {"id": "1", "image": IMAGE, "conversations": talk("<image>\nTotal?", "12.50"), "data_source": "sroie"},
            {"id": "2", "image": None, "conversations": talk("Two and two?", "Four."), "data_source": "magpie"},
        ],
        ["12.50", "Four."],
    ),
    "llava_v1_5_mix665k.json": (
        [
            {"id": "1", "image": "coco/1.png", "conversations": talk("<image>\nColour?", "Grey.", "Sure?", "Yes.")},
            {"id": "2", "model": "", "conversations": talk("Two and two?", "Four.")},
        ],
        ["Grey.Yes.", "Four."],
    ),
    "HuggingFaceM4/the_cauldron": (
        [
            {
                "images": [IMAGE, IMAGE],
                "texts": [
                    {"user": "Which is larger?", "assistant": "Neither.", "source": "AI2D"},
                    {"user": "And newer?", "assistant": "The first.", "source": "AI2D"},
                ],
            }
        ],
        ["Neither.The first."],
    ),
    "HuggingFaceM4/FineVision": (
        [
            {
                "images": [IMAGE],
                "texts": [{"user": "What is it?", "assistant": "Noise."}],
                "source": "ai2d_merged",
                **{f"{kind}_ratings": [4] for kind in RATINGS},
                **{f"{kind}_min": 4 for kind in RATINGS},
            }
        ],
        ["Noise."],
    ),
    "allenai/pixmo-cap": (
        [{"image_url": URL, "caption": "A lot of noise.", "transcripts": ["It is, well, noise."]}],
        ["A lot of noise."],
    ),
    "lmms-lab/COCO-Caption2017": (
        [
            {
                "question_id": "9.jpg",
                "image": IMAGE,
                "question": "Please provide a caption for this image.",
                "answer": ["Noise.", "Grey noise.", "Noise."],
                "id": 9,
                "license": 3,
                "file_name": "9.jpg",
                "coco_url": "http://images.cocodataset.org/val2017/9.jpg",
                "height": 60,
                "width": 80,
                "date_captured": "2013-11-14",
            }
        ],
        ["Noise.", "Grey noise."],
    ),
    "lmms-lab/DocVQA": (
        [
            {
                "questionId": "337",
                "question": "What is the date?",
                "question_types": ["handwritten", "form"],
                "image": IMAGE,
                "docId": 279,
                "ucsf_document_id": "xnbl0037",
                "ucsf_document_page_no": "1",
                "answers": ["1/8/93", "January 8"],
                "data_split": "val",
            },
        ],
        ["1/8/93"],
    ),
    "InfographicVQA": (
        [
            {
                "questionId": "98313",
                "question": "How many?",
                "answers": ["4", "four"],
                "answer_type": ["single span"],
                "image": IMAGE,
                "image_url": "https://example.org/7.jpg",
                "operation/reasoning": ["counting"],
                "ocr": "[]",
                "data_split": "val",
            }
        ],
        ["4"],
    ),
    "HuggingFaceM4/ChartQA": (
        [{"image": IMAGE, "query": "How many bars?", "label": ["14"], "human_or_machine": 0}],
        ["14"],
    ),
    "lmms-lab/textvqa": (
        [
            {
                "image_id": "003a",
                "question_id": 34602,
                "question": "what is the brand?",
                "question_tokens": ["what", "is", "the", "brand"],
                "image": IMAGE,
                "image_width": 80,
                "image_height": 60,
                "flickr_original_url": "https://example.org/o.jpg",
                "flickr_300k_url": "https://example.org/z.jpg",
                "answers": ["nokia", "nous les", "dakota", "clos culombu", "nokia"],
                "image_classes": ["Belt"],
                "set_name": "train",
                "ocr_tokens": ["NOKIA"],
            }
        ],
        ["nokia"],
    ),
    "lmms-lab/VQAv2": (
        [
            {
                "question_type": "where",
                "multiple_choice_answer": "down",
                "answers": [said("down", 1), said("at table", 2), said("skateboard", 3), said("down", 4)],
                "image_id": 262148,
                "answer_type": "other",
                "question_id": 262148000,
                "question": "Where is he looking?",
                "image": IMAGE,
            }
        ],
        ["down"],
    ),
    "allenai/pixmo-points": (
        [
            {
                "image_url": URL,
                "image_sha256": SHA256,
                "points": [{"x": 10.0, "y": 50.0}, {"x": 99.94, "y": 0.06}],
                "count": 2,
                "label": "grey dots",
                "collection_method": "pointing",
            },
            {
                "image_url": URL,
                "image_sha256": SHA256,
                "points": [],
                "count": 0,
                "label": "dogs",
                "collection_method": "counting",
            },
        ],
        ['[{"point_2d": [100, 500], "label": "grey dots"}, {"point_2d": [999, 1], "label": "grey dots"}]', "[]"],
    ),
    "lmms-lab/RefCOCO": (
        [
            {
                "question_id": "469306",
                "image": IMAGE,
                "question": "Please provide a short description for this region.",
                "answer": ["guy petting elephant", "foremost person"],
                "segmentation": [20.0, 15.0, 60.0, 45.0],
                "bbox": [20.0, 15.0, 40.0, 30.0],
                "iscrowd": 0,
                "file_name": "COCO_train2014_000000296747_0.jpg",
            }
        ],
        [
            '[{"bbox_2d": [250, 250, 750, 750], "label": "guy petting elephant"}]',
            '[{"bbox_2d": [250, 250, 750, 750], "label": "foremost person"}]',
        ],
    ),
    "jxu124/refcoco": (
        [
            {
                "sent_ids": [0],
                "file_name": "COCO_train2014_000000000009_16.jpg",
                "ann_id": 1719310,
                "ref_id": 0,
                "image_id": 9,
                "split": "train",
                "sentences": [{"raw": "THE lady", "sent": "the lady", "sent_id": 0, "tokens": ["the", "lady"]}],
                "category_id": 1,
                "raw_anns": "{}",
                "raw_image_info": "{}",
                "raw_sentences": "[]",
                "image_path": COCO_PATH,
                "bbox": [20.0, 15.0, 60.0, 45.0],
                "captions": ["the lady"],
                "global_image_id": "coco.9",
                "anns_id": "1719310",
            }
        ],
        ['[{"bbox_2d": [250, 250, 750, 750], "label": "the lady"}]'],
    ),
    "detection-datasets/coco": (
        [
            {
                "image_id": 9,
                "image": IMAGE,
                "width": 80,
                "height": 60,
                "objects": {
                    "bbox_id": [1, 2],
                    "category": [0, 79],
                    "bbox": [[0.0, 0.0, 40.0, 30.0], [20.0, 15.0, 60.0, 45.0]],
                    "area": [1200, 1200],
                },
            }
        ],
        [
            '[{"bbox_2d": [0, 0, 500, 500], "label": "person"}, '
            '{"bbox_2d": [250, 250, 750, 750], "label": "toothbrush"}]'
        ],
    ),
}
#: COCO's own files, of which the page's script makes rows.
COCO_IMAGES = [{"id": 9, "file_name": "9.png", "height": 60, "width": 80, "license": 1}]
COCO_FILES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "captions_train2017": (
        {"images": COCO_IMAGES, "annotations": [{"image_id": 9, "id": i, "caption": f"Noise {i}."} for i in (1, 2)]},
        ["Noise 1.", "Noise 2."],
    ),
    "instances_train2017": (
        {
            "images": COCO_IMAGES,
            "annotations": [
                {"image_id": 9, "id": 1, "category_id": 90, "bbox": [20, 15, 40, 30], "iscrowd": 0, "area": 9},
                {"image_id": 9, "id": 2, "category_id": 1, "bbox": [0, 0, 80, 60], "iscrowd": 1, "area": 9},
            ],
            "categories": [{"id": 1, "name": "person"}, {"id": 90, "name": "toothbrush"}],
        },
        ['[{"bbox_2d": [250, 250, 750, 750], "label": "toothbrush"}]'],
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the images that rows name by path."""
    monkeypatch.chdir(tmp_path)
    for name in ("images/coco/1.png", COCO_PATH, "train2017/9.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(FILE)
    return tmp_path


def write_source(
    name: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, list[str]]:
    """Writes the rows of a dataset into the current folder. Returns their file and the answers."""
    if (stem := name.removesuffix(".jsonl")) in COCO_FILES:
        data, answers = COCO_FILES[stem]
        Path(f"{stem}.json").write_text(json.dumps(data))
        (script,) = re.findall(r"```python\n(# coco_rows\.py.*?)```", PAGE.read_text(), re.DOTALL)
        Path("coco_rows.py").write_text(script)
        monkeypatch.setattr(sys, "argv", ["coco_rows.py", f"{stem}.json", "train2017"])
        capsys.readouterr()
        runpy.run_path("coco_rows.py")
        Path(name).write_text(capsys.readouterr().out)
        return Path(name), answers
    rows, answers = ROWS["InfographicVQA" if "InfographicVQA" in options else name]
    if name.endswith(".json"):
        Path(name).write_text(json.dumps(rows))
        return Path(name), answers
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    return Path("rows.parquet"), answers


def test_every_dataset_has_its_command() -> None:
    told = {name for name, *_ in COMMANDS} | {"InfographicVQA"}
    assert told == {*ROWS, *(f"{name}.jsonl" for name in COCO_FILES)}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0].replace("/", "-"))
def test_the_command_reads_the_rows(
    command: list[str],
    folder: Path,
    vlmdata: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *options = command
    source, answers = write_source(name, options, monkeypatch, capsys)
    for option in _OF_HUB:
        if option in options:
            del options[options.index(option) : options.index(option) + 2]
    ended = vlmdata("preprocess", source, *options, "--out", "out", "-j", 1, *SMALL_IMAGES)
    assert ended.code == 0, ended.said
    dataset = open_dataset("out")
    manifest = dataset.manifest
    learned = [
        "".join(span.text for span in describe_sample(dataset, i).spans if span.target) for i in range(len(dataset))
    ]
    assert [text.replace("<|im_end|>\n", "") for text in learned] == answers
    assert not manifest.unknown_keys
    assert len(manifest.rejects) == 0
    # The recipe reads the columns that it uses, and no others, so that later files may have more.
    assert pq.read_table("out/rows.parquet")["columns"].null_count == 0


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("InfographicVQA", "llava_v1_5_mix665k.json")])
def test_the_columns_choose_the_recipe(name: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS[name][0]), tmp_path / "rows.parquet")
    options = next(options for each, *options in COMMANDS if each == name)
    wanted = options[options.index("--recipe") + 1]
    chosen = choose_recipe(open_source(str(tmp_path / "rows.parquet")), "rows.parquet")
    # Texts beside images are a document, unless they are objects, which columns do not tell.
    assert chosen == ("text" if "texts" in ROWS[name][0][0] else wanted)
