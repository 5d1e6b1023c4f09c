"""The on-disk contract: what a sample is, which tar members hold it, and the format's version.

Prose for readers of other languages and tools: ``docs/data-format.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.media.codecs import REGISTRY, codec_feature

if TYPE_CHECKING:
    import torch

FORMAT_NAME = "vlmdata"
#: MAJOR.MINOR. A reader refuses another MAJOR; a higher MINOR only adds what old readers may ignore.
SCHEMA_VERSION = "1.1"
IMAGES, LOSS_WEIGHTS, DOCUMENTS = "images", "loss-weights", "documents"
#: The only kind of item so far. Video items will be a feature, so that readers of images alone refuse them.
IMAGE = "image"

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.parquet"
LEDGER_NAME = "rejected.jsonl"
TOKENIZER_DIR = "tokenizer"
#: Only in datasets whose rows name image files by path.
IMAGE_FILES_NAME = "image_files.parquet"
#: Where the manifest's ``source`` counts these files and has the hash of their list.
IMAGE_FILES = "image_files"

METADATA_MEMBER = "json"
#: Instead of ``patches.npy`` in samples with items that a codec encoded: their stored bytes, one after another.
ITEMS_MEMBER = "items.bin"

_SAMPLE_DIGITS = 3
_KEY = re.compile(r"(?P<row>\d{9,})(-(?P<sample>\d{3,}))?", re.ASCII)


def supported_features() -> frozenset[str]:
    """What this reader understands.

    A writer lists the features it used in the manifest. A reader refuses any it does not know, so video items or
    another codec can come without a new MAJOR.
    """
    return frozenset({IMAGES, LOSS_WEIGHTS, DOCUMENTS, *map(codec_feature, REGISTRY)})


@dataclass(frozen=True)
class Member:
    """One array of a sample: a tar member ``<key>.<name>.npy``.

    Attributes:
        name: Field name, the same in :class:`Sample` and in the tar.
        dtype: Little-endian numpy dtype of the stored array.
        meaning: One line for documentation and ``vlmdata inspect``.
        feature: None if every sample has the member. Otherwise some samples have it, and their dataset lists this
            feature in its manifest.
    """

    name: str
    dtype: np.dtype[np.generic]
    meaning: str
    feature: str | None = None

    @property
    def suffix(self) -> str:
        """Member name after ``<key>.``."""
        return f"{self.name}.npy"


#: All members in the order in which a sample's are stored. What is read per token stands together.
ALL_MEMBERS: tuple[Member, ...] = (
    Member("input_ids", np.dtype("<i4"), "(L,) token ids, padded at the end"),
    Member("loss_mask", np.dtype("|u1"), "(L,) 1 where the token is a training target"),
    Member("loss_weights", np.dtype("<f4"), "(L,) weight of each token in the loss; 0 off target", LOSS_WEIGHTS),
    Member("position_ids", np.dtype("<i4"), "(3, L) MRoPE positions: t, h, w; 0 on padding"),
    Member("image_grid_thw", np.dtype("<i4"), "(N, 3) patches per image along t, h, w"),
    Member("patches", np.dtype("|u1"), "(P, bytes per patch) pixels of all images in merge-block order"),
)
#: The members that every sample has (``items.bin`` may stand in for ``patches``), and those that some samples have.
MEMBERS = tuple(member for member in ALL_MEMBERS if member.feature is None)
OPTIONAL_MEMBERS = tuple(member for member in ALL_MEMBERS if member.feature is not None)
MEMBER_BY_NAME = {member.name: member for member in ALL_MEMBERS}


@dataclass(frozen=True, eq=False)
class Sample:
    """One training sample. All arrays are read-only; from a dataset they are views of the mapped shard.

    ``L`` is the padded length, ``N`` the number of images, ``P = sum(t*h*w)`` the number of vision patches.

    Attributes:
        key: Unique within the dataset; the tar members' common stem.
        length: True length in tokens; ``input_ids[length:]`` is padding.
        input_ids: int32 (L,).
        loss_mask: uint8 (L,), 1 where the token itself is to be predicted (unshifted).
        position_ids: int32 (3, L), rows t, h, w, starting from 0; padding holds 0.
        image_grid_thw: int32 (N, 3), in patches of the family.
        patches: uint8 (P, bytes per patch), columns (C, patch, patch), rows in merge-block order.
        loss_weights: float32 (L,), weight of each token in the loss: above 0 where ``loss_mask`` is 1, 0 elsewhere.
            None if all targets weigh 1.
    """

    key: str
    length: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    position_ids: npt.NDArray[np.int32]
    image_grid_thw: npt.NDArray[np.int32]
    patches: npt.NDArray[np.uint8]
    loss_weights: npt.NDArray[np.float32] | None = None

    @property
    def num_targets(self) -> int:
        """How many tokens the loss is taken over."""
        return int(self.loss_mask.sum())

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays of the members that the sample has, by name, in the order they are stored."""
        arrays = {member.name: getattr(self, member.name) for member in ALL_MEMBERS}
        return {name: array for name, array in arrays.items() if array is not None}

    def to_torch(self) -> dict[str, torch.Tensor]:
        """The arrays without padding, as tensors of their own, in the dtypes that frameworks expect.

        Returns:
            By name: input_ids int64 (length,), loss_mask bool (length,), loss_weights float32 (length,) if the sample
            has them, position_ids int64 (3, length), image_grid_thw int64 (N, 3), patches uint8 (P, bytes per patch).
        """
        import torch

        dtypes = {"loss_mask": np.bool_, "loss_weights": np.float32, "patches": np.uint8}
        tensors = {}
        for name, array in self.arrays().items():
            own = array if name in ("image_grid_thw", "patches") else array[..., : self.length]
            tensors[name] = torch.from_numpy(own.astype(dtypes.get(name, np.int64)))
        return tensors


def shard_name(shard: int) -> str:
    """File name of a shard: six digits, so that ``shard-{000000..000041}.tar`` names a whole dataset."""
    return f"shard-{shard:06d}.tar"


def sample_key(source_row: int, sample: int | None = None, of: int = 1) -> str:
    """Key of a sample: nine digits of its source row, and its number in the row's list if the row gave a list.

    Keys hold no dot, as WebDataset demands. Those of one row sort as strings in the order of the list.

    Args:
        source_row: The source row.
        sample: Number within the row's list, from 0; None for a row that gave one sample without a list.
        of: Length of the list.
    """
    if sample is None:
        return f"{source_row:09d}"
    width = max(_SAMPLE_DIGITS, len(str(of - 1)))
    return f"{source_row:09d}-{sample:0{width}d}"


def parse_key(key: str) -> tuple[int, int] | None:
    """The source row and the number within the row's list (-1 without a list) that a key names; None if it is none."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return int(match["row"]), -1 if match["sample"] is None else int(match["sample"])
