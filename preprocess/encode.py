"""From a conversation to the arrays of a sample. Pure: no files, no state that outlives a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.chat.agreement import encode_turns
from preprocess.chat.render import Renderer
from preprocess.chat.targets import TargetSpans, target_spans
from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.config import ImageConfig, Overlong, PreprocessConfig, TrainTurns
from preprocess.conversation import Conversation, ImagePart
from preprocess.images.bounds import target_size
from preprocess.images.decode import DecodedImage, decode_image
from preprocess.images.resize import resize_image
from preprocess.reject import RowRejected, excerpt
from preprocess.weights import turn_weights
from vlmdata.format.ledger import Reason
from vlmdata.format.schema import PATCH_BYTES, PATCH_SIZE, Sample
from vlmdata.patches import patchify
from vlmdata.positions import image_token_counts, locate_images, mrope_position_ids


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image as it is stored.

    Attributes:
        patches: uint8 (P, 768).
        grid: Patches along t, h, w.
        origin: What the file held: width, height, mode, format, normalisation steps.
    """

    patches: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]
    origin: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample ready for the shard writer.

    Attributes:
        length: True length.
        input_ids: int32 (L,), L a multiple of ``pad_multiple``.
        loss_mask: uint8 (L,).
        position_ids: int32 (3, L).
        images: Per image, its patches, grid and origin.
        image_starts: First token of every image.
        target_turns: Assistant turns that are targets.
        truncated: Whether the last answer was cut.
        loss_weights: float32 (L,), 0 where ``loss_mask`` is; None if all targets weigh 1.
        turn_weights: Weight of each assistant turn; empty if all that ``train_turns`` chooses weigh 1.
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

    @property
    def image_grid_thw(self) -> npt.NDArray[np.int32]:
        """int32 (N, 3)."""
        return np.array([image.grid for image in self.images], dtype=np.int32).reshape(-1, 3)

    def to_sample(self, key: str) -> Sample:
        """The sample a reader will see, with the patches of all images joined."""
        empty = np.zeros((0, PATCH_BYTES), dtype=np.uint8)
        patches = np.concatenate([empty, *(image.patches for image in self.images)])
        return Sample(
            key,
            self.length,
            self.input_ids,
            self.loss_mask,
            self.position_ids,
            self.image_grid_thw,
            patches,
            self.loss_weights,
        )


