"""Encodes the results of recipes to samples. Pure: no files, and no state between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlmdata.families.processor import PROCESSOR
from vlmdata.preprocess.chat.agreement import (
    blocks_in_text,
    is_unlike_inference,
    kind_of,
    remedy_for_calls,
    require_conversation,
    require_ids,
    require_reserved,
    up_to_answers,
)
from vlmdata.preprocess.chat.inference import with_prompts
from vlmdata.preprocess.chat.pieces import template_error
from vlmdata.preprocess.chat.reasoning import dropped_reasoning, require_no_marks
from vlmdata.preprocess.chat.render import Rendered, Renderer
from vlmdata.preprocess.chat.targets import TargetSpans, Tokens, Turn, find_turns, target_spans, token_over, tokenize
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, require_length
from vlmdata.preprocess.config import SHORTENING, Overlong, PreprocessConfig, TrainThink, TrainTurns
from vlmdata.preprocess.conversation import Conversation, Document, Message, TextPart
from vlmdata.preprocess.encode.document import encode_document
from vlmdata.preprocess.encode.grounding import with_grounding_as_text
from vlmdata.preprocess.encode.items import Plans, encode_items, item_tokens
from vlmdata.preprocess.encode.sample import EncodedSample, Views, WeightedTokens, finish_sample, turn_weights
from vlmdata.preprocess.encode.video import planned
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted, with_article


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
        most = config.max_length if config.overlong in {Overlong.REJECT, *SHORTENING} else None
        self.renderer = Renderer(tokenizer, config.special_text, most, config.video.layout)

    def as_text(self, made: Conversation | Document) -> Conversation | Document:
        """Returns a recipe's result with boxes, points and labels as text, in the convention of the family.

        Raises:
            RowRejected: See :func:`with_grounding_as_text`.
        """
        return with_grounding_as_text(made, self.config) if isinstance(made, Conversation) else made

    def encode_all(self, made: Conversation | Document) -> list[EncodedSample | RowRejected]:
        """Encodes a recipe's result to one sample, or to several for a split document or each turn of a conversation.

        Raises:
            RowRejected: If nothing of it can be encoded.
        """
        made = self.as_text(made)
        encoded: Sequence[EncodedSample | RowRejected]
        arguments = made.template_arguments if isinstance(made, Conversation) else {}
        boxes = made.box_images if isinstance(made, Conversation) else ()
        variant = made.variant if isinstance(made, Conversation) else {}
        if isinstance(made, Conversation):
            encoded = self._encode_each(made) if self.config.train_turns is TrainTurns.EACH else [self.encode(made)]
        else:
            self._require_known_keys(made)
            encoded = encode_document(made, self.renderer, self.config)
        return [
            each
            if isinstance(each, RowRejected)
            else dataclasses.replace(
                each,
                columns=made.columns,
                template_arguments=arguments,
                box_images=boxes,
                variant=variant,
                shortened=made.shortened,
            )
            for each in encoded
        ]

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Encodes one conversation to one sample; under ``--train-turns each``, to that of its last turn.

        Raises:
            RowRejected: If the conversation cannot be encoded.
        """
        self._require_known_keys(conversation)
        conversation = with_grounding_as_text(conversation, self.config)
        _check_turns(conversation)
        conversation = with_settings(conversation, self.config)
        return self._encode(*planned(conversation, self.config), [])

    def _encode_each(self, conversation: Conversation) -> list[EncodedSample | RowRejected]:
        """Encodes a sample for each learned turn: the conversation up to it. All share their images.

        Raises:
            RowRejected: If there is no turn to learn.
        """
        self._require_known_keys(conversation)
        _check_turns(conversation)
        conversation = with_settings(conversation, self.config)
        answers = list(up_to_answers(conversation))
        if conversation.loss_weight == 0 or all(answer.loss_weight == 0 for answer, _ in answers):
            turn_weights(conversation, TrainTurns.ALL)  # refuses it
        conversation, plans = planned(conversation, self.config)
        answers = list(up_to_answers(conversation))
        images: list[Views] = []
        made: list[EncodedSample | RowRejected] = []
        for number, (answer, up_to) in enumerate(answers, start=1):
            if answer.loss_weight == 0:
                continue
            try:
                _check_answers(conversation, tuple(float(n == number) for n in range(1, len(answers) + 1)))
            except RowRejected as error:
                made.append(error)
                continue
            try:
                made.append(self._encode(up_to, plans, images))
            except RowRejected as error:
                where = f"assistant turn {number} of {len(answers)}: " if len(answers) > 1 else ""
                made.append(RowRejected(error.reason, where + error.message))
        return made

    def _encode(self, conversation: Conversation, plans: Plans, images: list[Views]) -> EncodedSample:
        """Encodes one conversation; ``images`` has the first of its images and videos, and gets the others."""
        _check_turns(conversation)
        weights = turn_weights(conversation, self.config.train_turns)
        _check_answers(conversation, weights)
        # Text first: it is cheap, and rejected rows need no image decoding.
        rendered, tokens, turns = encode_turns(self.renderer, conversation, weights, self.config.train_think)
        spans = target_spans(tokens, turns, weights, self.config.train_think, rendered.text)
        dropped = self._dropped_reasoning(conversation, rendered.text, turns)
        if self.config.family == PROCESSOR:
            sample = self._processed(conversation, rendered, tokens, spans)
        else:
            sample = self._with_items(conversation, plans, images, tokens, spans)
        return dataclasses.replace(
            sample,
            dropped_reasoning=len(dropped),
            drops_last_reasoning=len(turns) in dropped and _ends_with_answer(conversation),
            unlike_inference=is_unlike_inference(self.renderer, conversation, rendered.text, turns, weights),
        )

    def _processed(
        self, conversation: Conversation, rendered: Rendered, tokens: Tokens, spans: TargetSpans
    ) -> EncodedSample:
        """Returns the sample that the model's processor makes of the rendered text and the images."""
        from vlmdata.preprocess.encode.processed import processed  # imports torch

        made = processed(conversation, rendered, tokens, spans, self.config)
        length, kept = len(made.tokens), len(made.tokens)
        if length > self.config.max_length:
            kept = self._kept_length(length, len(tokens.ids), spans, len(conversation.media))
        return self._finished(
            made.tokens[:kept],
            made.items(kept),
            spans,
            truncated=kept < length,
            positions=made.positions[:, :kept],
        )

    def _with_items(
        self, conversation: Conversation, plans: Plans, images: list[Views], tokens: Tokens, spans: TargetSpans
    ) -> EncodedSample:
        """Returns the sample with its images and videos; ``images`` has the first of them, and gets the others."""
        # Their sizes next: neither do samples that are too long.
        text, parts = len(tokens.ids), conversation.media
        written = sum(map(blocks_in_text, parts))
        placeholders = item_tokens(parts, plans, self.config, more_than=self.config.max_length - text + written)
        if placeholders is not None:
            self._kept_length(text - written + placeholders, text, spans, len(parts))
        images += encode_items(parts[len(images) :], plans, self.config)
        return self._assemble(tokens.ids, spans, images)

    def _dropped_reasoning(self, conversation: Conversation, text: str, turns: list[Turn]) -> list[int]:
        """Numbers the turns whose reasoning the sample should have and lacks; with a sample per turn, only its last."""
        dropped = dropped_reasoning(conversation, text, turns, self.tokenizer.family.chat.think)
        each = self.config.train_turns is TrainTurns.EACH
        if each:
            dropped = [number for number in dropped if number == len(turns)]
        if dropped and self.config.strict:
            which = "even the last turn" if each else _named(dropped, len(turns))
            lost = len(turns) in dropped and _ends_with_answer(conversation)  # no other choice of turns would help
            remedy = "" if lost else "; --train-turns each learns every turn with its reasoning"
            raise RowRejected(
                Reason.TEMPLATE_ERROR,
                f"the chat template drops the reasoning of {which}. --strict rejects such rows{remedy}.",
            )
        return dropped

    def _require_known_keys(self, made: Conversation | Document) -> None:
        if self.config.strict and made.unknown:
            keys = excerpt(", ".join(made.unknown), 400)
            raise RowRejected(
                Reason.UNKNOWN_KEYS,
                f"keys that the recipe does not know: {keys}. --strict rejects such rows; drop the keys or omit "
                "--strict.",
            )

    def _assemble(self, ids: npt.NDArray[np.int64], spans: TargetSpans, images: list[Views]) -> EncodedSample:
        """Expands placeholders, and truncates or rejects samples that are too long."""
        tokens = WeightedTokens(ids, spans.weights)
        tokens = tokens.with_items(images, self.config.model_family, self.tokenizer.info)
        length = len(tokens)
        if truncated := length > self.config.max_length:
            tokens = tokens[: self._kept_length(length, len(ids), spans, len(images))]
        return self._finished(tokens, images, spans, truncated=truncated)

    def _finished(
        self,
        tokens: WeightedTokens,
        images: Sequence[Views],
        spans: TargetSpans,
        *,
        truncated: bool,
        positions: npt.NDArray[np.int32] | None = None,
    ) -> EncodedSample:
        chosen = spans.turn_weights if self.config.train_turns is TrainTurns.ALL else spans.turn_weights[-1:]
        return finish_sample(
            tokens,
            images,
            self.config,
            self.tokenizer.info,
            target_turns=spans.turns,
            truncated=truncated,
            turn_weights=() if set(chosen) == {1.0} else spans.turn_weights,
            positions=positions,
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


def with_settings(conversation: Conversation, config: PreprocessConfig) -> Conversation:
    """Adds what the run gives every conversation: a system turn if it has none, and arguments of the template."""
    if config.chat_template_kwargs:
        arguments = {**config.chat_template_kwargs, **conversation.template_arguments}
        conversation = dataclasses.replace(conversation, template_arguments=arguments)
    prompt = config.system_prompt
    if prompt is None or any(message.role == "system" for message in conversation.messages):
        return conversation
    messages = (Message("system", (TextPart(prompt),)), *conversation.messages)
    return dataclasses.replace(conversation, messages=messages)


def _check_turns(conversation: Conversation) -> None:
    answers = conversation.answers
    if not answers:
        roles = ", ".join(message.role for message in conversation.messages) or "none"
        raise RowRejected(Reason.NO_ASSISTANT_TURN, f"no assistant turn to learn from; roles: {roles}")
    for number, message in enumerate(answers, start=1):
        for part in message.media:
            what = f"assistant turn {number} of {len(answers)} holds {with_article(kind_of(part))}"
            raise RowRejected(Reason.UNSUPPORTED_CONTENT, what)


def _check_answers(conversation: Conversation, weights: tuple[float, ...]) -> None:
    """Checks that learned turns are not empty; other turns may be."""
    answers = conversation.answers
    for number, (message, weight) in enumerate(zip(answers, weights, strict=True), start=1):
        if weight and not message.text.strip() and not message.tool_calls:
            raise RowRejected(Reason.EMPTY_ANSWER, f"assistant turn {number} of {len(answers)} has no text")


def _ends_with_answer(conversation: Conversation) -> bool:
    return conversation.messages[-1].role == "assistant"


def _named(turns: list[int], of: int) -> str:
    listed = f"turns {', '.join(map(str, turns[:-1]))} and {turns[-1]}" if len(turns) > 1 else f"turn {turns[0]}"
    return f"assistant {listed} of {of}"


def encode_turns(
    renderer: Renderer, conversation: Conversation, weights: Sequence[float], train_think: TrainThink
) -> tuple[Rendered, Tokens, list[Turn]]:
    """Renders and tokenizes a conversation, and finds its assistant turns.

    Returns:
        The rendered text, its tokens, and one turn for each assistant message, in order.

    Raises:
        RowRejected: TEMPLATE_ERROR if the result is not the conversation: a turn, an image or a text is missing or
            misplaced. SPECIAL_TOKEN_TEXT if the data forged a special token. OVERLONG if the text is far too long.
    """
    tokenizer = renderer.tokenizer
    if tokenizer.info.turns.response:
        require_ids(conversation)
    rendered = renderer.render(conversation)
    require_length(tokenizer, rendered.text, renderer.most_tokens)
    tokens = tokenize(tokenizer, rendered)
    require_reserved(rendered, tokens, tokenizer)
    answers = conversation.answers
    remedy = remedy_for_calls(conversation, tokenizer.family)
    turns = find_turns(rendered.text, tokens, tokenizer, remedy)
    if len(turns) != len(answers):
        raise template_error(
            f"wrote {counted(len(turns), 'assistant turn')} for {counted(len(answers), 'assistant message')}{remedy}"
        )
    turns = with_prompts(tokenizer, conversation, turns)
    learned = [(answer, turn) for answer, turn, weight in zip(answers, turns, weights, strict=True) if weight]
    tokens = _cut_before_answers(tokenizer, rendered, tokens, learned, train_think)
    require_conversation(conversation, rendered, tokens, turns, {turn.body for _, turn in learned}, tokenizer)
    if train_think is TrainThink.NEVER:
        for number, (answer, turn, weight) in enumerate(zip(answers, turns, weights, strict=True), start=1):
            if weight:
                require_no_marks(answer, turn, rendered.text, number, tokenizer.family.chat.think)
    return rendered, tokens, turns


def _cut_before_answers(
    tokenizer: ChatTokenizer,
    rendered: Rendered,
    tokens: Tokens,
    learned: Sequence[tuple[Message, Turn]],
    train_think: TrainThink,
) -> Tokens:
    """Tokenizes again if the whitespace that begins a learned answer merged with the newline before it.

    At inference that newline ends the prompt, so its token has nothing of the answer. Whitespace of the template before
    an answer is in the prompt, too, and stays as it is.
    """
    text, overs = rendered.text, dict[int, int]()
    for answer, turn in learned:
        if answer.text[:1].isspace() and answer.text.strip():
            for at in {turn.body, turn.target_start(train_think)}:
                if text.startswith(answer.text, at) and (over := token_over(tokens, at)) is not None:
                    overs[at] = int(tokens.ends[over])
    if not overs:
        return tokens
    cut = tokenize(tokenizer, rendered, sorted(overs))
    require_reserved(rendered, cut, tokenizer)
    for at, end in overs.items():
        first, last = np.searchsorted(cut.starts, [at, end]).tolist()
        spelled = tokenizer.hf.decode(cut.ids[first:last], clean_up_tokenization_spaces=False)
        if spelled != text[at : int(cut.ends[last - 1])]:  # some tokenizers put a space before each piece
            return tokens
    return cut
