"""The one-file page, with the card, chosen samples with images, and the first packs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from vlmdata.errors import DatasetFormatError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.dataset import DatasetCard
from vlmdata.inspect.findings import Severity
from vlmdata.inspect.page.build import HtmlPage, build_page
from vlmdata.inspect.page.payload import dataset_payload, sample_payload, summary_payload
from vlmdata.inspect.sample import PAGE_SIDE, THUMBNAIL_SIDE, SampleDescriber
from vlmdata.media.image_file import image_file

_FINDINGS_FIRST = 3


def page_document(
    dataset: VlmDataset, card: DatasetCard, chosen: Mapping[int, str], packs: Mapping[str, Any]
) -> HtmlPage:
    """Builds a page with the samples at some positions, each with the reason for showing it, and packs."""
    describe = SampleDescriber(dataset)
    boot = {
        "mode": "file",
        "card": dataset_payload(dataset, card),
        "samples": [
            summary_payload(describe, i, why, _image_uri(describe, i, 0, THUMBNAIL_SIDE)) for i, why in chosen.items()
        ],
        "packs": packs,
    }
    return build_page(boot, {i: _with_images(describe, i) for i in chosen}, served=False)


def _with_images(describe: SampleDescriber, i: int) -> dict[str, Any]:
    payload = sample_payload(describe(i))
    for image in payload["images"]:
        image["src"] = _image_uri(describe, i, image["number"], PAGE_SIDE)
    return payload


def _image_uri(describe: SampleDescriber, i: int, number: int, longest: int) -> str | None:
    """Returns an image as a ``data:`` URL; None if missing or damaged (its findings report damage)."""
    try:
        pixels = describe.image(i, number)
    except (IndexError, DatasetFormatError):
        return None
    return f"data:image/webp;base64,{base64.b64encode(image_file(pixels, 'webp', longest)).decode()}"


def choose_samples(card: DatasetCard, total: int, count: int, seed: int) -> dict[int, str]:
    """Returns the positions of at most ``count`` samples of ``total``, with the reason for each."""
    reasons: dict[int, list[str]] = {}
    for group in card.findings:
        shown = group.examples if group.severity is not Severity.NOTE else group.examples[:_FINDINGS_FIRST]
        for example in shown:
            reasons.setdefault(example.index, []).append(group.kind.replace("_", " "))
    for extremes in card.extremes:
        for sample in extremes.samples:
            reasons.setdefault(sample.index, []).append(extremes.title)
    chosen = {index: ", ".join(dict.fromkeys(why)) for index, why in list(reasons.items())[:count]}
    # Draw twice as many as needed: at most half of them are already chosen.
    for index in np.random.default_rng(seed).permutation(total)[: 2 * count].tolist():
        if len(chosen) >= min(count, total):
            break
        chosen.setdefault(index, "random")
    return chosen
