"""Results of recipes: conversations and documents of text and images, before template and tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vlmdata.preprocess.grounding import BoxPart, GroundingPart, LabelPart, PointPart
from vlmdata.wording import counted

#: A value of a column that a recipe attaches to a sample.
ColumnValue = str | int | float | bool | None
Columns = Mapping[str, ColumnValue | list[ColumnValue]]

Role = Literal["system", "user", "assistant", "tool"]
ROLES: frozenset[str] = frozenset(get_args(Role))


@dataclass(frozen=True)
class TextPart:
    """A piece of text, unmodified from the data."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"TextPart.text is {self.text!r} ({_kind(self.text)}); it must be a str")


@dataclass(frozen=True, eq=False)
class ImagePart:
    """The bytes of an image file, and its size after resizing if the data specifies one.

    The bounds of this image override those of the run (``--min-pixels``, ``--max-pixels``).

    Attributes:
        data: The encoded file.
        field: Place in the row, for messages.
        min_pixels: Smallest area in pixels after resizing; None means the run's.
        max_pixels: Largest area in pixels after resizing; None means the run's.
        resized_height: Height in pixels to resize to, rounded to the family's grid; needs ``resized_width``.
        resized_width: Width in pixels to resize to, rounded to the family's grid; needs ``resized_height``.
        region: The part of the image that is used: left, top, width and height in pixels of the image as it is shown,
            after EXIF rotation. Boxes and points are given in the whole image.
        mirrored: Whether left and right are exchanged; boxes and points are given as they were.
    """

    data: bytes
    field: str = "image"
    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    region: tuple[int, int, int, int] | None = None
    mirrored: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            raise TypeError(
                f"ImagePart.data is of type {_kind(self.data)}; it must be the bytes of an image file "
                "(MediaLoader.load reads paths, data URIs and {'bytes': …} columns)"
            )
        for name in ("min_pixels", "max_pixels", "resized_height", "resized_width"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"ImagePart.{name} is {value!r}; it must be a positive int")
        if (self.resized_height is None) != (self.resized_width is None):
            raise ValueError("ImagePart.resized_height and resized_width must be given together")
        if self.region is not None and not _is_region(self.region):
            raise ValueError(
                f"ImagePart.region is {self.region!r}; it must be a tuple of left, top, width and height in pixels"
            )


def _is_region(value: Any) -> bool:
    whole = isinstance(value, tuple) and len(value) == 4 and all(type(each) is int and each >= 0 for each in value)
    return whole and min(value[2:]) > 0