class Encoder:
    """Turns conversations into samples under one configuration.

    Attributes:
        config: The configuration.
        tokenizer: The tokenizer.
        renderer: Applies its chat template.
    """

    def __init__(self, config: PreprocessConfig, tokenizer: ChatTokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, config.special_text)

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Encodes one conversation.

        Raises:
            RowRejected: With the reason, whatever is wrong with it.
        """
        if self.config.strict and conversation.unknown:
            keys = excerpt(", ".join(conversation.unknown), 400)
            raise RowRejected(
                Reason.UNKNOWN_KEYS,
                f"keys that the recipe does not know: {keys}. --strict rejects such rows; drop the keys, or leave "
                "--strict out.",
            )
        _check_turns(conversation)
        weights = turn_weights(conversation, self.config.train_turns)
        _check_answers(conversation, weights)
        # Text first: it is cheap, and a row it rejects needs no image decoded.
        ids, spans = self._encode_text(conversation, weights)
        images = tuple(encode_image(part, self.config.image, part.field) for part in conversation.images)
        return self._assemble(ids, spans, images)

    def _encode_text(
        self, conversation: Conversation, weights: tuple[float, ...]
    ) -> tuple[npt.NDArray[np.int64], TargetSpans]:
        """Token ids with one placeholder per image, and the targets among them."""
        rendered, tokens, turns = encode_turns(self.renderer, conversation)
        return tokens.ids, target_spans(tokens, turns, weights, self.config.train_think, rendered.text)

    def _assemble(
        self, ids: npt.NDArray[np.int64], spans: TargetSpans, images: tuple[EncodedImage, ...]
    ) -> EncodedSample:
        """Expands placeholders, cuts or refuses what is too long, pads, and computes positions."""
        grids = np.array([image.grid for image in images], dtype=np.int64).reshape(-1, 3)
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[ids == self.tokenizer.info.image] = image_token_counts(grids)
        full_ids, weights = np.repeat(ids, repeats), np.repeat(spans.weights, repeats)
        length, truncated = len(full_ids), False
        if length > self.config.max_length:
            grown = length - len(ids)  # all images stand before the last answer, or truncation is refused
            length = self._truncated_length(length, spans.last[0] + grown, spans.last[1] + grown, len(images))
            full_ids, weights, truncated = full_ids[:length], weights[:length], True
        chosen = spans.turn_weights if self.config.train_turns is TrainTurns.ALL else spans.turn_weights[-1:]
        starts = locate_images(full_ids, grids, self.tokenizer.info.image)
        padded = -(-length // self.config.pad_multiple) * self.config.pad_multiple
        input_ids = np.full(padded, self.tokenizer.info.pad, dtype=np.int32)
        input_ids[:length] = full_ids
        loss_weights = np.zeros(padded, dtype=np.float32)
        loss_weights[:length] = weights
        loss_mask = (loss_weights > 0).astype(np.uint8)
        position_ids = np.zeros((3, padded), dtype=np.int32)
        position_ids[:, :length] = mrope_position_ids(length, starts, grids)
        return EncodedSample(
            length=length,
            input_ids=input_ids,
            loss_mask=loss_mask,
            position_ids=position_ids,
            images=images,
            image_starts=tuple(starts.tolist()),
            target_turns=spans.turns,
            truncated=truncated,
            loss_weights=None if np.array_equal(loss_weights, loss_mask) else loss_weights,
            turn_weights=() if set(chosen) == {1.0} else spans.turn_weights,
        )

    def _truncated_length(self, length: int, start: int, stop: int, images: int) -> int:
        """Where to cut: within the last answer ``[start, stop)``, which must end the sequence."""
        most = self.config.max_length
        what = f"{length} tokens ({images} images), over --max-length {most}"
        if self.config.overlong is Overlong.REJECT:
            raise RowRejected(Reason.OVERLONG, what)
        if stop != length:
            raise RowRejected(Reason.OVERLONG, f"{what}, and no learned answer ends the sample that could be cut")
        if most <= start:
            raise RowRejected(Reason.OVERLONG, f"{what}: the {start} tokens before the last answer alone fill it")
        return most


def encode_image(part: ImagePart, config: ImageConfig, what: str) -> EncodedImage:
    """Decodes, normalises, resizes and cuts an image into patches.

    Raises:
        RowRejected: With the reason.
    """
    decoded = decode_image(part.data, config.max_source_pixels, what)
    source_height, source_width = decoded.pixels.shape[:2]
    height, width = target_size(source_height, source_width, part, config, what)
    patches = patchify(resize_image(decoded.pixels, height, width))
    return EncodedImage(patches, (1, height // PATCH_SIZE, width // PATCH_SIZE), _origin(decoded))


def _origin(decoded: DecodedImage) -> dict[str, Any]:
    width, height = decoded.file_size
    return {
        "format": decoded.file_format,
        "mode": decoded.mode,
        "width": width,
        "height": height,
        "normalised": list(decoded.steps),
    }


def _check_turns(conversation: Conversation) -> None:
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if not answers:
        roles = ", ".join(message.role for message in conversation.messages) or "none"
        raise RowRejected(Reason.NO_ASSISTANT_TURN, f"no assistant turn to learn from; roles: {roles}")
    for number, message in enumerate(answers, start=1):
        if any(message.images):
            raise RowRejected(Reason.UNSUPPORTED_CONTENT, f"assistant turn {number} of {len(answers)} holds an image")


def _check_answers(conversation: Conversation, weights: tuple[float, ...]) -> None:
    """A turn that is learned must say something; any other may be empty."""
    answers = [message for message in conversation.messages if message.role == "assistant"]
    for number, (message, weight) in enumerate(zip(answers, weights, strict=True), start=1):
        if weight and not message.text.strip() and not message.tool_calls:
            raise RowRejected(Reason.EMPTY_ANSWER, f"assistant turn {number} of {len(answers)} has no text")
