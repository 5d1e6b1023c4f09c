"""Chat rows: message lists (OpenAI, Qwen, ShareGPT, LLaVA) and prompt-answer pairs (alpaca, ms-swift, TRL).

``row_keys`` rejects rows that cannot be learned from, ``forms`` finds the turns in any columns, ``turns`` gives them
roles, ``content``, ``images`` and ``videos`` put text and media in order (``column`` counts them), and ``tools`` and
``weights`` read the rest.
docs/recipes.md has the table of keys.
"""

from vlmdata.preprocess.recipes.chat.recipe import Chat

__all__ = ["Chat"]
