"""Datasets for training whose tokenizer has few tokens.

The tests' chats have some twenty words. With the embedded tokenizer, embedding and output layer of a tiny model are
three quarters of its parameters and a third of the time of a step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.conftest import build_dataset
from tests.loader.rows import WORDS
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER

#: Up to four tensor-parallel ranks add no rows to these.
TOKENS = 512
#: What chats consist of, beside the marks of turns and items.
_TEXT = "\n".join(("user", "assistant", "And then?", "<think>\n\n</think>\n\n", *(f"{each} {each}." for each in WORDS)))


def build_chats(source: Path | str, directory: Path, **options: Any) -> Path:
    """As :func:`build_dataset` with the recipe ``chat``, with :data:`TOKENS` tokens."""
    return build_dataset(source, directory, recipe="chat", tokenizer=small_tokenizer(directory.parent), **options)


def small_tokenizer(beside: Path) -> str:
    """The embedded tokenizer with its first merges and those that the text needs: it splits the text alike.

    Args:
        beside: A folder; the tokenizer's is made in it, unless it exists.
    """
    folder = beside / "tokenizer"
    if folder.exists():
        return str(folder)
    shutil.copytree(EMBEDDED_TOKENIZER, folder)
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    used = set(Tokenizer.from_str(file.read_text()).encode(_TEXT).tokens)
    all_merges, room = made["model"]["merges"], TOKENS - 256 - len(made["added_tokens"])
    needed = [any("".join(pair) in token for token in used) for pair in all_merges]
    others = [number for number, each in enumerate(needed) if not each][: room - sum(needed)]
    merges = [pair for number, pair in enumerate(all_merges) if needed[number] or number <= others[-1]]
    kept = {"".join(pair) for pair in merges}
    names = [name for name in made["model"]["vocab"] if len(name) == 1 or name in kept]
    assert len(names) + len(made["added_tokens"]) == TOKENS
    made["model"] |= {"merges": merges, "vocab": {name: number for number, name in enumerate(names)}}
    for number, token in enumerate(made["added_tokens"], start=len(names)):
        token["id"] = number
    file.write_text(json.dumps(made))
    return str(folder)
