"""3D rotary (MRoPE) positions of Qwen-VL sequences with images and videos.

Source: ``get_rope_index`` of the transformers models (Qwen2.5-VL, Qwen3-VL and Qwen3.5 agree on images). Unlike it,
this module locates items one by one from their token counts, so two images with no token between them remain two
images.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from vlmdata.wording import counted


def locate_blocks(
    input_ids: npt.NDArray[np.integer],
    token_counts: npt.NDArray[np.int64],
    block_ids: npt.NDArray[np.integer],
    placeholders: Collection[int],
) -> npt.NDArray[np.int64]:
    """Finds the index of the first token of each block of placeholders.

    Args:
        input_ids: (L,) token ids, placeholders expanded.
        token_counts: int64 (N,), tokens of each block, in order of appearance.
        block_ids: (sum of ``token_counts``,), ids of the tokens of all blocks, one after another.
        placeholders: Ids of the placeholders of all kinds, and of the tokens between them.

    Returns:
        int64 (N,), ascending.

    Raises:
        ValueError: If the placeholders are not exactly N contiguous runs of these ids.
    """
    counts, ids = token_counts, np.asarray(input_ids)
    found = np.flatnonzero(np.isin(ids, list(placeholders)))
    if len(found) != counts.sum():
        raise ValueError(
            f"{counted(len(found), 'image token')} in the sequence, but the image grids ({len(counts)}) need "
            f"{counts.sum()}"
        )
    if len(counts) == 0:
        return np.zeros(0, dtype=np.int64)
    ends = np.cumsum(counts)
    if len(wrong := np.flatnonzero(ids[found] != block_ids)):
        at, block = int(found[wrong[0]]), int(np.searchsorted(ends, wrong[0], side="right"))
        raise ValueError(f"token {at} is id {ids[at]}, but block {block} has id {block_ids[wrong[0]]} there")
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
    starts: npt.NDArray[np.integer],
    grids: npt.NDArray[np.integer],
    merge_size: int,
    steps: npt.NDArray[np.number] | None = None,
) -> npt.NDArray[np.int32]:
    """Computes the positions of a sequence with blocks of placeholders at known places.

    Text advances t, h and w together by one. A block that starts at position p, such as an image, has t = p,
    h = p + row and w = p + column over its merged grid; text continues at p + max(rows, columns). A grid with t > 1 is
    t consecutive temporal patches within one block (t = p + step x patch, whose fraction is dropped).

    Args:
        length: Tokens in the sequence.
        starts: (N,) index of each block's first token, ascending.
        grids: (N, 3), patches along t, h, w; h and w are multiples of ``merge_size``.
        merge_size: Patches per side that merge into one token.
        steps: (N,) step of t of each block; None is 1. Fractions are multiplied in float32, as in the models.

    Returns:
        int32 (3, length).
    """
    positions = np.empty((3, length), dtype=np.int32)
    cursor, position = 0, 0
    sizes = np.asarray(grids, dtype=np.int64).reshape(-1, 3).tolist()
    each_step = [1] * len(sizes) if steps is None else np.asarray(steps).tolist()
    for start, (frames, height, width), step in zip(np.asarray(starts).tolist(), sizes, each_step, strict=True):
        text = start - cursor
        positions[:, cursor:start] = np.arange(position, position + text, dtype=np.int32)
        position += text
        rows, columns = height // merge_size, width // merge_size
        cursor = start + frames * rows * columns
        block = positions[:, start:cursor].reshape(3, frames, rows, columns)
        number = np.float32 if isinstance(step, float) else np.int32
        times = (np.arange(frames, dtype=number) * number(step)).astype(np.int32)
        block[0] = position + times[:, None, None]
        block[1] = position + np.arange(rows, dtype=np.int32)[None, :, None]
        block[2] = position + np.arange(columns, dtype=np.int32)[None, None, :]
        position += max(rows, columns)
    positions[:, cursor:] = np.arange(position, position + length - cursor, dtype=np.int32)
    return positions
