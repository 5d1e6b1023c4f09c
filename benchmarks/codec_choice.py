"""Ways to store a resized picture without loss: bytes and CPU time of each. Behind docs/decisions/0006.

    python benchmarks/codec_choice.py receipts.parquet [more.parquet …]

Pictures are those of the parquet files' column ``image``, and photographs that the wheel of scikit-image ships, resized
by the default bounds. CPU time of this thread, the least of several rounds, so a busy machine matters little.
Packages that are not installed are left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from hardware import hardware

# The folder of benchmarks has a preprocess.py of its own.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.media.codecs import IMAGE, Item, ItemShape, codec
from vlmdata.media.decode import decode_image
from vlmdata.media.resize import resize_image
from vlmdata.preprocess.config import ImageConfig

Array = npt.NDArray[np.uint8]
ROUNDS = 5


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """How a picture (3, H, W) is stored, and got back as patches."""

    name: str
    encode: Callable[[Array], bytes]
    decode: Callable[[bytes, Array, Shape], None]


def zstd(level: int, *, of_planes: bool) -> Way:
    """Arrow's Zstandard over the patches, or over the planes of the picture."""
    compressor = pa.Codec("zstd", compression_level=level)

    def encode(picture: Array) -> bytes:
        data = picture if of_planes else FAMILY.patchify(picture)
        return bytes(compressor.compress(data.reshape(-1), asbytes=True))

    def decode(stored: bytes, out: Array, shape: Shape) -> None:
        data = np.frombuffer(pa.decompress(stored, decompressed_size=out.nbytes, codec="zstd"), np.uint8)
        if of_planes:
            FAMILY.patchify(data.reshape(shape), out)
        else:
            out.reshape(-1)[:] = data

    return Way(f"{'planes' if of_planes else 'patches'}, zstd {level}", encode, decode)


def ways() -> Iterator[Way]:
    """All that is compared."""
    for level in (1, 3):
        yield zstd(level, of_planes=False)
        yield zstd(level, of_planes=True)
    yield of_codec("zstd")
    if find_spec("imagecodecs"):
        yield of_codec("jxl")
        for effort in (2, 3):
            yield jxl(effort)


def of_codec(name: str) -> Way:
    """A codec of vlmdata."""
    found = codec(name)

    def decode(stored: bytes, out: Array, shape: Shape) -> None:
        found.decode(stored, ItemShape(IMAGE, grid_of(shape)), FAMILY, out)

    return Way(
        f"codec {name}",
        lambda picture: bytes(
            found.encode(Item(FAMILY.patchify(picture), ItemShape(IMAGE, grid_of(picture.shape)), FAMILY))
        ),
        decode,
    )


def jxl(effort: int) -> Way:
    """JPEG XL with another effort."""
    import imagecodecs

    def encode(picture: Array) -> bytes:
        grey = np.array_equal(picture[0], picture[1]) and np.array_equal(picture[0], picture[2])
        seen = picture[0] if grey else np.ascontiguousarray(picture.transpose(1, 2, 0))
        return bytes(imagecodecs.jpegxl_encode(seen, lossless=True, effort=effort, numthreads=1))

    decode = of_codec("jxl").decode
    return Way(f"JPEG XL, effort {effort}", encode, decode)


def grid_of(shape: Shape) -> tuple[int, int, int]:
    """The grid of a picture (3, H, W)."""
    return (1, shape[1] // FAMILY.patch_size, shape[2] // FAMILY.patch_size)


def resized(data: bytes) -> Array:
    """A file as preprocessing resizes it, (3, H, W)."""
    decoded = decode_image(data, ImageConfig.max_source_pixels)
    height, width = FAMILY.image_size(*decoded.pixels.shape[:2], FAMILY.min_pixels, FAMILY.max_pixels)
    return resize_image(decoded.pixels, height, width)


def photographs() -> list[bytes]:
    """Colour photographs in scikit-image's wheel."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        return []
    names = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg", "hubble_deep_field.jpg")
    return [(Path(spec.origin).parent / "data" / name).read_bytes() for name in names]


def measure(title: str, files: list[bytes]) -> None:
    """Prints a table."""
    pictures = [resized(data) for data in files]
    raw = sum(picture.nbytes for picture in pictures)
    print(f"\n{len(pictures)} {title}, {raw / 1e6:.1f} MB raw, files of {sum(map(len, files)) / 1e6:.1f} MB\n")
    print("| stored as | raw / stored | encode, ms | decode, ms |\n|---|---|---|---|")
    for way in ways():
        begun = time.thread_time()
        stored = [way.encode(picture) for picture in pictures]
        encoding = time.thread_time() - begun
        rounds = []
        for _ in range(ROUNDS):
            spent = 0.0
            for data, picture in zip(stored, pictures, strict=True):
                out = np.ones((picture.nbytes // FAMILY.patch_bytes, FAMILY.patch_bytes), np.uint8)
                begun = time.thread_time()
                way.decode(data, out, picture.shape)
                spent += time.thread_time() - begun
                assert np.array_equal(out, FAMILY.patchify(picture))
            rounds.append(spent / len(pictures))
        ratio = raw / sum(map(len, stored))
        print(
            f"| {way.name} | {ratio:.2f} | {encoding / len(pictures) * 1e3:.1f} | {min(rounds) * 1e3:.2f} |", flush=True
        )


def main() -> None:
    """Measures."""
    print(hardware("pyarrow", "numpy"))
    images = [row["bytes"] for path in sys.argv[1:] for row in pq.read_table(path).column("image").to_pylist()]
    if images:
        measure("scans", images[:: max(1, len(images) // 18)])
    if found := photographs():
        measure("photographs", found)


if __name__ == "__main__":
    main()
