"""Chat rows: message lists (OpenAI, Qwen, ShareGPT, LLaVA) and pairs of prompt and answer (alpaca, ms-swift, TRL).

From a row to a conversation: ``row_keys`` refuses what cannot be learned from, ``forms`` finds the turns whatever the
columns, ``turns`` gives them roles, ``content`` and ``images`` put text and images in order, ``tools`` and ``weights``
read the rest. docs/recipes.md has the table of keys.
"""

from preprocess.recipes.chat.recipe import Chat

__all__ = ["Chat"]
