"""The one-file page, with the card, some samples with images, and the first packs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmdata.errors import DatasetFormatError
from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.dataset import DatasetCard
from vlmdata.inspect.page.build import Document, build_page
from vlmdata.inspect.page.payload import dataset_payload, safe, sample_payload, summary_payload
from vlmdata.inspect.pixels import PAGE_SIDE, THUMBNAIL_SIDE, data_uri, rebuild_image
from vlmdata.inspect.sample import SampleDescriber
from vlmdata.inspect.serialise import to_jsonable
from vlmdata.media.image_file import image_file


def page_document(
    dataset: VlmDataset,
    card: DatasetCard,
    chosen: Mapping[int, str],
    packs: Mapping[str, Any],
) -> Document:
    """Builds a page with some samples.

    Args:
        dataset: The dataset.
        card: Its card.
        chosen: Positions of the samples to show, with the reason for each.
        packs: Result of :func:`packs_payload`.

    Returns:
        The document.
    """
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


def packs_payload(batches: list[Any], total: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Formats packs for the page.

    Args:
        batches: Descriptions of the first batches.
        total: Total number of batches.
        options: Loader options to show.
    """
    return {"batches": safe(to_jsonable(batches)), "total": total, "options": to_jsonable(options)}


def _with_images(describe: SampleDescriber, i: int) -> dict[str, Any]:
    payload = sample_payload(describe(i))
    for image in payload["images"]:
        image["src"] = _image_uri(describe, i, image["number"], PAGE_SIDE)
    return payload


def _image_uri(describe: SampleDescriber, i: int, number: int, longest: int) -> str | None:
    """Returns an image as a ``data:`` URL; None if missing or damaged (its findings report damage)."""
    try:
        pixels = rebuild_image(describe.dataset.as_stored(i), number, describe.dataset.family)
    except (IndexError, DatasetFormatError):
        return None
    return data_uri(image_file(pixels, "webp", longest), "webp")
