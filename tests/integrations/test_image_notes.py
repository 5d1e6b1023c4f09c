"""Images that the processor of a model makes other than a dataset has them are named, in every family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families.reference import FAMILIES, TILE, TOKEN, image_processor, internvl_images
from vlmdata.families import family
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.manifest import Manifest
from vlmdata.integrations.images import image_notes, image_processor_notes


def gemma4(**settings: Any) -> Any:
    from transformers.models.gemma4 import Gemma4ImageProcessor

    return Gemma4ImageProcessor(max_soft_tokens=70, **settings)


#: Family -> its processor, and the bounds of pixels that it has.
PROCESSORS: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    **{name: (lambda name=name: image_processor(name, 65_536, 1_003_520), (65_536, 1_003_520)) for name in FAMILIES},
    "internvl": (lambda: internvl_images(6), (TILE**2, 6 * TILE**2)),
    "gemma4": (gemma4, (70 * TOKEN, 70 * TOKEN)),
}


@pytest.fixture(params=PROCESSORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifest(name: str, random_data: Callable[[str], Path]) -> Manifest:
    """Of a dataset of the family, as if made with the bounds of the processor."""
    made = VlmDataset(random_data(name)).manifest
    return with_bounds(made, PROCESSORS[name][1])


def with_bounds(manifest: Manifest, bounds: tuple[int, int]) -> Manifest:
    options = {"image": {"min_pixels": bounds[0], "max_pixels": bounds[1]}}
    return dataclasses.replace(manifest, config={**manifest.config, "options": options})


def notes(manifest: Manifest, processor: Any) -> list[str]:
    return list(image_processor_notes("data", manifest, processor, "theirs"))


def test_the_processor_of_a_family_is_as_the_dataset(name: str, manifest: Manifest, tmp_path: Path) -> None:
    processor = PROCESSORS[name][0]()
    assert notes(manifest, processor) == []
    processor.save_pretrained(tmp_path)
    assert image_notes([("data", manifest)], str(tmp_path)) == []


def test_other_settings_are_named(name: str, manifest: Manifest, tmp_path: Path) -> None:
    processor = PROCESSORS[name][0]()
    processor.rescale_factor = 1 / 128
    processor.save_pretrained(tmp_path)
    (note,) = image_notes([("data", manifest)], str(tmp_path))
    assert note.startswith("images: of a picture of 64x48 pixels, the processor of")
    assert "pixel_values that differ by up to" in note
    assert "from those of data because of its rescale_factor 0.0078125. Preprocess" in note
    assert image_notes([("data", manifest)], None) == image_notes([("data", manifest)], str(tmp_path / "none")) == []


def test_other_sizes_are_named(name: str, manifest: Manifest) -> None:
    wider = {"internvl": 12 * TILE**2, "gemma4": 280 * TOKEN}.get(name, 16_777_216)
    (note,) = notes(with_bounds(manifest, (family(name).min_pixels, wider)), PROCESSORS[name][0]())
    assert "makes pixel_values of " in note
    assert ", unlike the " in note


def test_settings_of_one_family_are_found(random_data: Callable[[str], Path]) -> None:
    """InternVL without tiles, and Gemma 4 with another filter; joined datasets have no bounds to compare."""
    internvl, made = (
        with_bounds(VlmDataset(random_data("internvl")).manifest, PROCESSORS["internvl"][1]),
        internvl_images(6),
    )
    made.crop_to_patches = False
    (note,) = notes(internvl, made)
    assert "makes pixel_values of 1x3x448x448, unlike the 7x3x448x448 of data. Preprocess" in note
    gemma = with_bounds(VlmDataset(random_data("gemma4")).manifest, PROCESSORS["gemma4"][1])
    (note,) = notes(gemma, gemma4(resample=0))
    assert "because of its resample 0" in note
    joined = dataclasses.replace(gemma, config={**gemma.config, "options": {}})
    assert notes(joined, gemma4(resample=0)) == []
