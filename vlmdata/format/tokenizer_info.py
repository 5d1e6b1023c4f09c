"""The special tokens of a dataset's tokenizer as ids, in the form of the manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.chat import IMAGE

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TurnTokens:
    """Ids of the tokens of turns: :class:`~vlmdata.families.chat.ChatFormat`."""

    start: int  # id of the token that begins a turn
    end: int  # id of the token that ends it
    assistant: tuple[int, ...]  # ids of the header, which follow ``start`` in an assistant turn
    begin: int = -1  # id of the token that begins each text; -1 without one
    response: tuple[int, ...] = ()  # ids before and after the response of a tool within an assistant turn; () without

    @property
    def endings(self) -> tuple[int, ...]:
        """Ids of the tokens with which the model ends what it says."""
        return self.end, *self.response[:1]

    def spoken(self, ids: npt.NDArray[np.integer], items: Collection[int] = ()) -> list[tuple[int, int]]:
        """Returns what the assistant says in one of its turns: all but the responses of tools, with their images.

        Args:
            ids: Tokens of the turn, from its first one to the next turn.
            items: Ids of the tokens of images, which may follow a response.

        Returns:
            Token ranges. Each but the last ends with the token that begins a response.
        """
        if not self.response:
            return [(0, len(ids))]
        found: list[tuple[int, int]] = []
        begin: int | None = 0
        for at in np.flatnonzero(np.isin(ids, self.response)).tolist():
            if ids[at] == self.response[1]:
                begin = next((place for place in range(at + 1, len(ids)) if ids[place] not in items), len(ids))
            elif begin is not None:
                found += [(begin, at + 1)] if at > begin else []  # the next of several responses
                begin = None
        # A turn may end with a response: then its end is not the model's.
        more = begin is not None and begin < len(ids) and ids[begin] != self.end
        return found + ([(begin, len(ids))] if begin is not None and more else [])


@dataclass(frozen=True)
class ItemTokens:
    """Ids of the tokens of an item: :class:`~vlmdata.families.chat.Expansion`."""

    token: int  # id of the placeholder
    before: tuple[int, ...]  # ids of the tokens directly before the placeholders
    after: tuple[int, ...]  # ids of the tokens directly after them
    between: tuple[int, ...] = ()  # ids of other tokens that stand among the placeholders

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids of the tokens of a block between its marks: of the placeholder, and of the others among them."""
        return self.token, *self.between

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, in order, with one placeholder."""
        return *self.before, self.token, *self.after


@dataclass(frozen=True)
class TokenizerInfo:
    """Tokenizer data that reading and auditing need, without loading the tokenizer.

    Attributes:
        name: Name or path from which it was loaded.
        fingerprint: sha256 of its vocabulary, merges, added tokens and pipeline.
        chat_template: sha256 of the chat template.
        vocab_size: Number of ids, added tokens included.
        pad: Padding id.
        turns: Ids of the tokens of turns.
        items: Ids of the tokens of items, by kind.
        special_tokens: Named special tokens (``pad_token``, ``eos_token`` …), which chat templates may write. Empty in
            manifests of format 1.0.
        end_of_text: Id of the token that ends documents. -1 in manifests of format 1.0.
    """

    name: str
    fingerprint: str
    chat_template: str
    vocab_size: int
    pad: int
    turns: TurnTokens
    items: Mapping[str, ItemTokens]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    end_of_text: int = -1

    @property
    def image(self) -> int:
        """Id of the image placeholder."""
        return self.items[IMAGE].token

    @property
    def item_ids(self) -> tuple[int, ...]:
        """All ids of the tokens of items."""
        return tuple(dict.fromkeys(token for item in self.items.values() for token in (*item.ids, *item.between)))

    @property
    def placeholders(self) -> dict[str, tuple[int, ...]]:
        """Ids of the placeholder of each kind of items, and of the tokens between."""
        return {kind: item.placeholders for kind, item in self.items.items()}

    @property
    def all_placeholders(self) -> tuple[int, ...]:
        """All ids of :attr:`placeholders`."""
        return tuple(chain.from_iterable(self.placeholders.values()))


def special_texts(family: Family) -> dict[str, tuple[str, ...]]:
    """Returns the texts of a family's special tokens, by their place in :class:`TokenizerInfo`, as ``turns.start``."""
    chat = family.chat
    texts: dict[str, tuple[str, ...]] = {"turns.start": (chat.turn_start,), "turns.end": (chat.turn_end,)}
    if chat.begin:
        texts["turns.begin"] = (chat.begin,)
    if chat.tool_response is not None:
        texts["turns.response"] = chat.tool_response
    for item in family.items:
        place = f"items.{item.kind}"
        texts |= {f"{place}.before": item.before, f"{place}.token": (item.token,), f"{place}.after": item.after}
        texts[f"{place}.between"] = item.between
    return texts


