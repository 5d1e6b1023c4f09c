"""Limits on the length of samples, as the command line gives them."""

from __future__ import annotations


def parse_limits(text: str) -> tuple[int, ...]:
    """Reads limits from numbers with commas.

    Raises:
        ValueError: If they are none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"lengths is {text}; give numbers of tokens with commas, such as 4096,8192,16384")
    return tuple(sorted({int(word) for word in words}))
