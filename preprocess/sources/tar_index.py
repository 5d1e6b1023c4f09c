"""The index of a tar, as Megatron-Energon makes it: the offsets of all samples and of the end, as 64-bit numbers.

An index is older than its tar if the tar was made again. So each sample that is read is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from preprocess.sources.data_files import DataFile
from vlmdata.errors import SourceError

#: Ending of an index, appended to the full name of its tar.
INDEX_ENDING = ".idx"
_BLOCK_BYTES = 512


@dataclass(frozen=True)
class TarIndex:
    """An index. Cheap to pickle: each process reads it once."""

    file: DataFile
    tar: DataFile

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 (samples + 1,): where samples begin, and the last ends; a SourceError if they cannot be the tar's."""
        return _read(self)[0]

    @property
    def digest(self) -> str:
        """Hash of the index."""
        return _read(self)[1]

    def require_sample(self, begins: int, ends: int) -> None:
        """Raises a SourceError unless a sample in the index has its first header and its end at these bytes."""
        offsets = self.offsets
        at = int(np.searchsorted(offsets, begins))
        if at + 1 >= len(offsets) or offsets[at] != begins:
            raise self.wrong(f"the tar has a sample at byte {begins}, which it does not name")
        if offsets[at + 1] != ends:
            raise self.wrong(
                f"after the sample at byte {begins}, the next one or the end is at byte {ends} of the tar, and "
                f"{offsets[at + 1]} in the index"
            )

    def wrong(self, problem: str) -> SourceError:
        """Returns the error for an index that does not describe its tar."""
        return SourceError(
            f"SOURCE {self.file.place}: it is not the index of {self.tar.place} ({self.tar.size} bytes): {problem}. "
            "Remove the index, or make it again with `energon prepare`."
        )


@lru_cache(maxsize=16)
def _read(index: TarIndex) -> tuple[npt.NDArray[np.int64], str]:
    with index.file.open(index.file.size, counting=True) as stream:
        data = stream.read()
    if len(data) % 8 or not data:
        raise index.wrong(f"{len(data)} bytes are no list of 64-bit numbers")
    offsets = np.frombuffer(data, "<u8").astype(np.int64)
    if (np.diff(offsets) <= 0).any() or (offsets % _BLOCK_BYTES).any() or not 0 <= offsets[0] <= offsets[-1]:
        raise index.wrong(f"its numbers are no ascending multiples of {_BLOCK_BYTES}")
    if offsets[-1] > index.tar.size:
        raise index.wrong(f"it ends at byte {offsets[-1]}")
    return offsets, xxhash.xxh3_128_hexdigest(data)