def special_ids(tokenizer: Tokenizer, family: Family, named: Callable[[str], str | None]) -> dict[str, Any]:
    """Returns the special ids of a tokenizer for a family, by their place in :class:`TokenizerInfo`.

    Args:
        tokenizer: The tokenizer.
        family: Tells the texts.
        named: Returns the text in a setting of the tokenizer, None without it.

    Returns:
        An id or a tuple of them; None, or a tuple with None, if a token is missing.
    """
    chat, settings = family.chat, dict(family.token_settings)
    ids: dict[str, Any] = {"turns.begin": -1}
    for place, texts in special_texts(family).items():
        found = tuple(tokenizer.token_to_id((text in settings and named(settings[text])) or text) for text in texts)
        ids[place] = found if place.endswith(("before", "after", "between", "response")) else found[0]
    # After the turn's start, as in a conversation: some tokenizers put a space before the first word of a text.
    header = tokenizer.encode(chat.turn_start + chat.assistant_header, add_special_tokens=False)
    ids["turns.assistant"] = tuple(header.ids[1:])
    # Flagged special, so that data cannot spell it.
    special = {each.content: id for id, each in tokenizer.get_added_tokens_decoder().items() if each.special}
    ends = (special.get(text) for text in (chat.end_of_text, named("eos_token") or ""))
    ids["end_of_text"] = next((id for id in ends if id is not None), ids["turns.end"])
    return ids


def nested(ids: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON object of ids by place, as :func:`special_ids` gives them."""
    made: dict[str, Any] = {}
    for place, value in ids.items():
        *outer, last = place.split(".")
        inner = made
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return made


def flat(fields: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the values of nested objects by place: the inverse of :func:`nested`."""
    made: dict[str, Any] = {}
    for name, value in fields.items():
        made |= flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {path + name: value}
    return made


#: The fields of the formats 1.0 and 1.1, whose datasets are all of Qwen's families, and where their values are now.
_PLACES_OF_1 = {
    "im_start": ("turns.start",),
    "im_end": ("turns.end",),
    "assistant_header": ("turns.assistant",),
    "image": ("items.image.token",),
    "video": ("items.video.token",),
    "vision_start": ("items.image.before", "items.video.before"),
    "vision_end": ("items.image.after", "items.video.after"),
}


def in_present_form(fields: Any) -> Any:
    """Returns a manifest's ``tokenizer`` with the present fields, to which those of format 1 are mapped."""
    if not isinstance(fields, Mapping) or "im_start" not in fields:
        return fields
    ids = {
        place: [fields[name]] if name.startswith("vision") else fields[name]
        for name, places in _PLACES_OF_1.items()
        for place in places
    }
    return {name: value for name, value in fields.items() if name not in _PLACES_OF_1} | nested(ids)


def require_items(info: TokenizerInfo, family: Family) -> None:
    """Checks that a tokenizer has the tokens of each kind of items of a family.

    Raises:
        KeyError: If it lacks some.
    """
    for item in family.items:
        if item.kind not in info.items:
            raise KeyError(f"tokenizer.items.{item.kind}")


def tokenizer_to_json(info: TokenizerInfo, schema_version: str) -> dict[str, Any]:
    """Returns the JSON form in a schema. A manifest that was read keeps its own, and so its fingerprint."""
    fields = dataclasses.asdict(info)
    if schema_version.startswith("1."):
        ids = flat({name: fields.pop(name) for name in ("turns", "items")})
        for name, (place, *_) in _PLACES_OF_1.items():
            fields[name] = ids[place][0] if name.startswith("vision") else ids[place]
    elif not fields["turns"]["response"]:
        del fields["turns"]["response"]
    for item in fields.get("items", {}).values():
        if not item["between"]:
            del item["between"]
    if not fields["special_tokens"]:
        del fields["special_tokens"]
    if fields["end_of_text"] < 0:
        del fields["end_of_text"]
    return fields
