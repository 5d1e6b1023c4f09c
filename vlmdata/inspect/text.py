"""Makes dataset text safe to display: it cannot control a terminal or reorder a line."""

from __future__ import annotations

import re
import unicodedata

#: Joiners that scripts and emoji need. Every other format character is escaped.
_HARMLESS_FORMATS = frozenset("\u200c\u200d")
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]")


def visible(text: str) -> str:
    r"""Escapes control, format and surrogate characters (``\x1b``, ``\u202e``).

    Newlines and tabs stay. Otherwise escape sequences would reach the terminal, and bidirectional overrides would show
    misleading text.
    """
    return _SUSPECT.sub(_escape, text)


def one_line(text: str, limit: int | None = None) -> str:
    r"""Like :func:`visible`, on one line: also escapes newlines and tabs, and cuts to ``limit`` characters."""
    line = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if limit is None or len(line) <= limit else line[: max(limit - 1, 0)] + "…"


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _HARMLESS_FORMATS
    if not hidden:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
