"""Chat rows: message lists (OpenAI, Qwen, ShareGPT, LLaVA) and prompt-answer pairs (alpaca, ms-swift, TRL).

``row_keys`` rejects rows that cannot be learned from, ``forms`` finds the turns in any columns, ``turns`` gives them
roles, ``content`` and ``images`` put text and images in order, and ``tools`` and ``weights`` read the rest.
docs/recipes.md has the table of keys.
"""

from preprocess.recipes.chat.recipe import Chat

__all__ = ["Chat"]
