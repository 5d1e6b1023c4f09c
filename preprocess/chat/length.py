"""Rejects very long texts before they are tokenized whole: the tokenizer takes up to 1 kB of memory per token."""

from __future__ import annotations

from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.wording import counted

#: Shorter texts are tokenized whole at once: in characters, and in characters for each token allowed.
_SHORT, _CHARACTERS_PER_TOKEN = 1 << 17, 8
_PIECE = 1 << 15
#: Pieces are tokenized to count only, as tokens at their ends may be split. So only texts are rejected that are over
#: the limit by this factor.
_CERTAIN = 2


def require_length(tokenizer: ChatTokenizer, text: str, most: int | None, hint: str = "") -> None:
    """Rejects a text of more than twice the allowed number of tokens.

    Raises:
        RowRejected: OVERLONG.
    """
    if most is None or len(text) <= max(_SHORT, _CHARACTERS_PER_TOKEN * most):
        return
    tokens = 0
    for start in range(0, len(text), _PIECE):
        tokens += len(tokenizer.hf.backend_tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
        if tokens > _CERTAIN * most:
            raise RowRejected(
                Reason.OVERLONG,
                f"more than {_CERTAIN * most} tokens of text ({counted(len(text), 'character')}), over --max-length "
                f"{most}{hint}",
            )
