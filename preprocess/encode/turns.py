"""Conversations to tokens and assistant turns: where the encoding of a conversation begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from preprocess.chat.agreement import require_conversation, require_reserved, template_error
from preprocess.chat.length import require_length
from preprocess.chat.render import Rendered, Renderer
from preprocess.chat.targets import Tokens, Turn, find_turns, token_over, tokenize
from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.config import TrainThink
from preprocess.conversation import Conversation, Message
from vlmdata.wording import counted


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
    rendered = renderer.render(conversation)
    require_length(tokenizer, rendered.text, renderer.most_tokens)
    tokens = tokenize(tokenizer, rendered)
    require_reserved(rendered, tokens, tokenizer)
    turns, answers = find_turns(rendered.text, tokens, tokenizer), conversation.answers
    if len(turns) != len(answers):
        raise template_error(
            f"wrote {counted(len(turns), 'assistant turn')} for {counted(len(answers), 'assistant message')}"
        )
    learned = [(answer, turn) for answer, turn, weight in zip(answers, turns, weights, strict=True) if weight]
    tokens = _cut_before_answers(tokenizer, rendered, tokens, learned, train_think)
    require_conversation(conversation, rendered.text, tokens, turns, {turn.body for _, turn in learned}, tokenizer)
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
