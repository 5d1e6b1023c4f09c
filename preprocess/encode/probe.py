"""Tests a tokenizer and its chat template on small conversations before the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from jinja2 import Environment

from vlmdata.errors import SourceError, VlmdataError
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.families.processor import PROCESSOR
from vlmdata.format.index_row import IndexRow
from vlmdata.format.schema import sample_key
from vlmdata.format.shard import ItemPlace, Placement
from vlmdata.media.image_file import image_file
from vlmdata.preprocess.chat.template_arguments import require_arguments
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import EncodedSample, Encoder
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.registry import problem_of
from vlmdata.verify.sample import SampleRules, audit_sample

_REMEDY = (
    "Give the tokenizer of a model of the family {family}, or a copy of this one with chat_template.jinja or "
    "tokenizer.json corrected."
)
#: Template functions and filters whose result varies between calls, with a description of the result.
_IMPURE = {"strftime_now": "the date", "lipsum": "random text", "random": "a random choice"}


def require_usable(tokenizer: ChatTokenizer, config: PreprocessConfig) -> None:
    """Encodes known conversations, with and without images, and audits the samples as in ``verify``.

    A text-only template passes, since text rows need no images.

    Raises:
        SourceError: Naming the tokenizer, the problem and the remedy.
    """
    for name, what in _impure_names(tokenizer.hf.chat_template):
        raise SourceError(
            f"--tokenizer {tokenizer.info.name}: its chat template uses {name}, which writes {what}, so the same rows "
            "would give different tokens each time. Replace it by a constant in a copy of its chat_template.jinja."
        )
    try:
        require_arguments(config.chat_template_kwargs, tokenizer.templates)
    except ValueError as error:
        raise SourceError(f"--chat-template-kwargs: {error}") from error
    least = config.model_family.smallest_image
    bounds = config.image if config.family == PROCESSOR else ImageConfig(least, 4 * least)
    config = dataclasses.replace(config, image=bounds, train_turns=TrainTurns.ALL, max_length=1 << 20, pad_multiple=16)
    encoder, remedy = Encoder(config, tokenizer), _REMEDY.format(family=config.family)
    rules = SampleRules(tokenizer.info, config.pad_multiple, True, config.model_family)
    for with_image in (False, True):
        conversation = _talk(())
        try:
            if with_image:
                conversation = _talk((_image(*config.model_family.image_size(32, 32, least, 4 * least)),))
            sample = encoder.encode(conversation)
        except RowRejected as error:
            if conversation.media and not _knows_images(encoder, conversation):
                continue
            if _is_usable_without_arguments(conversation, encoder):
                given = json.dumps(config.chat_template_kwargs, ensure_ascii=False)
                raise SourceError(f"--chat-template-kwargs {given}: {error.message.rstrip('.')}.") from error
            raise SourceError(f"--tokenizer {tokenizer.info.name}: {error.message.rstrip('.')}. {remedy}") from error
        except VlmdataError:
            raise
        except Exception as error:  # the family's rules may be the user's
            if config.family in FAMILIES:
                raise
            home = type(config.model_family).__module__
            raise SourceError(
                f"--family {config.family}: its rules cannot encode a trial sample: {problem_of(error, home)}."
            ) from error
        findings = audit_sample(sample.to_sample(sample_key(0)), _index_row(sample), rules)
        if findings:
            check, message = findings[0]
            raise SourceError(
                f"--tokenizer {tokenizer.info.name}: `vlmdata verify` would find a fault in every sample: {check}: "
                f"{message}. {remedy}"
            )


def _talk(images: tuple[ImagePart, ...]) -> Conversation:
    """Builds two exchanges with distinct texts, and images in both questions, within and before the text."""
    return Conversation(
        (
            Message("user", (TextPart("Which colour is "), *images, TextPart(" this square?"))),
            Message("assistant", (TextPart("It is black."),)),
            Message("user", (*images, *images, TextPart("And these two?"))),
            Message("assistant", (TextPart("Just the same."),)),
        )
    )


def _image(height: int, width: int) -> ImagePart:
    """Returns a black image. Its size should need no resizing, because that would import torch in this process."""
    return ImagePart(image_file(np.zeros((height, width, 3), np.uint8), "png"), "the probe's image")


def _knows_images(encoder: Encoder, conversation: Conversation) -> bool:
    """True if the template writes image placeholders. A text-only one may reject images or print them as text."""
    try:
        return encoder.tokenizer.image_text in encoder.renderer.render(conversation).text
    except RowRejected as error:
        return error.reason is not Reason.TEMPLATE_ERROR


def _is_usable_without_arguments(conversation: Conversation, encoder: Encoder) -> bool:
    """True if arguments of the template are given, and it writes the conversation without them."""
    if not encoder.config.chat_template_kwargs:
        return False
    without = dataclasses.replace(encoder.config, chat_template_kwargs={})
    try:
        Encoder(without, encoder.tokenizer).encode(conversation)
    except RowRejected:
        return False
    return True


def _index_row(sample: EncodedSample) -> IndexRow:
    items = tuple(ItemPlace(item.shape, 0, 0, 0, 0) for item in sample.items)
    return IndexRow(
        key=sample_key(0),
        source_row=0,
        shard=0,
        placement=Placement(0, 0, 0, 0, 0, {}, 0, items),
        length=sample.length,
        padded_length=len(sample.input_ids),
        num_targets=int(sample.loss_mask.sum()),
        target_turns=sample.target_turns,
        truncated=sample.truncated,
        item_starts=sample.item_starts,
    )


def _impure_names(template: Any) -> Iterator[tuple[str, str]]:
    """Yields the names in one or several templates whose value varies between calls."""
    for source in [template] if isinstance(template, str) else template.values():
        before = ""
        for _, kind, text in Environment().lex(source):
            # `random` is an ordinary name unless used as a filter.
            if kind == "name" and text in _IMPURE and (text != "random" or before == "|"):
                yield text, _IMPURE[text]
            if kind != "whitespace":
                before = text