@dataclass(frozen=True, eq=False)
class VideoPart:
    """A video, and how the data asks to sample and resize it. None leaves it to the run.

    Attributes:
        data: The encoded file, or the image files of its frames. Those with a rate are all used; those with
            timestamps are sampled if one of the arguments from ``fps`` to ``max_frames`` is given.
        field: Place in the row, for messages.
        rate: Frames per second of the video of which ``data`` are the frames; None for a file.
        fps: Sampled frames per second.
        num_frames: Number of sampled frames; not with ``fps``.
        min_frames: Fewest sampled frames; used with ``fps``.
        max_frames: Most sampled frames; used with ``fps``.
        min_pixels: Smallest area of a resized frame in pixels.
        max_pixels: Largest area of a resized frame in pixels.
        total_pixels: Largest area of all resized frames in pixels.
        start: Where the sampled part begins, in seconds; with a file or timestamps.
        end: Where it ends, in seconds.
        seconds: When each temporal patch is shown; the encoder sets it.
        timestamps: When each of the frames in ``data`` is shown, in seconds, ascending; instead of ``rate``.
    """

    data: bytes | tuple[bytes, ...]
    field: str = "video"
    rate: float | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    start: float | None = None
    end: float | None = None
    seconds: tuple[float, ...] = ()
    timestamps: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            _require_tuple("VideoPart.data", self.data, (bytes,), "the bytes of image files")
            if not self.data or (self.rate is None) == (self.timestamps is None):
                raise ValueError("VideoPart.data is a tuple of frames; it needs at least one, and a rate or timestamps")
            if self.timestamps is not None and (fault := timestamps_fault(self.timestamps, len(self.data))):
                raise ValueError(f"VideoPart.timestamps{fault}")
        elif self.rate is not None or self.timestamps is not None:
            raise ValueError("VideoPart.rate and timestamps are those of frames; a file has its own")
        for name in ("num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"VideoPart.{name} is {value!r}; it must be a positive int")
        for name in ("rate", "fps"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"VideoPart.{name} is {value!r}; it must be a positive number")
        for name in ("start", "end"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"VideoPart.{name} is {value!r}; it must be a number of seconds from 0")
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("VideoPart.fps and num_frames exclude each other")


def timestamps_fault(times: Sequence[Any], frames: int) -> str:
    """Says why times cannot be those of a list of frames, as the rest of a sentence that begins with their name.

    Args:
        times: Seconds at which each frame is shown.
        frames: Number of frames.

    Returns:
        The fault with its value; "" if there is none.
    """
    if len(times) != frames:
        return f" has {counted(len(times), 'time')} for {counted(frames, 'frame')}; write one per frame"
    before: float = -1
    for number, time in enumerate(times):
        if type(time) not in (int, float) or not math.isfinite(time) or time < 0:
            return f"[{number}] is {time!r}; it must be a number of seconds from 0"
        if time <= before:
            return f"[{number}] is {time}, not after {before} before it; write frames in the order of their times"
        before = time
    return ""


MediaPart = ImagePart | VideoPart
ContentPart = TextPart | MediaPart | GroundingPart
_PARTS = (TextPart, ImagePart, VideoPart, BoxPart, PointPart, LabelPart)


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: Role of the speaker.
        parts: Content, in order. Boxes, points and labels become text before the chat template is applied.
        reasoning: The assistant's reasoning, separate from its answer.
        tool_calls: The assistant's calls: mappings with ``name`` and ``arguments`` (a mapping), and ``id`` if known.
        loss_weight: Weight of the turn's targets in the loss, at least 0; 0 means the turn is not learned. Assistant
            turns only. None means 1, with the choice of turns left to ``--train-turns``.
        call_id: The ``id`` of the call that a tool turn responds to, if known.
        tool_name: The name of the tool that responds in a tool turn, if known.
    """

    role: Role
    parts: tuple[ContentPart, ...]
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    loss_weight: float | None = None
    call_id: str | None = None
    tool_name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"Message.role is {self.role!r}; known roles: {', '.join(sorted(ROLES))}")
        _require_tuple("Message.parts", self.parts, _PARTS, ", ".join(kind.__name__ for kind in _PARTS))
        _require_tuple("Message.tool_calls", self.tool_calls, (Mapping,), "mappings with name and arguments")
        if self.reasoning is not None and not isinstance(self.reasoning, str):
            raise TypeError(f"Message.reasoning is of type {_kind(self.reasoning)}; it must be a str or None")
        if self.loss_weight is not None:
            _require_weight("Message.loss_weight", self.loss_weight)
            if self.role != "assistant":
                raise ValueError(
                    f"Message.loss_weight is {self.loss_weight} in a {self.role} turn; only assistant turns are learned"
                )

    @property
    def text(self) -> str:
        """All text of the turn, joined, without boxes, points and labels."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> Iterator[ImagePart]:
        """The images of the turn, in order."""
        return (part for part in self.parts if isinstance(part, ImagePart))

    @property
    def media(self) -> Iterator[MediaPart]:
        """The images and videos of the turn, in order."""
        return (part for part in self.parts if isinstance(part, ImagePart | VideoPart))


@dataclass(frozen=True)
class Conversation:
    """A sample with turns, and the tools offered to the assistant.

    Attributes:
        messages: The turns.
        tools: Tool definitions (JSON-schema mappings), for the chat template.
        loss_weight: Factor on the weights of all targets of the sample, at least 0.
        unused: Harmless keys of the row that the recipe does not use, such as ``id`` or
            ``messages[].name``. The run's summary counts them.
        unknown: Keys of the row that the recipe does not know. The run's summary counts them;
            ``--strict`` rejects the row.
        columns: Facts to store with the sample, such as ``{"lang": "de"}``: text, finite numbers, booleans, None, or
            lists of these. They change no token.
        template_arguments: Arguments of the chat template by name, such as ``{"enable_thinking": False}``, above those
            of the run (``--chat-template-kwargs``).
        box_images: Of several images, the one of each box and point that became text: its number among images and
            videos, then the coordinates in the text. The encoder sets it.
        variant: With ``--variants``: the number of the variant, or why there is none. The run sets it.
        shortened: What ``--overlong drop-turns`` or ``shrink-images`` took from it, by name. The run sets it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    loss_weight: float = 1.0
    unused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    columns: Columns = field(default_factory=dict)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    box_images: tuple[tuple[int, ...], ...] = ()
    variant: Mapping[str, int | str] = field(default_factory=dict)
    shortened: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_tuple("Conversation.messages", self.messages, (Message,), "Message")
        _require_tuple("Conversation.tools", self.tools, (Mapping,), "mappings")
        _require_tuple("Conversation.unused", self.unused, (str,), "str")
        _require_tuple("Conversation.unknown", self.unknown, (str,), "str")
        _require_weight("Conversation.loss_weight", self.loss_weight)
        _require_columns("Conversation.columns", self.columns)
        _require_arguments("Conversation.template_arguments", self.template_arguments)

    @property
    def images(self) -> list[ImagePart]:
        """All images in order of appearance."""
        return [image for message in self.messages for image in message.images]

    @property
    def media(self) -> list[MediaPart]:
        """All images and videos in order of appearance."""
        return [part for message in self.messages for part in message.media]

    @property
    def answers(self) -> list[Message]:
        """The assistant's messages."""
        return [message for message in self.messages if message.role == "assistant"]


@dataclass(frozen=True)
class Document:
    """A sample for continued pre-training: text and images in order, without turns. All text is learned.

    Attributes:
        parts: The content. Adjacent texts are joined without a separator.
        loss_weight: Weight of all targets of the sample, at least 0.
        unused: See :class:`Conversation`.
        unknown: See :class:`Conversation`.
        columns: See :class:`Conversation`.
        shortened: See :class:`Conversation`.
    """

    parts: tuple[ContentPart, ...]
    loss_weight: float = 1.0
    unused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    columns: Columns = field(default_factory=dict)
    shortened: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_tuple("Document.parts", self.parts, (TextPart, ImagePart), "TextPart and ImagePart")
        _require_tuple("Document.unused", self.unused, (str,), "str")
        _require_tuple("Document.unknown", self.unknown, (str,), "str")
        _require_weight("Document.loss_weight", self.loss_weight)
        _require_columns("Document.columns", self.columns)

    @property
    def text(self) -> str:
        """All text, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> list[ImagePart]:
        """All images in order of appearance."""
        return [part for part in self.parts if isinstance(part, ImagePart)]


def _require_tuple(name: str, values: Any, kinds: tuple[type, ...], wanted: str) -> None:
    if not isinstance(values, tuple):
        single = isinstance(values, kinds)
        hint = "; write (value,) with a comma for a single one" if single else ""
        hint = "; write tuple(…) around the list" if isinstance(values, list) else hint
        raise TypeError(f"{name} is of type {_kind(values)}; it must be a tuple of {wanted}{hint}")
    for i, value in enumerate(values):
        if not isinstance(value, kinds):
            raise TypeError(f"{name}[{i}] is of type {_kind(value)}; it must be a tuple of {wanted}")


def _require_weight(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({_kind(value)}); it must be a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}; it must be finite and at least 0")


def _require_columns(name: str, columns: Any) -> None:
    if not isinstance(columns, Mapping) or not all(isinstance(key, str) and key for key in columns):
        raise TypeError(f"{name} is {columns!r}; it must map names to values")
    for key, value in columns.items():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, ColumnValue):
                raise TypeError(
                    f"{name}[{key!r}] holds {each!r} ({_kind(each)}); it may hold str, int, float, bool, None, or a "
                    "list of these"
                )
            if isinstance(each, float) and not math.isfinite(each):
                raise ValueError(f"{name}[{key!r}] holds {each}; numbers must be finite")
    try:
        json.dumps(dict(columns), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds text that is not Unicode: {error}") from error


def _require_arguments(name: str, values: Any) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"{name} is {values!r}; it must map names to values")
    if fault := arguments_fault(values):
        raise ValueError(f"{name}{fault}")


def arguments_fault(values: Mapping[str, Any]) -> str:
    """Says why JSON does not hold arguments of the chat template, as the rest of a sentence; "" if it does."""
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            return f".{name} is {value!r}, which JSON does not hold: {error}"
    return ""


def _kind(value: Any) -> str:
    return type(value).__name__
