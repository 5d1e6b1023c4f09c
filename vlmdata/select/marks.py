"""Reads what near duplicates are known by from the shards: pictures from pixels, texts from tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import TOKENIZER_DIR, Sample
from vlmdata.format.tokenizer_files import VOCABULARY_FILE
from vlmdata.select.duplicates import Duplicates
from vlmdata.select.near import Near, near_pictures, near_texts, picture_hash, text_signature

REPORT_FIELDS = ("key", "kept", "likeness", "kind")


def near_samples(dataset: VlmDataset, kind: Duplicates, positions: Sequence[int]) -> list[Near]:
    """Finds samples that are near an earlier one of the same positions.

    Args:
        dataset: The dataset. Shards are read one after another.
        kind: ``near-texts`` or ``near-images``. Samples without images are near none by images.
        positions: Positions of the samples, ascending.

    Raises:
        DatasetFormatError: If a sample is damaged, or the tokenizer cannot be read.
    """
    if kind is Duplicates.NEAR_TEXTS:
        tokenizer = _tokenizer(dataset)
        return near_texts(positions, [text_signature(_text(dataset, tokenizer, i)) for i in positions])
    counts = dataset.index.item_counts
    pictured = [i for i in positions if counts[i]]
    return near_pictures(pictured, [list(map(picture_hash, pictures(dataset, i))) for i in pictured])


def pictures(dataset: VlmDataset, i: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields each image of a sample, and the first frame of each video, uint8 (H, W, 3)."""
    sample: Sample = dataset[i]
    start = 0
    for shape in sample.items:
        _, height, width = shape.grid
        frame = sample.patches[start : start + height * width * shape.copies : shape.copies]
        yield dataset.family.unpatchify(frame, height, width).transpose(1, 2, 0)
        start += shape.rows


def report_lines(dataset: VlmDataset, found: Iterable[Near], kind: Duplicates) -> Iterator[str]:
    """Yields a line of JSON for each near duplicate: its key, the key that stays in its place, and their likeness."""
    for each in found:
        values = (dataset.index.key(each.sample), dataset.index.key(each.kept), round(each.likeness, 4), kind.value)
        yield json.dumps(dict(zip(REPORT_FIELDS, values, strict=True))) + "\n"


def read_report(path: Path) -> list[dict[str, object]]:
    """Reads the lines of :func:`report_lines`.

    Raises:
        UsageError: If the file is none.
    """
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not all(isinstance(each, dict) and set(REPORT_FIELDS) <= set(each) for each in found):
            raise ValueError("a line lacks a field")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--duplicates {path}: no report of `vlmdata select --drop-duplicates … --duplicates-report FILE`: {error}"
        ) from None
    return found


def _text(dataset: VlmDataset, tokenizer: Tokenizer, i: int) -> str:
    sample = dataset.without_pixels(i)
    return str(tokenizer.decode(sample.input_ids[: sample.length].tolist(), skip_special_tokens=True))


def _tokenizer(dataset: VlmDataset) -> Tokenizer:
    path = dataset.directory / TOKENIZER_DIR / VOCABULARY_FILE
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise DatasetFormatError(f"{path}: cannot read the tokenizer: {error}") from error
