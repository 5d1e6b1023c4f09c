"""What a recipe makes of a row: a conversation of text and images, before any template or tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: frozenset[str] = frozenset(get_args(Role))


@dataclass(frozen=True)
class TextPart:
    """A piece of text, as it stands in the data."""

    text: str


@dataclass(frozen=True, eq=False)
class ImagePart:
    """An image file's bytes.

    Attributes:
        data: The encoded file.
        field: Where in the row it came from, for messages.
    """

    data: bytes
    field: str = "image"


Part = TextPart | ImagePart


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: Who speaks.
        parts: What is said, in order.
        reasoning: The assistant's reasoning, apart from its answer.
        tool_calls: The assistant's calls: mappings with ``name`` and ``arguments`` (a mapping).
    """

    role: Role
    parts: tuple[Part, ...]
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """All text of the turn, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> Iterator[ImagePart]:
        """The images of the turn, in order."""
        return (part for part in self.parts if isinstance(part, ImagePart))


@dataclass(frozen=True)
class Conversation:
    """A whole sample: turns in order, and the tools the assistant was offered.

    Attributes:
        messages: The turns.
        tools: Tool definitions (JSON-schema mappings), given to the chat template.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def images(self) -> list[ImagePart]:
        """All images in order of appearance."""
        return [image for message in self.messages for image in message.images]
