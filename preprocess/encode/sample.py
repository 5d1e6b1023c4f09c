"""A sample as arrays, with the loss weights of its tokens, passed from the encoder to the shard writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.blocks import Blocks
from vlmdata.format.schema import Sample
from vlmdata.format.shard import EncodedItem
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.media.codecs import IMAGE, VIDEO, ItemShape
from vlmdata.preprocess.config import PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Columns, Conversation, Document
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason

#: Weights other than 0 are within these bounds. Gradients are multiplied by the weights in the network and divided by
#: their sum at the end of the step. The bounds leave 30 decimal places on either side in float32 and bfloat16 (1e-38 to
#: 3e38). Only ratios of weights matter, so this excludes no sensible weights.
LEAST, MOST = 1e-8, 1e8


@dataclass(frozen=True, eq=False)
class SampleItem:
    """An image or a video as stored."""

    patches: npt.NDArray[np.uint8]  # uint8 (R, bytes per patch): one row per patch and temporal copy
    grid: tuple[int, int, int]  # patches along t, h, w
    size: tuple[int, int]  # (height, width) in pixels, as stored
    tokens: int  # in the sequence
    origin: Mapping[str, Any]  # data of the file: size, format, normalisation steps, or frames and times
    file: bytes  # the file; of a video that the data has as frames, their files joined
    view: int = 0  # number of the picture among those of its image
    whole: bool = True  # whether it shows all of the image
    kind: str = IMAGE  # kind of the item
    copies: int = 1  # temporal copies of each patch that are stored
    step: float = 1  # of the first axis of positions, from one temporal patch of a block to the next
    stored: EncodedItem | None = None  # its bytes in a dataset that they are taken from; ``patches`` may be empty then
    stored_file_bytes: int = 0  # bytes of the file, of an item that is taken from a dataset

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.file) if self.stored is None else self.stored_file_bytes

    @property
    def shape(self) -> ItemShape:
        """Kind, grid and copies."""
        return ItemShape(self.kind, self.grid, self.copies)


#: The pictures of an image, of which each is an item.
type Views = tuple[SampleItem, ...]


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample ready for the shard writer."""

    length: int  # true length
    input_ids: npt.NDArray[np.int32]  # int32 (L,), L a multiple of ``pad_multiple``
    loss_mask: npt.NDArray[np.uint8]  # uint8 (L,)
    position_ids: npt.NDArray[np.int32]  # int32 (k, L), k the family's axes of positions
    items: tuple[SampleItem, ...]  # images and videos
    item_starts: tuple[int, ...]  # first token of each
    target_turns: int  # assistant turns that are targets; 0 for a document
    truncated: bool  # whether the end was truncated, so that the last answer or the document has no end token
    loss_weights: npt.NDArray[np.float32] | None  # float32 (L,), 0 if ``loss_mask`` is 0; None if all targets weigh 1
    #: Weight of each assistant turn; empty if all turns that ``train_turns`` includes weigh 1.
    turn_weights: tuple[float, ...]
    patch_bytes: int  # bytes per patch
    #: Assistant turns whose reasoning the template left out. Of samples of one turn, that turn.
    dropped_reasoning: int = 0
    drops_last_reasoning: bool = False  # whether the last turn is one of them
    unlike_inference: bool = False  # whether a learned turn follows another text than at inference
    columns: Columns = field(default_factory=dict)  # facts that the recipe attached
    #: Arguments of the chat template that the row gave.
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    box_images: tuple[tuple[int, ...], ...] = ()  # see :class:`Conversation`
    variant: Mapping[str, int | str] = field(default_factory=dict)  # see :class:`Conversation`
    shortened: Mapping[str, int] = field(default_factory=dict)  # see :class:`Conversation`

    @property
    def image_grid_thw(self) -> npt.NDArray[np.int32]:
        """Grids of the images, int32 (N, 3)."""
        return self._grids(IMAGE)

    @property
    def video_grid_thw(self) -> npt.NDArray[np.int32] | None:
        """Grids of the videos, int32 (V, 3); None without videos."""
        return self._grids(VIDEO) if any(item.kind == VIDEO for item in self.items) else None

    def _grids(self, kind: str) -> npt.NDArray[np.int32]:
        return np.array([item.grid for item in self.items if item.kind == kind], np.int32).reshape(-1, 3)

    @property
    def patches(self) -> list[npt.NDArray[np.uint8]]:
        """The patches of each item; one empty array for a sample without items."""
        return [item.patches for item in self.items] or [np.zeros((0, self.patch_bytes), dtype=np.uint8)]

    def to_sample(self, key: str) -> Sample:
        """Returns the sample as a reader sees it, with the patches of all items joined."""
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
            tuple(item.shape for item in self.items),
            self.video_grid_thw,
        )


@dataclass(frozen=True, eq=False)
class WeightedTokens:
    """True tokens with their loss weights."""

    ids: npt.NDArray[np.int64]  # int64 (L,)
    weights: npt.NDArray[np.float32]  # float32 (L,), 0 off target

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, span: slice) -> WeightedTokens:
        return WeightedTokens(self.ids[span], self.weights[span])

    def with_items(self, items: Sequence[Views], family: Family, info: TokenizerInfo) -> WeightedTokens:
        """Expands the placeholder of each image to the tokens of its views, and those of videos alike."""
        if not items:
            return self
        blocks = [blocks_of(views, family, info) for views in items]
        counts: list[int] = []
        for views, own in zip(items, blocks, strict=True):
            counts += [int(own.counts.sum())] if views[0].kind == IMAGE else own.counts.tolist()
        written = np.isin(self.ids, [item.token for item in info.items.values()])
        repeats = np.ones(len(self.ids), dtype=np.int64)
        repeats[written] = counts
        ids = np.repeat(self.ids, repeats)
        ids[np.repeat(written, repeats)] = np.concatenate([own.ids for own in blocks])
        return WeightedTokens(ids, np.repeat(self.weights, repeats))


