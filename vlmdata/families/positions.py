"""3D rotary (MRoPE) positions of Qwen-VL sequences with images.

Source: ``get_rope_index`` of the transformers models (Qwen2.5-VL, Qwen3-VL and Qwen3.5 agree on images). Unlike it,
this module locates images one by one from their token counts, so two images with no token between them remain two
images.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlmdata.wording import counted


def locate_images(
    input_ids: npt.NDArray[np.integer], token_counts: npt.NDArray[np.int64], image_token_id: int
) -> npt.NDArray[np.int64]:
    """Finds the index of the first token of each image.

    Args:
        input_ids: (L,) token ids, image placeholders expanded.
        token_counts: int64 (N,), tokens of each image, in order of appearance.
        image_token_id: Id of ``<|image_pad|>``.

    Returns:
        int64 (N,), ascending.

    Raises:
        ValueError: If the image tokens are not exactly N contiguous runs of these sizes.
    """
    counts = token_counts
    found = np.flatnonzero(np.asarray(input_ids) == image_token_id)
    if len(found) != counts.sum():
        raise ValueError(
            f"{counted(len(found), 'image token')} in the sequence, but the image grids ({len(counts)}) need "
            f"{counts.sum()}"
        )
    if len(counts) == 0:
        return np.zeros(0, dtype=np.int64)
    ends = np.cumsum(counts)
    starts = ends - counts
    broken = np.flatnonzero(found[ends - 1] - found[starts] != counts - 1)
    if len(broken):
        image = int(broken[0])
        raise ValueError(
            f"image {image}: its {counted(int(counts[image]), 'token')} are not contiguous in the sequence"
        )
    return np.asarray(found[starts], dtype=np.int64)


def mrope_position_ids(
    length: int,
    image_starts: npt.NDArray[np.integer],
    image_grid_thw: npt.NDArray[np.integer],
    merge_size: int,
) -> npt.NDArray[np.int32]:
    """Computes the positions of a sequence with images at known places.

    Text advances t, h and w together by one. An image that starts at position p has t = p, h = p + row and
    w = p + column over its merged grid; text continues at p + max(rows, columns). A grid with t > 1 is t
    consecutive frames within one block (t = p + frame).

    Args:
        length: Tokens in the sequence.
        image_starts: (N,) index of each image's first token, ascending.
        image_grid_thw: (N, 3), patches along t, h, w; h and w are multiples of ``merge_size``.
        merge_size: Patches per side that merge into one token.

    Returns:
        int32 (3, length).
    """
    positions = np.empty((3, length), dtype=np.int32)
    cursor, position = 0, 0
    grids = np.asarray(image_grid_thw, dtype=np.int64).reshape(-1, 3).tolist()
    for start, (frames, height, width) in zip(np.asarray(image_starts).tolist(), grids, strict=True):
        text = start - cursor
        positions[:, cursor:start] = np.arange(position, position + text, dtype=np.int32)
        position += text
        rows, columns = height // merge_size, width // merge_size
        cursor = start + frames * rows * columns
        block = positions[:, start:cursor].reshape(3, frames, rows, columns)
        block[0] = position + np.arange(frames, dtype=np.int32)[:, None, None]
        block[1] = position + np.arange(rows, dtype=np.int32)[None, :, None]
        block[2] = position + np.arange(columns, dtype=np.int32)[None, None, :]
        position += max(rows, columns)
    positions[:, cursor:] = np.arange(position, position + length - cursor, dtype=np.int32)
    return positions
