"""Numbers and values in sentences: counts with their nouns, articles, durations, excerpts."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: ``1 shard``, ``2,000 shards``, ``0 shards``.

    Args:
        number: How many.
        noun: Noun in the singular. Words after the noun need a ``plural``.
        plural: Noun for every number except 1; by default the usual ending is added (``-s``, ``-es``, ``-ies``).
    """
    return f"{number:,} {noun if number == 1 else plural or _plural(noun)}"


def with_article(word: str) -> str:
    """A word with its indefinite article: ``a user``, ``an assistant``.

    Correct for the words of this project. It does not know exceptions such as ``an hour``.
    """
    vowel = word[:1].lower() in tuple("aeio")  # of words with u, this project uses "user" and "uint8"
    return f"{'an' if vowel else 'a'} {word}"


def either(words: Sequence[str]) -> str:
    """Returns words as a choice: ``a, b or c``."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def duration(seconds: float) -> str:
    """A readable duration: ``0.4 s``, ``42 s``, ``2 min 5 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def excerpt(value: object, limit: int = 80) -> str:
    """A value for an error message, cut to ``limit`` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def encodable(text: str) -> str:
    """Text of a row as it can be written anywhere: half of a character (a lone surrogate) becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


class LaterText:
    """A text that is made when it is formatted. For the parts of error messages, which are seldom needed.

    Args:
        make: Returns the text.
        arguments: Its arguments.
    """

    __slots__ = ("_arguments", "_make")

    def __init__[*Arguments](self, make: Callable[[*Arguments], str], *arguments: *Arguments):
        self._make: Callable[..., str] = make
        self._arguments: tuple[object, ...] = arguments

    def __str__(self) -> str:
        return self._make(*self._arguments)


#: A text, or one that is made when it is formatted.
type Text = str | LaterText


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou"):
        return f"{noun[:-1]}ies"
    return f"{noun}s"