def blocks_of(items: Sequence[SampleItem], family: Family, info: TokenizerInfo) -> Blocks:
    """Returns the blocks of placeholders of images and videos."""
    kinds = [(item.kind, item.grid) for item in items]
    return Blocks.of(family, kinds, info.placeholders, [item.step for item in items])


def finish_sample(
    tokens: WeightedTokens,
    views: Sequence[Views],
    config: PreprocessConfig,
    info: TokenizerInfo,
    *,
    target_turns: int = 0,
    truncated: bool = False,
    turn_weights: tuple[float, ...] = (),
    positions: npt.NDArray[np.int32] | None = None,
) -> EncodedSample:
    """Pads a sample's tokens and computes their positions, unless they are given, (axes, L)."""
    length, family, items = len(tokens), config.model_family, tuple(chain.from_iterable(views))
    if positions is None and (items or np.isin(tokens.ids, info.all_placeholders).any()):
        blocks = blocks_of(items, family, info)
        starts = blocks.locate(tokens.ids)
        grids, firsts = blocks.grids, blocks.firsts
        steps: npt.NDArray[np.number] | None = blocks.steps
    else:  # text alone, as in most chats
        starts = firsts = np.zeros(0, np.int64)
        steps = None
        grids = np.zeros((0, 3), np.int64)
    padded = -(-length // config.pad_multiple) * config.pad_multiple
    input_ids = np.full(padded, info.pad, dtype=np.int32)
    input_ids[:length] = tokens.ids
    loss_weights = np.zeros(padded, dtype=np.float32)
    loss_weights[:length] = tokens.weights
    loss_mask = (loss_weights > 0).astype(np.uint8)
    position_ids = np.zeros((len(family.position_axes), padded), dtype=np.int32)
    if positions is None:
        positions = family.position_ids(length, starts, grids, steps)
    position_ids[:, :length] = positions
    return EncodedSample(
        length=length,
        input_ids=input_ids,
        loss_mask=loss_mask,
        position_ids=position_ids,
        items=items,
        item_starts=tuple(starts[firsts].tolist()) if len(firsts) else (0,) * len(items),
        target_turns=target_turns,
        truncated=truncated,
        loss_weights=None if np.array_equal(loss_weights, loss_mask) else loss_weights,
        turn_weights=turn_weights,
        patch_bytes=family.patch_bytes,
    )


def turn_weights(conversation: Conversation, train_turns: TrainTurns) -> tuple[float, ...]:
    """Returns the target weight of each assistant turn; 0 if the turn is not learned.

    Returns:
        One float32 value per assistant turn: weight of the sample x weight of the turn, or 0.

    Raises:
        RowRejected: NO_TARGETS if no turn is learned; LOSS_WEIGHT if a weight is out of bounds.
    """
    answers = conversation.answers
    factor = float(conversation.loss_weight)
    weights = []
    for number, message in enumerate(answers, start=1):
        chosen = train_turns is TrainTurns.ALL or number == len(answers)
        own = 1.0 if message.loss_weight is None else float(message.loss_weight)
        weight = factor * own if chosen else 0.0
        meant = chosen and factor > 0 and own > 0  # a product may round to 0
        if meant and not LEAST <= weight <= MOST:
            raise RowRejected(
                Reason.LOSS_WEIGHT,
                f"the loss weight of assistant turn {number} of {len(answers)} is {weight:g} ({factor:g} of the sample "
                f"x {own:g} of the turn); it must be 0 or from {LEAST:g} to {MOST:g}. Only ratios of weights matter: "
                "multiply all of them by the same number",
            )
        weights.append(float(np.float32(weight)))
    if not any(weights):
        raise RowRejected(Reason.NO_TARGETS, _nothing_to_learn(conversation, len(answers), train_turns))
    return tuple(weights)


def document_weight(document: Document) -> float:
    """Returns the target weight of a document, as a float32 value.

    Raises:
        RowRejected: NO_TARGETS if the weight is 0; LOSS_WEIGHT if it is out of bounds.
    """
    weight = float(document.loss_weight)
    if weight == 0:
        raise RowRejected(Reason.NO_TARGETS, "nothing to learn: the loss weight of the document is 0")
    if not LEAST <= weight <= MOST:
        raise RowRejected(
            Reason.LOSS_WEIGHT,
            f"the loss weight of the document is {weight:g}; it must be 0 or from {LEAST:g} to {MOST:g}. Only ratios "
            "of weights matter: multiply all of them by the same number",
        )
    return float(np.float32(weight))


def _nothing_to_learn(conversation: Conversation, answers: int, train_turns: TrainTurns) -> str:
    if conversation.loss_weight == 0:
        return "nothing to learn: the loss weight of the sample is 0"
    if train_turns is TrainTurns.LAST:
        return "nothing to learn: the loss weight of the last assistant turn is 0, and only that turn is trained"
    if answers == 1:
        return "nothing to learn: the loss weight of the only assistant turn is 0"
    return f"nothing to learn: the loss weights of all {answers} assistant turns are 0"
