"""Checks that decoded patches equal the stored ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import DatasetFormatError
from vlmdata.media.versions import pixel_libraries


def require_pixels(patches: npt.NDArray[np.uint8], expected: int, made_with: Mapping[str, str], what: str) -> None:
    """Compares the decoded patches of an item with their checksum.

    Args:
        patches: uint8 (P, bytes per patch), C-contiguous.
        expected: Their xxh3-64 at preprocessing.
        made_with: Versions of the libraries at preprocessing, by name.
        what: Shard, key and item, for messages.

    Raises:
        DatasetFormatError: If they differ; lists the libraries with different versions.
    """
    found = xxhash.xxh3_64_intdigest(patches)
    if found != expected:
        raise DatasetFormatError(
            f"{what}: decodes to other pixels than the dataset was made with: xxh3 of the patches is {found:016x}, "
            f"expected {expected:016x}. {_reason(made_with)}"
        )


def _reason(made_with: Mapping[str, str]) -> str:
    here = pixel_libraries()
    names = [name for name in made_with if made_with[name] != here.get(name)]
    if not names:
        return "It was made with the installed libraries. Run `vlmdata verify` on it to see how to repair it."
    listed = ", ".join(f"{name} {made_with[name]} (here {here.get(name, 'none')})" for name in names)
    return f"It was made with {listed}. Install these versions, or recreate it with the installed ones."
