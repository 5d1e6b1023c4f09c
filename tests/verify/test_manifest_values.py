"""Every value of the manifest, edited in turn: the audit finds it, or it is listed here with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import mixed_rows, turn, write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.weighted import RECIPE, with_weights
from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.holdout import hold_out
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.manifest import manifest_faults

#: Values that nothing in a dataset proves, as patterns of their paths, and why.
UNPROVEN = {
    r"created_by": "the writer's version; a recoded dataset was made by two",
    r"schema_version": "readers accept each minor version, because later ones only add data",
    r"SOURCE\.kind": "the source is not in the dataset",
    r"SOURCE\.files\.\d+\.\w+": "the source's files are not in the dataset",
    r"SOURCE\.selection\.(holdout|side)": "which rows a share chooses depends on their content",
    r"source\.selection\.of_rows": "rows of the other side are not in the dataset",
    r"JOINED\.fingerprint": "the manifests of joined datasets are not in the join",
    r"JOINED\.source\.image_files\.\w+": "a join has no lists of image files",
    r"JOINED\.source\.selection\.rows_sha256": "the rows have new numbers in a join",
    r"totals\.file_bytes": "the image files are not in the dataset",
    r"unused_keys\.\w+": "the keys of rows are not in the dataset",
    r"turns\.(last_turns_with_dropped_reasoning|rows_unlike_inference)": "they show with rows and template only",
}
#: Values of UNPROVEN that one of the datasets proves, and why.
PROVEN = {
    ("source codec", "totals.file_bytes"): "the codec stores the files",
    ("joined", "source.selection.of_rows"): "it is the sum over the joined datasets",
    ("joined", "source.kind"): "the config of a join lists those of its datasets",
    ("joined", "source.datasets.1.source.kind"): "without it, the rows of its datasets do not add up",
}
JOINED = r"source(\.datasets\.\d+\.source)*\.datasets\.\d+"
SOURCE = r"source(\.datasets\.\d+\.source)*"
CONFIG = PreprocessConfig(recipe="chat", image=ImageConfig(1024, 65_536), rows_per_shard=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    named = {"messages": [turn("user", {"type": "image", "image": "it.png"}, "?"), turn("assistant", "Noise.")]}
    (folder / "it.png").write_bytes(encoded_image(seed=9))
    lost = turn("assistant", "Of course.") | {"reasoning_content": "An earlier turn: the template drops it."}
    dropping = {"messages": [turn("user", "Really?"), lost, turn("user", "Sure?"), turn("assistant", "Yes.")]}
    rows = [*mixed_rows(), named, dropping]
    rows[0]["id"] = 7  # an unused key
    return write_jsonl(folder / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def datasets(folder: Path, source: Path) -> dict[str, Path]:
    """Datasets whose manifests have every field between them."""
    sides = hold_out(open_source(str(source), recipe="chat"), 0.4, workers=1)
    for side, rows in sides.items():
        preprocess_dataset(rows, folder / side, CONFIG)
    weighted = write_jsonl(folder / "weighted.jsonl", with_weights(mixed_rows()))
    build_dataset(weighted, folder / "weighted", recipe=RECIPE, rows_per_shard=3)
    texts = write_jsonl(folder / "texts.jsonl", [{"text": "All of it. " * n} for n in range(1, 6)])
    build_dataset(texts, folder / "documents", recipe="text", rows_per_shard=2)
    join = folder / "join"
    join_datasets([open_store(folder / "validation"), open_store(folder / "documents")], open_store(join))
    join_datasets([open_store(folder / "train"), open_store(join)], open_store(folder / "joined"))
    return {
        "mixed": build_dataset(source, folder / "mixed", recipe="chat", rows_per_shard=3),
        "source codec": build_dataset(source, folder / "files", recipe="chat", rows_per_shard=3, pixels="source"),
        **{name: folder / name for name in ("validation", "weighted", "documents", "joined")},
    }


def edits(fields: Any, inner: Any = None, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Every path of a number, text, truth or null in JSON, and the JSON with that value edited.

    Of a list, the first and the last element: no check treats those between them differently.
    """
    inner = fields if inner is None else inner
    ends = slice(None, None, max(1, len(inner) - 1))
    for name, value in list(inner.items()) if isinstance(inner, dict) else list(enumerate(inner))[ends]:
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, dict | list):
            yield from edits(fields, value, here) if value else ()
            continue
        inner[name] = edited(value)
        yield here, json.dumps(fields).encode()
        inner[name] = value


def all_edited(content: bytes, paths: list[str]) -> bytes:
    """JSON with the values at all paths edited."""
    fields = json.loads(content)
    for path in paths:
        *outer, last = (int(name) if name.isdigit() else name for name in path.split("."))
        inner = fields
        for name in outer:
            inner = inner[name]
        inner[last] = edited(inner[last])
    return json.dumps(fields).encode()


def edited(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if value is None:
        return "x"
    # Another digit in a hash, another word elsewhere.
    return value[:-1] + ("0" if value[-1] != "0" else "1") if re.fullmatch(r"[0-9a-f]{32,}", value) else f"{value}x"


def is_unproven(name: str, path: str) -> bool:
    patterns = [each.replace("JOINED", JOINED).replace("SOURCE", SOURCE) for each in UNPROVEN]
    return (name, path) not in PROVEN and any(re.fullmatch(pattern, path) for pattern in patterns)


@pytest.mark.parametrize("name", ["mixed", "source codec", "validation", "weighted", "documents", "joined"])
def test_each_edited_value_is_found(datasets: dict[str, Path], name: str) -> None:
    directory = datasets[name]
    assert verify_dataset(directory).faults == []
    content = (directory / MANIFEST_NAME).read_bytes()
    without_fault, unproven = [], []
    for path, changed in edits(json.loads(content)):
        if is_unproven(name, path):
            unproven.append(path)
            continue
        (directory / MANIFEST_NAME).write_bytes(changed)
        if not has_faults(directory):
            without_fault.append(path)
    assert without_fault == [], "edited without a fault"
    # All at once: in this direction a fault of any of them is enough.
    (directory / MANIFEST_NAME).write_bytes(all_edited(content, unproven))
    assert not has_faults(directory), f"listed as unproven, but the audit finds one of {unproven}"
    (directory / MANIFEST_NAME).write_bytes(content)


def has_faults(directory: Path) -> bool:
    try:
        # The manifest alone first: that is quick.
        if any(manifest_faults(Manifest.read(directory))):
            return True
        return bool(verify_dataset(directory, pixels=False).faults)
    except DatasetFormatError:
        return True  # the command ends with this message
