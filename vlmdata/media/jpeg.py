"""Decodes plain JPEG files with torchvision's extension, which gives Pillow's pixels in less time.

Both use libjpeg-turbo. torchvision decodes to three bytes per pixel in one piece of memory, which the resizing reads
uncopied. Pillow decodes to four bytes, in several pieces for large images.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmdata.media.c_library import captured_stderr

if TYPE_CHECKING:
    import torch

type _Decode = Callable[[torch.Tensor, int], torch.Tensor]

_END = b"\xff\xd9"
#: torchvision's ``ImageReadMode.RGB``.
_RGB = 3
#: Sides of the images of the trial: not multiples of a block, so that edges are compared too.
_TRIAL = (45, 67)
#: Pillow's names of chroma subsampling: 4:4:4, 4:2:2, 4:2:0.
_SUBSAMPLINGS = (0, 1, 2)
_loading = threading.Lock()


def decode_plain_jpeg(data: bytes, image: Image.Image) -> npt.NDArray[np.uint8] | None:
    """Decodes a JPEG file if it is plain: sequential, of three components, and complete.

    Args:
        data: The file's bytes.
        image: The same file, opened by Pillow and not loaded.

    Returns:
        uint8 (H, W, 3), C-contiguous, equal to Pillow's pixels. None if only Pillow can decode the file, or tell
        what is wrong with it.
    """
    if image.format != "JPEG" or image.mode != "RGB" or "progressive" in image.info or not data.endswith(_END):
        return None
    with _loading:
        decode = _decoder()
    if decode is None:
        return None
    try:
        pixels = _decoded(decode, data)
    except RuntimeError:  # a damaged file, which Pillow may read or name the damage of
        return None
    return pixels if pixels.shape == (image.height, image.width, 3) else None


def _decoded(decode: _Decode, data: bytes) -> npt.NDArray[np.uint8]:
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is not written to
        file = torch.from_numpy(np.frombuffer(data, np.uint8))
    with captured_stderr() as written:
        made = decode(file, _RGB)
        if written():  # libjpeg warns of damage, after which two versions of it may give different pixels
            raise RuntimeError("the file is damaged")
    # Planes whose memory is that of pixels: the transposition is a view.
    return np.ascontiguousarray(made.permute(1, 2, 0).numpy())


@cache
def _decoder() -> _Decode | None:
    """Returns torchvision's decoder; None if there is none, or its libjpeg gives other pixels than Pillow's."""
    import torch

    # The package itself takes a second to import, most of it for torch's compiler.
    package = find_spec("torchvision")
    places = [] if package is None else package.submodule_search_locations or []
    extensions = [file for place in places for file in sorted(Path(place).glob("image*.so"))]
    try:
        for file in extensions:
            torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
        decode: _Decode = torch.ops.image.decode_jpeg
        equal = all(np.array_equal(_decoded(decode, data), pixels) for data, pixels in _trials())
    except (OSError, RuntimeError, AttributeError):
        return None
    return decode if equal else None


def _trials() -> Iterator[tuple[bytes, npt.NDArray[np.uint8]]]:
    """Yields small JPEG files, with Pillow's pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (*_TRIAL, 3), np.uint8)
    for subsampling in _SUBSAMPLINGS:
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", quality=75, subsampling=subsampling)
        yield file.getvalue(), np.asarray(Image.open(file))
