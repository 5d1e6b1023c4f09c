"""Encodes the results of recipes to samples. Pure: no files, and no state between calls."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from preprocess.chat.agreement import encode_turns
from preprocess.chat.render import Renderer
from preprocess.chat.targets import TargetSpans, target_spans
from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.config import Overlong, PreprocessConfig, TrainTurns
from preprocess.conversation import Conversation, Document
from preprocess.encode.document import encode_document
from preprocess.encode.image import encode_images, image_tokens
from preprocess.encode.sample import EncodedImage, EncodedSample, WeightedTokens, finish_sample
from preprocess.encode.weights import turn_weights
from preprocess.reject import RowRejected, excerpt
from vlmdata.format.ledger import Reason
from vlmdata.wording import counted


class Encoder:
    """Encodes conversations and documents to samples with one configuration.

    Attributes:
        config: The configuration.
        tokenizer: The tokenizer.
        renderer: Applies its chat template.
    """

    def __init__(self, config: PreprocessConfig, tokenizer: ChatTokenizer):
        self.config = config
        self.tokenizer = tokenizer
        most = config.max_length if config.overlong == Overlong.REJECT else None
        self.renderer = Renderer(tokenizer, config.special_text, most)

    def encode_all(self, made: Conversation | Document) -> list[EncodedSample | RowRejected]:
        """Encodes a recipe's result to one sample, or to several for a split document.

        Raises:
            RowRejected: If nothing of it can be encoded.
        """
        if isinstance(made, Conversation):
            return [self.encode(made)]
        self._require_known_keys(made)
        return encode_document(made, self.renderer, self.config)

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Encodes one conversation.

        Raises:
            RowRejected: If the conversation cannot be encoded.
        """
        self._require_known_keys(conversation)
        _check_turns(conversation)
        weights = turn_weights(conversation, self.config.train_turns)
        _check_answers(conversation, weights)
        # Text first: it is cheap, and rejected rows need no image decoding.
        ids, spans = self._encode_text(conversation, weights)
        # Their sizes next: neither do samples that are too long.
        parts = conversation.images
        tokens = image_tokens(parts, self.config, more_than=self.config.max_length - len(ids) + len(parts))
        if tokens is not None:
            self._kept_length(len(ids) - len(parts) + tokens, len(ids), spans, len(parts))
        return self._assemble(ids, spans, encode_images(parts, self.config))

    def _require_known_keys(self, made: Conversation | Document) -> None:
        if self.config.strict and made.unknown:
            keys = excerpt(", ".join(made.unknown), 400)
            raise RowRejected(
                Reason.UNKNOWN_KEYS,
                f"keys that the recipe does not know: {keys}. --strict rejects such rows; drop the keys or omit "
                "--strict.",
            )

    def _encode_text(
        self, conversation: Conversation, weights: tuple[float, ...]
    ) -> tuple[npt.NDArray[np.int64], TargetSpans]:
        """Returns token ids with one placeholder per image, and their targets."""
        rendered, tokens, turns = encode_turns(self.renderer, conversation)
        return tokens.ids, target_spans(tokens, turns, weights, self.config.train_think, rendered.text)

    def _assemble(
        self, ids: npt.NDArray[np.int64], spans: TargetSpans, images: tuple[EncodedImage, ...]
    ) -> EncodedSample:
        """Expands placeholders, and truncates or rejects samples that are too long."""
        tokens = WeightedTokens(ids, spans.weights).with_images(images, self.tokenizer.info.image)
        length = len(tokens)
        if truncated := length > self.config.max_length:
            tokens = tokens[: self._kept_length(length, len(ids), spans, len(images))]
        chosen = spans.turn_weights if self.config.train_turns is TrainTurns.ALL else spans.turn_weights[-1:]
        return finish_sample(
            tokens,
            images,
            self.config,
            self.tokenizer.info,
            target_turns=spans.turns,
            truncated=truncated,
            turn_weights=() if set(chosen) == {1.0} else spans.turn_weights,
        )

    def _kept_length(self, length: int, text: int, spans: TargetSpans, images: int) -> int:
        """Returns the length of a sample that is too long once its last answer, which must end it, is truncated.

        Args:
            length: Its tokens.
            text: Its tokens with one for each image.
            spans: Its targets, in tokens of text.
            images: Number of its images.

        Raises:
            RowRejected: If it is not to be truncated, or cannot be.
        """
        grown = length - text  # all images are before the last answer, or truncation is rejected
        start, stop = spans.last[0] + grown, spans.last[1] + grown
        most = self.config.max_length
        what = f"{counted(length, 'token')} ({counted(images, 'image')}), over --max-length {most}"
        if self.config.overlong != Overlong.TRUNCATE:  # a conversation is not split
            split = "; only documents are split" if self.config.overlong == Overlong.SPLIT else ""
            raise RowRejected(Reason.OVERLONG, what + split)
        if stop != length:
            raise RowRejected(Reason.OVERLONG, f"{what}, and it does not end with a learned answer to truncate")
        if most <= start:
            raise RowRejected(Reason.OVERLONG, f"{what}: the {start} tokens before the last answer already fill it")
        return most


def _check_turns(conversation: Conversation) -> None:
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if not answers:
        roles = ", ".join(message.role for message in conversation.messages) or "none"
        raise RowRejected(Reason.NO_ASSISTANT_TURN, f"no assistant turn to learn from; roles: {roles}")
    for number, message in enumerate(answers, start=1):
        if any(message.images):
            raise RowRejected(Reason.UNSUPPORTED_CONTENT, f"assistant turn {number} of {len(answers)} holds an image")


def _check_answers(conversation: Conversation, weights: tuple[float, ...]) -> None:
    """Checks that learned turns are not empty; other turns may be."""
    answers = [message for message in conversation.messages if message.role == "assistant"]
    for number, (message, weight) in enumerate(zip(answers, weights, strict=True), start=1):
        if weight and not message.text.strip() and not message.tool_calls:
            raise RowRejected(Reason.EMPTY_ANSWER, f"assistant turn {number} of {len(answers)} has no text")
