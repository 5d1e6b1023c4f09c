"""A sample as arrays, passed from the encoder to the shard writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.config import PreprocessConfig
from preprocess.conversation import Columns
from vlmdata.families import Family
from vlmdata.families.blocks import Blocks
from vlmdata.format.schema import Sample
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.media.codecs import IMAGE, ItemShape


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image or a video as stored.

    Attributes:
        patches: uint8 (R, bytes per patch): one row per patch and temporal copy.
        grid: Patches along t, h, w.
        size: (height, width) in pixels, as stored.
        tokens: Number of placeholder tokens.
        origin: Data of the file: width, height, format, and mode and normalisation steps, or frames and times.
        file: The file; of a video that the data has as frames, their files joined.
        view: Number of the picture among those of its image.
        whole: Whether it shows all of the image.
        kind: Kind of the item.
        copies: Temporal copies of each patch that are stored.
        step: Step of the first axis of positions from one temporal patch of a block to the next.
    """

    patches: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]
    size: tuple[int, int]
    tokens: int
    origin: Mapping[str, Any]
    file: bytes
    view: int = 0
    whole: bool = True
    kind: str = IMAGE
    copies: int = 1
    step: int = 1

    @property
    def shape(self) -> ItemShape:
        """Kind, grid and copies."""
        return ItemShape(self.kind, self.grid, self.copies)


#: The pictures of an image, of which each is an item.
type Views = tuple[EncodedImage, ...]


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample ready for the shard writer.

    Attributes:
        length: True length.
        input_ids: int32 (L,), L a multiple of ``pad_multiple``.
        loss_mask: uint8 (L,).
        position_ids: int32 (k, L), k the family's axes of positions.
        images: Per image and video, its patches, grid and origin.
        image_starts: First token of each.
        target_turns: Assistant turns that are targets; 0 for a document.
        truncated: Whether the end was truncated, so that the last answer or the document has no end token.
        loss_weights: float32 (L,), 0 if ``loss_mask`` is 0; None if all targets weigh 1.
        turn_weights: Weight of each assistant turn; empty if all turns that ``train_turns`` includes weigh 1.
        patch_bytes: Bytes per patch.
        dropped_reasoning: Assistant turns whose reasoning the template left out. Of samples of one turn, that turn.
        drops_last_reasoning: Whether the last turn is one of them.
        unlike_inference: Whether a learned turn follows another text than at inference.
        columns: Facts that the recipe attached.
    """

    length: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    position_ids: npt.NDArray[np.int32]
    images: tuple[EncodedImage, ...]
    image_starts: tuple[int, ...]
    target_turns: int
    truncated: bool
    loss_weights: npt.NDArray[np.float32] | None
    turn_weights: tuple[float, ...]
    patch_bytes: int
    dropped_reasoning: int = 0
    drops_last_reasoning: bool = False
    unlike_inference: bool = False
    columns: Columns = field(default_factory=dict)

    @property
    def image_grid_thw(self) -> npt.NDArray[np.int32]:
        """int32 (N, 3)."""
        return np.array([image.grid for image in self.images], dtype=np.int32).reshape(-1, 3)

    @property
    def patches(self) -> list[npt.NDArray[np.uint8]]:
        """The patches of each image; one empty array for a sample without images."""
        return [image.patches for image in self.images] or [np.zeros((0, self.patch_bytes), dtype=np.uint8)]

    def to_sample(self, key: str) -> Sample:
        """Returns the sample as a reader sees it, with the patches of all images joined."""
        patches = np.concatenate(self.patches)
        return Sample(
            key,
            self.length,
            self.input_ids,
            self.loss_mask,
            self.position_ids,
            self.image_grid_thw,
            patches,
            self.loss_weights,
            tuple(image.shape for image in self.images),
        )


@dataclass(frozen=True, eq=False)
class WeightedTokens:
    """True tokens with their loss weights.

    Attributes:
        ids: int64 (L,).
        weights: float32 (L,), 0 off target.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, span: slice) -> WeightedTokens:
        return WeightedTokens(self.ids[span], self.weights[span])

    def with_items(self, items: Sequence[Views], family: Family, info: TokenizerInfo) -> WeightedTokens:
        """Expands the placeholder of each image to one per merged patch of its views, and those of videos alike."""
        counts: list[int] = []
        for views in items:
            if views[0].kind == IMAGE:
                counts.append(sum(view.tokens for view in views))
            else:
                counts += blocks_of(views, family, info).counts.tolist()
        repeats = np.ones(len(self.ids), dtype=np.int64)
        repeats[np.isin(self.ids, [item.token for item in info.items.values()])] = counts
        return WeightedTokens(np.repeat(self.ids, repeats), np.repeat(self.weights, repeats))


def blocks_of(images: Sequence[EncodedImage], family: Family, info: TokenizerInfo) -> Blocks:
    """Returns the blocks of placeholders of images and videos."""
    tokens = {kind: item.token for kind, item in info.items.items()}
    return Blocks.of(family, [(image.kind, image.grid) for image in images], tokens, [image.step for image in images])


def finish_sample(
    tokens: WeightedTokens,
    views: Sequence[Views],
    config: PreprocessConfig,
    info: TokenizerInfo,
    *,
    target_turns: int = 0,
    truncated: bool = False,
    turn_weights: tuple[float, ...] = (),
) -> EncodedSample:
    """Pads a sample's tokens and computes their positions."""
    length, family, images = len(tokens), config.model_family, tuple(chain.from_iterable(views))
    blocks = blocks_of(images, family, info)
    starts = blocks.locate(tokens.ids)
    padded = -(-length // config.pad_multiple) * config.pad_multiple
    input_ids = np.full(padded, info.pad, dtype=np.int32)
    input_ids[:length] = tokens.ids
    loss_weights = np.zeros(padded, dtype=np.float32)
    loss_weights[:length] = tokens.weights
    loss_mask = (loss_weights > 0).astype(np.uint8)
    position_ids = np.zeros((len(family.position_axes), padded), dtype=np.int32)
    position_ids[:, :length] = family.position_ids(length, starts, blocks.grids, blocks.steps)
    return EncodedSample(
        length=length,
        input_ids=input_ids,
        loss_mask=loss_mask,
        position_ids=position_ids,
        images=images,
        image_starts=tuple(starts[blocks.firsts].tolist()),
        target_turns=target_turns,
        truncated=truncated,
        loss_weights=None if np.array_equal(loss_weights, loss_mask) else loss_weights,
        turn_weights=turn_weights,
        patch_bytes=family.patch_bytes,
    )
