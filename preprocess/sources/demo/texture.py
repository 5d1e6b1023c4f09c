"""Cheap textures, all in mode L: smooth maps, grain and table tops, from random bytes and Pillow's integer resizing.

Floating-point functions over whole images are avoided: they are slower, and their last bit depends on the processor.
"""

from random import Random

import numpy as np
from PIL import Image

from preprocess.sources.demo.geometry import Size

Colour = tuple[int, int, int]
TABLES: dict[str, tuple[Colour, Colour]] = {
    "wood": ((58, 34, 18), (176, 124, 78)),
    "pale wood": ((140, 108, 74), (214, 188, 150)),
    "slate": ((34, 38, 44), (92, 96, 102)),
    "cloth": ((20, 32, 56), (66, 84, 118)),
    "marble": ((150, 150, 152), (240, 238, 234)),
    "plain": ((96, 92, 86), (168, 162, 154)),
}
"""Darkest and lightest colour of each kind of surface."""


def smooth_map(noise: np.random.Generator, size: Size, cells: Size, low: int, high: int) -> Image.Image:
    """A map of ``size`` pixels, random at ``cells`` grid points from ``low`` to ``high``, smooth between."""
    grid = noise.integers(low, high + 1, (cells[1], cells[0]), dtype=np.uint8)
    return Image.fromarray(grid).resize(size, Image.Resampling.BILINEAR)


def profile(values: list[int], size: Size, vertical: bool) -> Image.Image:
    """A map that changes along one axis only: ``values`` from top to bottom, or from left to right."""
    strip = Image.new("L", (1, len(values)) if vertical else (len(values), 1))
    strip.putdata(values)
    return strip.resize(size, Image.Resampling.BILINEAR)


def grain(noise: np.random.Generator, size: Size, sigma: float) -> Image.Image:
    """Noise around 128, near normal with standard deviation ``sigma`` grey levels (at most 10)."""
    width, height = size
    # A quarter is drawn; the rest repeats it at other offsets, which nobody sees.
    count = -(-width * height // 4)
    draws = np.frombuffer(noise.bytes(3 * count), np.uint8).reshape(3, count)
    # The sum of three uniform bytes has standard deviation 128 and is near enough to normal.
    total = draws[0].astype(np.int16) + draws[1] + draws[2] - np.int16(382)
    total *= np.int16(round(sigma * 8))
    total >>= 10
    quarter = (total + np.int16(128)).astype(np.uint8)
    shifts = noise.integers(0, count, 3)
    whole = np.concatenate([quarter, *(np.roll(quarter, int(shift)) for shift in shifts)])
    return Image.fromarray(whole[: width * height].reshape(height, width))


def table_top(rng: Random, noise: np.random.Generator, size: Size) -> tuple[Image.Image, str]:
    """A surface to lay a receipt on, and its kind, a key of ``TABLES``."""
    width, height = size
    kind = rng.choice(sorted(TABLES))
    if "wood" in kind:
        cells = (max(2, width // 260), max(2, height // 5))
        if rng.random() < 0.4:
            cells = (max(2, width // 5), max(2, height // 260))
    elif kind in ("cloth", "slate"):
        cells = (max(2, width // 3), max(2, height // 3))
    else:
        cells = (4, 5)
    return smooth_map(noise, size, cells, 30, 255), kind
