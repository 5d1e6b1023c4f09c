"""Measures samples without a limit on their length and without decoding their images (``--lengths``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.families.chat import IMAGE
from vlmdata.media.decode import header_size, shown_size
from vlmdata.media.error import MediaError
from vlmdata.media.resize import target_size
from vlmdata.preprocess.chat.agreement import blocks_in_text, require_reserved, up_to_answers
from vlmdata.preprocess.chat.render import Renderer
from vlmdata.preprocess.chat.targets import target_spans, tokenize
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, MediaPart, VideoPart
from vlmdata.preprocess.encode.encoder import Encoder, encode_turns, with_settings
from vlmdata.preprocess.encode.image import size_request, tokens_of
from vlmdata.preprocess.encode.sample import document_weight, turn_weights
from vlmdata.preprocess.encode.video import planned
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason


@dataclass(frozen=True, eq=False)
class SampleLength:
    """The length of a sample, as if no limit were set.

    Attributes:
        tokens: All of its tokens.
        targets: Positions of its targets, ascending, int64 (T,).
        images: Tokens of each of its images.
        halved: Tokens of the sample at half the largest number of pixels; None if that is not possible.
    """

    tokens: int
    targets: npt.NDArray[np.int64]
    images: tuple[int, ...]
    halved: int | None


class LengthMeter:
    """Measures the results of a recipe with the options of a run.

    Attributes:
        half: Half the largest number of pixels; None if the family or ``min_pixels`` does not allow it.
    """

    def __init__(self, encoder: Encoder):
        self._config = encoder.config
        self._encoder = encoder
        self._tokenizer = encoder.tokenizer
        self._renderer = Renderer(
            encoder.tokenizer, encoder.config.special_text, video_layout=encoder.config.video.layout
        )
        self._halved = _halved(encoder.config)
        self.half = None if self._halved is None else self._halved.image.max_pixels

    def measure(self, made: Conversation | Document) -> list[SampleLength | RowRejected]:
        """Returns the lengths of the samples that a recipe's result becomes; a document is one.

        Raises:
            RowRejected: If none of it can be encoded.
        """
        if isinstance(made, Document):
            return [self._of_document(made)]
        conversation = self._encoder.as_text(made)
        assert isinstance(conversation, Conversation)
        conversation, plans = planned(with_settings(conversation, self._config), self._config)
        videos = {
            part: plans[part].token_count(self._config.model_family)
            for part in conversation.media
            if isinstance(part, VideoPart)
        }
        whole = self._config.train_turns is not TrainTurns.EACH
        learned = [up_to for answer, up_to in up_to_answers(conversation) if answer.loss_weight != 0]
        found: list[SampleLength | RowRejected] = []
        for each in [conversation] if whole else learned:
            try:
                found.append(self._of_conversation(each, videos))
            except RowRejected as error:
                found.append(error)
        return found

    def _of_conversation(self, conversation: Conversation, videos: Mapping[VideoPart, int]) -> SampleLength:
        weights = turn_weights(conversation, self._config.train_turns)
        for message, weight in zip(conversation.answers, weights, strict=True):
            if weight and not message.text.strip() and not message.tool_calls:
                raise RowRejected(Reason.EMPTY_ANSWER, "an assistant turn has no text")
        train_think = self._config.train_think
        rendered, tokens, turns = encode_turns(self._renderer, conversation, weights, train_think)
        spans = target_spans(tokens, turns, weights, train_think, rendered.text)
        return self._measured(tokens.ids, spans.weights > 0, conversation.media, videos)

    def _of_document(self, document: Document) -> SampleLength:
        if not document.text.strip():
            raise RowRejected(Reason.EMPTY_DOCUMENT, "no text to learn")
        document_weight(document)
        rendered = self._renderer.render_document(document)
        tokens = tokenize(self._tokenizer, rendered)
        require_reserved(rendered, tokens, self._tokenizer)
        learned = ~np.isin(tokens.ids, self._tokenizer.info.items[IMAGE].ids)
        learned[0] = False
        return self._measured(tokens.ids, learned, document.images, {})

    def _measured(
        self,
        ids: npt.NDArray[np.int64],
        learned: npt.NDArray[np.bool_],
        media: Sequence[MediaPart],
        videos: Mapping[VideoPart, int],
    ) -> SampleLength:
        images = {part: image_tokens_of(part, self._config) for part in media if isinstance(part, ImagePart)}
        counts: list[int] = []
        for part in media:
            total, blocks = images[part] if isinstance(part, ImagePart) else videos[part], blocks_in_text(part)
            counts += [total // blocks] * blocks
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[np.isin(ids, list(self._tokenizer.placeholders.values()))] = counts
        ends = np.cumsum(repeats)
        tokens, halved = int(ends[-1]), None
        if self._halved is not None:
            halved = tokens - sum(count - image_tokens_of(part, self._halved) for part, count in images.items())
        of_images = tuple(images[part] for part in media if isinstance(part, ImagePart))
        return SampleLength(tokens, (ends - repeats)[learned], of_images, halved)


def image_tokens_of(part: ImagePart, config: PreprocessConfig) -> int:
    """Returns the number of tokens of an image, from the header of its file.

    An image is decoded only if it has another number of tokens when it is turned as its EXIF may say.

    Raises:
        RowRejected: If the image cannot be used.
    """
    most = config.image.max_source_pixels
    try:
        width, height = header_size(part.data, most, part.field)
        if part.region is not None:  # of the image as it is shown
            return _tokens(part.region[3], part.region[2], part, config)
        tokens = _tokens(height, width, part, config)
        if width != height and tokens != _tokens(width, height, part, config):
            tokens = _tokens(*shown_size(part.data, most, part.field), part, config)
    except MediaError as error:
        raise RowRejected(error.reason, error.message) from error
    return tokens


def _tokens(height: int, width: int, part: ImagePart, config: PreprocessConfig) -> int:
    family = config.model_family
    bounds = config.image.bounds(family)
    views = family.views(height, width, target_size(height, width, size_request(part), bounds, family, part.field))
    return tokens_of(views, family)


def _halved(config: PreprocessConfig) -> PreprocessConfig | None:
    least, most = config.image.bounds(config.model_family)
    image: ImageConfig = dataclasses.replace(config.image, min_pixels=least, max_pixels=most // 2)
    try:
        image.bounds(config.model_family)
    except UsageError:
        return None
    return dataclasses.replace(config, image=image)
