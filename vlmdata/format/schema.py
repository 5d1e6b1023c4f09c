"""The on-disk format: samples, their tar members, and the format version.

``docs/data-format.md`` documents it for other languages and tools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.families.processor import TENSORS
from vlmdata.media.codecs import IMAGE, REGISTRY, VIDEO, ItemShape, codec_feature

if TYPE_CHECKING:
    import torch

FORMAT_NAME = "vlmdata"
#: MAJOR.MINOR. A higher MINOR only adds data that old readers may ignore.
SCHEMA_VERSION = "2.0"
#: The MAJORs that are read. Of 1, ``format/earlier.py`` knows the names.
READ_MAJORS = ("1", "2")
LOSS_WEIGHTS, DOCUMENTS = "loss-weights", "documents"
#: Feature of datasets with items of a kind, by kind. A reader without it rejects them.
KIND_FEATURES = {IMAGE: "images", VIDEO: "videos", TENSORS: "tensors"}
#: Label of tokens that are no targets, as in PyTorch's losses.
IGNORE_INDEX = -100

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.parquet"
LEDGER_NAME = "rejected.jsonl"
TOKENIZER_DIR = "tokenizer"
#: Records of an unfinished run about its shards.
PROGRESS_DIR = ".progress"
#: Present only if rows name image files by path.
IMAGE_FILES_NAME = "image_files.parquet"
#: The rows of the source by content, from which a later run knows what has changed. No reader of samples needs it.
ROWS_NAME = "rows.parquet"
#: The list of a dataset's versions, and the folder of those after the first. Absent if there is only the first.
VERSIONS_NAME, VERSIONS_DIR = "versions.json", "versions"
#: ``source.kind`` of a dataset that ``vlmdata join`` made; its ``config`` lists the joined ones' under this name.
JOINED = "joined"
#: ``source.kind`` of a dataset that ``vlmdata select`` made of another one, whose source is under ``source.dataset``.
SELECTED = "selected"
#: In the metadata of a sample with several images: the item of each box or point, then its numbers in the text.
BOX_IMAGES = "box_images"
#: In the metadata of a sample, with ``--variants``: ``number`` of the variant, from 0, or why there is ``none``.
VARIANT = "variant"
#: In the metadata of a sample that ``--overlong`` shortened before it was encoded: what it took, by name.
SHORTENED = "shortened"
#: Field of the manifest's ``source`` with the number of these files and the hash of their list.
IMAGE_FILES = "image_files"

METADATA_MEMBER = "json"
#: Field of the metadata with the conversation or document that a sample was made of, as text.
KEPT = "conversation"
#: Replaces ``patches.npy`` in samples with encoded items: their stored bytes, one after another.
ITEMS_MEMBER = "items.bin"

_SAMPLE_DIGITS = 3
_KEY = re.compile(r"(?P<row>\d{9,})(-(?P<sample>\d{3,}))?", re.ASCII)


def supported_features() -> frozenset[str]:
    """Returns the features that this reader supports.

    A writer lists the features that it used in the manifest. A reader rejects unknown features, so another kind of
    items or another codec can be added without a new MAJOR.
    """
    return frozenset({*KIND_FEATURES.values(), LOSS_WEIGHTS, DOCUMENTS, *map(codec_feature, REGISTRY)})


@dataclass(frozen=True)
class Member:
    """One array of a sample: a tar member ``<key>.<name>.npy``."""

    name: str  # field name, the same in :class:`Sample` and in the tar
    dtype: np.dtype[np.generic]  # little-endian numpy dtype of the stored array
    meaning: str  # one line for documentation and ``vlmdata inspect``
    #: None if every sample has the member. Otherwise only some samples have it, and the manifest lists this feature.
    feature: str | None = None

    @property
    def suffix(self) -> str:
        """Member name after ``<key>.``."""
        return f"{self.name}.npy"


#: All members in storage order. Per-token members are adjacent.
ALL_MEMBERS: tuple[Member, ...] = (
    Member("input_ids", np.dtype("<i4"), "(L,) token ids, padded at the end"),
    Member("loss_mask", np.dtype("|u1"), "(L,) 1 if the token is a training target"),
    Member("loss_weights", np.dtype("<f4"), "(L,) weight of each token in the loss; 0 off target", LOSS_WEIGHTS),
    Member("position_ids", np.dtype("<i4"), "(k, L) positions on the family's axes, such as t, h, w; 0 on padding"),
    Member("image_grid_thw", np.dtype("<i4"), "(N, 3) patches per image along t, h, w"),
    Member("video_grid_thw", np.dtype("<i4"), "(V, 3) patches per video along t, h, w", KIND_FEATURES[VIDEO]),
    Member("patches", np.dtype("|u1"), "(R, bytes per patch) pixels of all items in merge-block order"),
)
#: The members of every sample (``items.bin`` may replace ``patches``), and those of only some samples.
MEMBERS = tuple(member for member in ALL_MEMBERS if member.feature is None)
OPTIONAL_MEMBERS = tuple(member for member in ALL_MEMBERS if member.feature is not None)
MEMBER_BY_NAME = {member.name: member for member in ALL_MEMBERS}


@dataclass(frozen=True, eq=False)
class Sample:
    """One training sample. All arrays are read-only; from a dataset they are views of the mapped shard.

    ``L`` is the padded length, ``N`` the number of images, ``V`` of videos, ``R`` the pixel rows of both: the number of
    vision patches, times the temporal copies that are stored (1 of images).

    Attributes:
        key: Unique within the dataset; the common stem of the tar members.
        length: True length in tokens; ``input_ids[length:]`` is padding.
        input_ids: int32 (L,).
        loss_mask: uint8 (L,), 1 if the token itself is a target (unshifted).
        position_ids: int32 (k, L), k the family's axes of positions, from 0; 0 on padding.
        image_grid_thw: int32 (N, 3), in patches of the family.
        patches: uint8 (R, bytes per patch), columns (C, patch, patch), rows in merge-block order; the copies of a
            patch are adjacent. Images and videos are in the order of ``items``.
        loss_weights: float32 (L,), weight of each token in the loss: above 0 if ``loss_mask`` is 1, else 0.
            None if all targets weigh 1.
        items: Kind, grid and copies of each image and video, in order.
        video_grid_thw: int32 (V, 3), in patches of the family. None without videos.
    """

    key: str
    length: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    position_ids: npt.NDArray[np.int32]
    image_grid_thw: npt.NDArray[np.int32]
    patches: npt.NDArray[np.uint8]
    loss_weights: npt.NDArray[np.float32] | None = None
    items: tuple[ItemShape, ...] = ()
    video_grid_thw: npt.NDArray[np.int32] | None = None

    @property
    def grid_thw(self) -> npt.NDArray[np.int32]:
        """Grids of all images and videos, in order: int32 (N + V, 3)."""
        if self.video_grid_thw is None:
            return self.image_grid_thw
        of_kind = {IMAGE: iter(self.image_grid_thw), VIDEO: iter(self.video_grid_thw)}
        return np.array([next(of_kind[item.kind]) for item in self.items], np.int32).reshape(-1, 3)

    @property
    def num_targets(self) -> int:
        """Number of targets."""
        return int(self.loss_mask.sum())

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the arrays of the sample's members, by name, in storage order."""
        arrays = {member.name: getattr(self, member.name) for member in ALL_MEMBERS}
        return {name: array for name, array in arrays.items() if array is not None}

    def to_torch(self) -> dict[str, torch.Tensor]:
        """Copies the arrays, without padding, to tensors in the dtypes that frameworks expect.

        Returns:
            Tensors by name: input_ids int64 (length,), loss_mask bool (length,), loss_weights float32 (length,) if the
            sample has them, position_ids int64 (k, length), image_grid_thw int64 (N, 3), video_grid_thw int64 (V, 3) if
            the sample has videos, patches uint8 (R, bytes per patch).
        """
        import torch

        dtypes = {"loss_mask": np.bool_, "loss_weights": np.float32, "patches": np.uint8}
        tensors = {}
        for name, array in self.arrays().items():
            own = array if name in ("image_grid_thw", "video_grid_thw", "patches") else array[..., : self.length]
            tensors[name] = torch.from_numpy(own.astype(dtypes.get(name, np.int64)))
        return tensors


def shard_name(shard: int) -> str:
    """File name of a shard. It has six digits, so that ``shard-{000000..000041}.tar`` matches a whole dataset."""
    return f"shard-{shard:06d}.tar"


def sample_key(source_row: int, sample: int | None = None, of: int = 1) -> str:
    """Returns the key of a sample: nine digits of its source row, and its number in the row's list, if any.

    Keys contain no dot, as WebDataset requires. Keys of a row sort as strings in the order of the list.

    Args:
        source_row: The source row.
        sample: Number within the row's list, from 0; None for a row without a list.
        of: Length of the list.
    """
    if sample is None:
        return f"{source_row:09d}"
    width = max(_SAMPLE_DIGITS, len(str(of - 1)))
    return f"{source_row:09d}-{sample:0{width}d}"


def parse_key(key: str) -> tuple[int, int] | None:
    """Returns source row and list number (-1 without a list) of a key; None if it is not a key."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return int(match["row"]), -1 if match["sample"] is None else int(match["sample"])
