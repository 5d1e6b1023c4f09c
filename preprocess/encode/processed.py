"""Encodes a conversation with the model's own processor (``--processor``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.families.processor import PER_TOKEN, TENSORS, ProcessorFamily
from vlmdata.families.tensors import JoinError, record_of
from vlmdata.media.error import MediaError
from vlmdata.media.resize import SizeRequest
from vlmdata.preprocess.chat.render import Rendered
from vlmdata.preprocess.chat.targets import TargetSpans, Tokens
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, ImagePart
from vlmdata.preprocess.encode.image import size_request, used_pixels
from vlmdata.preprocess.encode.sample import SampleItem, Views, WeightedTokens
from vlmdata.preprocess.processor.running import NotFollowed
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted


@dataclass(frozen=True, eq=False)
class ProcessedSample:
    """What a processor made of a conversation.

    Attributes:
        family: Tells its tensors.
        tokens: Its tokens with their weights.
        positions: int32 (axes, L).
        tensors: Its tensors by name.
        origins: Facts of the image files.
        files: The image files.
    """

    family: ProcessorFamily
    tokens: WeightedTokens
    positions: npt.NDArray[np.int32]
    tensors: Mapping[str, torch.Tensor]
    origins: Sequence[Mapping[str, Any]]
    files: Sequence[bytes]

    def items(self, kept: int) -> list[Views]:
        """Returns the item with its tensors, if it has any; only the first ``kept`` tokens stay."""
        if not self.tensors:
            return []
        rules = {rule.name: rule for rule in self.family.tensors}
        values = {
            name: value[:, :kept] if name in rules and rules[name].rule == PER_TOKEN else value
            for name, value in self.tensors.items()
        }
        try:
            record = record_of(self.family, values)
        except JoinError as error:
            raise RowRejected(Reason.UNSUITABLE_ITEM, str(error)) from error
        grid = (1, len(record), 1)
        size = (grid[1] * self.family.patch_size, grid[2] * self.family.patch_size)
        origin = {
            "tensors": {name: list(value.shape) for name, value in values.items()},
            "images": [dict(each) for each in self.origins],
        }
        return [(SampleItem(record, grid, size, 0, origin, b"".join(self.files), whole=False, kind=TENSORS),)]


def processed(
    conversation: Conversation, rendered: Rendered, tokens: Tokens, spans: TargetSpans, config: PreprocessConfig
) -> ProcessedSample:
    """Runs the processor on the rendered text and the images of a conversation.

    Args:
        conversation: The conversation.
        rendered: Its text, with a placeholder for each image.
        tokens: The tokens of that text.
        spans: Its targets.
        config: The options.

    Raises:
        RowRejected: SPECIAL_TOKEN_TEXT if data spells a token that the processor reads, UNSUITABLE_ITEM if the
            processor fails or its text cannot be followed, and the reasons of images that cannot be used.
    """
    family, processor = config.learned.family, config.learned
    parts = [part for part in conversation.media if isinstance(part, ImagePart)]
    _require_unforged(conversation, rendered, parts, processor.written)
    if not parts:
        ids = WeightedTokens(tokens.ids, spans.weights)
        return ProcessedSample(family, ids, family.position_ids(len(ids), _NONE, _NONE), {}, (), ())
    pixels, origins = [], []
    for part in parts:
        if size_request(part) != SizeRequest():
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{part.field}: the data asks for a size, and the processor sets the sizes of images. Drop min_pixels, "
                "max_pixels, resized_height and resized_width",
            )
        try:
            used, origin = used_pixels(part, config.image, part.field)
        except MediaError as error:
            raise RowRejected(error.reason, error.message) from error
        pixels.append(used)
        origins.append(origin)
    try:
        made = processor.runner.run(rendered.text, pixels)
        weights = made.weights(spans.weights, tokens.starts, tokens.ends)
        if not np.array_equal(made.ids[weights > 0], tokens.ids[spans.weights > 0]):
            raise NotFollowed("the tokens of its answers are not those of the rendered text")
        positions = processor.model.position_ids(made.ids, made.tensors)
    except (NotFollowed, JoinError) as error:
        raise RowRejected(Reason.UNSUITABLE_ITEM, f"the processor: {error}") from error
    except Exception as error:  # each processor has its own errors
        sizes = ", ".join(f"{each.shape[1]}x{each.shape[0]}" for each in pixels)
        what = f"{type(error).__name__}: {excerpt(str(error), 200)}"
        raise RowRejected(
            Reason.UNSUITABLE_ITEM, f"the processor fails for {counted(len(pixels), 'image')} ({sizes}): {what}"
        ) from error
    if positions.shape != (len(family.position_axes), len(made.ids)):
        raise RowRejected(
            Reason.UNSUITABLE_ITEM, f"the model counts positions {list(positions.shape)} for {len(made.ids)} tokens"
        )
    files = [part.data for part in parts]
    return ProcessedSample(family, WeightedTokens(made.ids, weights), positions, made.tensors, origins, files)


_NONE = np.zeros(0, np.int64)


def _require_unforged(
    conversation: Conversation, rendered: Rendered, parts: Sequence[ImagePart], written: frozenset[str]
) -> None:
    """Checks that data spells no token that the processor reads in the text, or writes for images."""
    forged = [rendered.text[start:end] for start, end in rendered.plain_spans] if parts else []
    forged += [token for token in sorted(written) for message in conversation.messages if token in message.text]
    if forged:
        raise RowRejected(
            Reason.SPECIAL_TOKEN_TEXT,
            f"the data spells the special token {forged[0]}, which the processor would take for one of its own",
        )
