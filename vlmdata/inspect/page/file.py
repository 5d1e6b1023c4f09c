"""The one-file page, with the card, some samples with images, and the first packs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from vlmdata.errors import DatasetFormatError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.dataset import DatasetCard
from vlmdata.inspect.page.build import HtmlPage, build_page
from vlmdata.inspect.page.payload import dataset_payload, sample_payload, summary_payload
from vlmdata.inspect.pixels import PAGE_SIDE, THUMBNAIL_SIDE
from vlmdata.inspect.sample import SampleDescriber
from vlmdata.media.image_file import image_file


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
