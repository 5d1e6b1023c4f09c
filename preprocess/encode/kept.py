"""Conversations and documents as text beside their samples (``--keep-conversations``), and back.

The text is JSON, with the keys of tools and calls in the order of the data, which chat templates write. Of images and
videos it has what the row asked for and the size of the file; their pixels are in the shard.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmdata.media.codecs import IMAGE, VIDEO
from vlmdata.preprocess.conversation import (
    ContentPart,
    Conversation,
    Document,
    ImagePart,
    MediaPart,
    Message,
    TextPart,
    VideoPart,
)
from vlmdata.preprocess.encode.stored import StoredImage, StoredVideo
from vlmdata.preprocess.recipes.base import Candidate

#: Fields of images and videos that are not the data's request; the encoder sets the times of a video.
_NOT_ASKED = ("data", "seconds")
#: Stands for a candidate that cannot be text.
NOT_KEPT = ""


@dataclass(frozen=True)
class KeptPart:
    """An image or video of a kept conversation."""

    kind: str  # ``image`` or ``video``
    asked: Mapping[str, Any]  # fields of its part, without data
    file_bytes: int  # size of its file


@dataclass(frozen=True)
class Kept:
    """A candidate, as its first sample tells it."""

    sample: int | None  # its number in the list of its row; None without a list
    of: int  # candidates in that list
    outcomes: int  # samples and rejections that it became
    made: Mapping[str, Any]  # JSON of the conversation or document

    @classmethod
    def read(cls, text: str) -> Kept:
        """Parses the result of :func:`kept_text`."""
        return cls(**json.loads(text))

    def media(self) -> list[KeptPart]:
        """Returns its images and videos, in order."""
        return [_kept_part(part) for turn in _turns(self.made) for part in turn if isinstance(part, Mapping)]

    def rebuilt(self, media: Callable[[int, KeptPart], MediaPart]) -> Conversation | Document:
        """Returns the conversation or document.

        Args:
            media: Makes the part of the image or video of this number.
        """
        made = dict(self.made)
        made |= {name: tuple(made[name]) for name in ("unused", "unknown")}
        numbers = iter(range(len(self.media())))

        def parts(given: list[Any]) -> tuple[Any, ...]:
            return tuple(
                TextPart(each) if isinstance(each, str) else media(next(numbers), _kept_part(each)) for each in given
            )

        if "messages" not in made:
            return Document(**{**made, "parts": parts(made["parts"])})
        messages = tuple(
            Message(**{**turn, "parts": parts(turn["parts"]), "tool_calls": tuple(turn["tool_calls"])})
            for turn in made["messages"]
        )
        made["box_images"] = tuple(map(tuple, made.get("box_images", ())))
        return Conversation(**{**made, "messages": messages, "tools": tuple(made["tools"])})


def kept_text(made: Conversation | Document, candidate: Candidate, outcomes: int) -> str:
    """Returns a candidate as text; :data:`NOT_KEPT` if it has values of tools that JSON cannot hold, such as dates.

    Args:
        made: The result of the recipe.
        candidate: Its place in the list of its row.
        outcomes: Samples and rejections that it became.
    """
    fields = {"sample": candidate.sample, "of": candidate.of, "outcomes": outcomes, "made": _to_json(made)}
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs, which only escapes can hold
        text = json.dumps(fields, separators=(",", ":"))
    except (TypeError, ValueError):
        return NOT_KEPT
    return text if json.loads(text) == fields else NOT_KEPT


def _to_json(made: Conversation | Document) -> dict[str, Any]:
    common = {
        "loss_weight": made.loss_weight,
        "unused": list(made.unused),
        "unknown": list(made.unknown),
        "columns": dict(made.columns),
    }
    if isinstance(made, Document):
        return {"parts": list(map(_part, made.parts)), **common}
    turns = [
        {
            "role": turn.role,
            "parts": list(map(_part, turn.parts)),
            "reasoning": turn.reasoning,
            "tool_calls": [dict(call) for call in turn.tool_calls],
            "loss_weight": turn.loss_weight,
            **({} if turn.call_id is None else {"call_id": turn.call_id}),
            **({} if turn.tool_name is None else {"tool_name": turn.tool_name}),
        }
        for turn in made.messages
    ]
    if made.template_arguments:
        common["template_arguments"] = dict(made.template_arguments)
    if made.box_images:
        common["box_images"] = list(map(list, made.box_images))
    if made.variant:
        common["variant"] = dict(made.variant)
    return {"messages": turns, "tools": [dict(tool) for tool in made.tools], **common}


def _part(part: ContentPart) -> str | dict[str, Any]:
    if isinstance(part, TextPart):
        return part.text
    assert isinstance(part, MediaPart)  # boxes, points and labels are text by now
    kind = ImagePart if isinstance(part, ImagePart) else VideoPart
    asked = {each.name: getattr(part, each.name) for each in dataclasses.fields(kind) if each.name not in _NOT_ASKED}
    asked = {name: value for name, value in asked.items() if value is not None}
    if "region" in asked:
        asked["region"] = list(asked["region"])
    return {IMAGE if kind is ImagePart else VIDEO: asked, "bytes": _file_bytes(part)}


def _file_bytes(part: MediaPart) -> int:
    if isinstance(part, StoredImage):
        return part.views[0].file_bytes
    if isinstance(part, StoredVideo):
        return part.item.file_bytes
    return len(part.data) if isinstance(part.data, bytes) else sum(map(len, part.data))


def _kept_part(fields: Mapping[str, Any]) -> KeptPart:
    kind = next(name for name in fields if name != "bytes")
    asked = dict(fields[kind])
    if "region" in asked:
        asked["region"] = tuple(asked["region"])
    return KeptPart(kind, asked, fields["bytes"])


def _turns(made: Mapping[str, Any]) -> list[list[Any]]:
    return [turn["parts"] for turn in made["messages"]] if "messages" in made else [made["parts"]]
