"""Compares the images of a dataset with what the processor of a model makes of them, by trying pictures.

So any setting of the processor that changes pixels is found, also one that vlmdata does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.families import Family
from vlmdata.families.chat import IMAGE
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import KIND_FEATURES
from vlmdata.integrations.processors import read_processor
from vlmdata.media.resize import SizeRequest, resize_to_patches, target_size

#: Height and width of the pictures: one for the smallest size, one that few bounds change, one for the largest size.
_PICTURES = ((48, 64), (480, 640), (1800, 2400))
_POSITIONS = "image_position_ids"


def image_notes(datasets: Sequence[tuple[str, Manifest]], model: str | None) -> list[str]:
    """Tells which datasets have other images than the processor of a model makes.

    Args:
        datasets: Names and manifests. Those without images, or of several pixel bounds, do not count.
        model: Folder or hub id. None, or one without an image processor that can be read, is not compared.

    Returns:
        A line for each dataset that differs.
    """
    with_images = [each for each in datasets if KIND_FEATURES[IMAGE] in each[1].features]
    processor = read_processor("AutoImageProcessor", model) if model is not None and with_images else None
    if processor is None:
        return []
    return [note for name, manifest in with_images for note in image_processor_notes(name, manifest, processor, model)]


def image_processor_notes(
    name: str, manifest: Manifest, processor: Any, model: str | None = "the model"
) -> Iterator[str]:
    """Yields a line if an image processor of transformers makes other images than a dataset has.

    Args:
        name: The dataset, for messages.
        manifest: Its manifest.
        processor: The image processor.
        model: Whose processor it is, for messages.
    """
    options = manifest.config.get("options", {}).get("image", {})
    if "min_pixels" not in options:  # datasets of several bounds, joined
        return
    bounds = int(options["min_pixels"]), int(options["max_pixels"])
    for height, width in _PICTURES:
        picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        ours = _stored(picture, manifest.model_family, bounds)
        fault = _difference(ours, picture, processor)
        if fault:
            causes = ", ".join(_causes(ours, picture, processor))
            yield (
                f"images: of a picture of {width}x{height} pixels, the processor of {model} makes {fault} "
                f"{name}{f' because of its {causes}' if causes else ''}. Preprocess with the options of the processor, "
                "or serve the model with those of the dataset"
            )
            return


def _stored(picture: npt.NDArray[np.uint8], family: Family, bounds: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Returns what the model gets of a picture that was preprocessed."""
    height, width = picture.shape[:2]
    size = target_size(height, width, SizeRequest(), bounds, family, "the picture")
    patches, grids = [], []
    for view in family.views(height, width, size):
        top, left, rows, columns = view.crop or (0, 0, height, width)
        memory = np.ascontiguousarray(picture[top : top + rows, left : left + columns])
        patches.append(resize_to_patches(memory, *view.size, family, part=view.part))
        grids.append([1, *(side // family.patch_size for side in view.shape)])
    return family.image_inputs(family.pixel_values(torch.from_numpy(np.concatenate(patches))), torch.tensor(grids))


def _difference(ours: dict[str, torch.Tensor], picture: npt.NDArray[np.uint8], processor: Any, **settings: Any) -> str:
    """Says what the processor makes other than ours, up to the name of ours; "" if all is equal."""
    try:
        made = processor(picture, return_tensors="pt", **settings)
    except Exception as error:  # of any kind: settings may contradict each other
        return f"an error ({type(error).__name__}: {error}), unlike"
    theirs = {name: made[name] for name in ours if name in made}
    if _POSITIONS in theirs:  # patches without a position pad the image
        there = (theirs[_POSITIONS][0] >= 0).all(-1)
        theirs = {name: value[:, there] for name, value in theirs.items()}
    for name, value in ours.items():
        found = theirs.get(name)
        if found is None or found.shape != value.shape:
            shape = "none" if found is None else "x".join(map(str, found.shape))
            return f"{name} of {shape}, unlike the {'x'.join(map(str, value.shape))} of"
        if not torch.equal(found.to(value.dtype), value):
            by = float((found.double() - value.double()).abs().max())
            return f"{name} that differ by up to {by:.3g} from those of"
    return ""


def _causes(ours: dict[str, torch.Tensor], picture: npt.NDArray[np.uint8], processor: Any) -> Iterator[str]:
    """Yields each setting without which, at its default, the processor would make ours."""
    defaults = type(processor)().to_dict()
    for name, value in processor.to_dict().items():
        known = name in defaults and defaults[name] != value
        if known and not _difference(ours, picture, processor, **{name: defaults[name]}):
            yield f"{name} {value}"
