"""Checks that the output of the chat template and tokenizer matches the conversation.

Templates and tokenizers are third-party code. One that moves a message, loses an image or builds a special token from
the data's text would teach something that is not in the data. So every row is compared with its conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from preprocess.chat.length import require_length
from preprocess.chat.render import Rendered, Renderer
from preprocess.chat.targets import Tokens, Turn, find_turns, token_over, tokenize
from preprocess.chat.tokenizer import ASSISTANT_HEADER, IM_START, ChatTokenizer
from preprocess.config import TrainThink
from preprocess.conversation import Conversation, Document, Message, TextPart
from preprocess.reject import RowRejected, excerpt
from vlmdata.format.manifest import TokenizerInfo
from vlmdata.reasons import Reason
from vlmdata.wording import counted


def encode_turns(
    renderer: Renderer, conversation: Conversation, weights: Sequence[float], train_think: TrainThink
) -> tuple[Rendered, Tokens, list[Turn]]:
    """Renders and tokenizes a conversation, and finds its assistant turns.

    Args:
        renderer: Applies the template.
        conversation: The conversation.
        weights: Weight of each assistant turn; a turn of weight 0 is not learned.
        train_think: Whether think blocks are targets.

    Returns:
        The rendered text, its tokens, and one turn for each assistant message, in order.

    Raises:
        RowRejected: TEMPLATE_ERROR if the result is not the conversation: a turn, an image or a text is missing or
            misplaced. SPECIAL_TOKEN_TEXT if the data forged a special token. OVERLONG if the text is far too long.
    """
    tokenizer = renderer.tokenizer
    rendered = renderer.render(conversation)
    require_length(tokenizer, rendered.text, renderer.most_tokens)
    tokens = tokenize(tokenizer, rendered)
    _require_reserved(rendered, tokens, tokenizer)
    turns = find_turns(rendered.text, tokens, tokenizer.info)
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if len(turns) != len(answers):
        raise _template_error(
            f"wrote {counted(len(turns), 'assistant turn')} for {counted(len(answers), 'assistant message')}"
        )
    learned = [(answer, turn) for answer, turn, weight in zip(answers, turns, weights, strict=True) if weight]
    tokens = _cut_before_answers(tokenizer, rendered, tokens, learned, train_think)
    _require_headers(rendered.text, tokens, tokenizer.info, {turn.body for _, turn in learned})
    _require_images(tokens, tokenizer.info, len(conversation.images))
    for message in conversation.messages:
        if message.role == "system" and missing_piece([message.text], rendered.text) is not None:
            raise _template_error(f"left out the system prompt {excerpt(message.text, 60)!r}")
    for number, stretch in enumerate(_stretches(conversation)):
        _require_stretch(number, stretch, rendered.text, tokens, turns, tokenizer.info)
    return rendered, tokens, turns


def encode_document_text(renderer: Renderer, document: Document) -> Tokens:
    """Tokenizes a document, with one placeholder per image and the end of text last.

    Raises:
        RowRejected: SPECIAL_TOKEN_TEXT if the data forged a special token, TEMPLATE_ERROR if one was lost, OVERLONG if
            the text is far too long.
    """
    rendered = renderer.render_document(document)
    hint = "; --overlong split makes several samples of such documents"
    require_length(renderer.tokenizer, rendered.text, renderer.most_tokens, hint)
    tokens = tokenize(renderer.tokenizer, rendered)
    _require_reserved(rendered, tokens, renderer.tokenizer)
    return tokens


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
    _require_reserved(rendered, cut, tokenizer)
    for at, end in overs.items():
        first, last = np.searchsorted(cut.starts, [at, end]).tolist()
        spelled = tokenizer.hf.decode(cut.ids[first:last], clean_up_tokenization_spaces=False)
        if spelled != text[at : int(cut.ends[last - 1])]:  # some tokenizers put a space before each piece
            return tokens
    return cut


def _template_error(message: str) -> RowRejected:
    return RowRejected(Reason.TEMPLATE_ERROR, f"the chat template {message}")


def _require_reserved(rendered: Rendered, tokens: Tokens, tokenizer: ChatTokenizer) -> None:
    """Checks that reserved ids are exactly where their texts were written, despite normalisation."""
    at = np.flatnonzero(np.isin(tokens.ids, tokenizer.reserved_ids))
    found = list(zip(tokens.starts[at].tolist(), tokens.ends[at].tolist(), strict=True))
    if found == list(rendered.reserved_spans):
        return
    for token, (start, stop) in zip(tokens.ids[at].tolist(), found, strict=True):
        if (start, stop) not in rendered.reserved_spans:
            raise RowRejected(
                Reason.SPECIAL_TOKEN_TEXT,
                f"the tokenizer makes the special token {tokenizer.hf.convert_ids_to_tokens(token)} of the text "
                f"{excerpt(rendered.text[start:stop], 40)!r}",
            )
    lost, end = next(span for span in rendered.reserved_spans if span not in found)
    raise RowRejected(
        Reason.TEMPLATE_ERROR,
        f"the tokenizer does not make one token of {rendered.text[lost:end]} in "
        f"{excerpt(rendered.text[max(0, lost - 20) : end + 20], 60)!r}",
    )


def _require_headers(text: str, tokens: Tokens, info: TokenizerInfo, learned: Collection[int]) -> None:
    """Checks the ids of assistant headers. A tokenizer may merge them with the text that follows.

    Args:
        text: The rendered text.
        tokens: Its tokens.
        info: The header's ids.
        learned: First characters of the learned turns' bodies. In other turns the last token of the header may differ,
            as it does at inference; the others tell whose turn it is.
    """
    header = np.array(info.assistant_header)
    for at in np.flatnonzero(tokens.ids == info.im_start).tolist():
        body = int(tokens.starts[at]) + len(IM_START)
        needed = len(header) if body + len(ASSISTANT_HEADER) in learned else max(len(header) - 1, 1)
        found = tokens.ids[at + 1 : at + 1 + len(header)]
        if text.startswith(ASSISTANT_HEADER, body) and not np.array_equal(found[:needed], header[:needed]):
            raise RowRejected(
                Reason.TEMPLATE_ERROR,
                f"the tokenizer encodes the header of the turn {excerpt(text[body:], 40)!r} as {found.tolist()} "
                f"instead of {header.tolist()}: it merges with the answer",
            )


def _require_images(tokens: Tokens, info: TokenizerInfo, images: int) -> None:
    """Checks for one placeholder per image, each between vision tokens, and no further vision tokens."""
    ids = tokens.ids
    at = np.flatnonzero(ids == info.image)
    if len(at) != images:
        raise _template_error(f"wrote {counted(len(at), 'image placeholder')} for {counted(images, 'image')}")
    marks = int((ids == info.vision_start).sum()), int((ids == info.vision_end).sum())
    enclosed = marks == (images, images) and not (images and (at[0] == 0 or at[-1] + 1 == len(ids)))
    if not enclosed or (ids[at - 1] != info.vision_start).any() or (ids[at + 1] != info.vision_end).any():
        raise _template_error(
            f"wrote {marks[0]} <|vision_start|> and {marks[1]} <|vision_end|> around "
            f"{counted(images, 'image placeholder')}; each <|image_pad|> must be directly between the two, "
            "as Qwen-VL models require"
        )


def _stretches(conversation: Conversation) -> Iterator[tuple[list[Message], Message | None]]:
    """Splits the conversation after each assistant message: the messages before it, and the message.

    The last stretch, which may be empty, has no assistant message.
    """
    before: list[Message] = []
    for message in conversation.messages:
        if message.role == "assistant":
            yield before, message
            before = []
        else:
            before.append(message)
    yield before, None


def _require_stretch(
    number: int,
    stretch: tuple[list[Message], Message | None],
    text: str,
    tokens: Tokens,
    turns: list[Turn],
    info: TokenizerInfo,
) -> None:
    """Checks that the text between two assistant turns has the images and user texts of the messages between them."""
    before, answer = stretch
    start = turns[number - 1].stop if number else 0
    stop = turns[number].body if answer is not None else len(text)
    first, last = np.searchsorted(tokens.starts, [start, stop]).tolist()
    images = int((tokens.ids[first:last] == info.image).sum())
    expected = sum(1 for message in before for _ in message.images)
    where = f"before assistant turn {number + 1}" if answer is not None else "after the last assistant turn"
    if images != expected:
        raise _template_error(
            f"wrote {counted(images, 'image placeholder')} {where}, where the messages have "
            f"{counted(expected, 'image')}"
        )
    said = [
        part.text
        for message in before
        if message.role == "user"
        for part in message.parts
        if isinstance(part, TextPart)
    ]
    missing = missing_piece(said, text[start:stop])
    if missing is not None:
        raise _template_error(f"left out or moved the user's text {excerpt(missing, 60)!r}, which belongs {where}")
    if answer is None:
        return
    turn = turns[number]
    # Templates treat reasoning inside the text as a think block, and drop it from earlier turns.
    words = answer.text.rpartition("</think>")[2]
    if missing_piece([words], text[turn.body : turn.stop]) is not None:
        raise _template_error(
            f"wrote {excerpt(text[turn.body : turn.stop], 60)!r} as assistant turn {number + 1}; the message says "
            f"{excerpt(words, 60)!r}"
        )


def missing_piece(pieces: Sequence[str], text: str) -> str | None:
    """Returns the first piece that is not in ``text`` after the previous pieces, ignoring whitespace."""
    cursor = 0
    for piece in pieces:
        at = text.find(piece.strip(), cursor)
        if at < 0:
            return _missing_words(pieces, text)
        cursor = at + len(piece.strip())
    return None


def _missing_words(pieces: Sequence[str], text: str) -> str | None:
    """Like :func:`missing_piece`, if the template changed the whitespace within a piece."""
    cursor, words = 0, "".join(text.split())
    for piece in pieces:
        squeezed = "".join(piece.split())
        at = words.find(squeezed, cursor)
        if at < 0:
            return piece
        cursor = at + len(squeezed)
    return None
