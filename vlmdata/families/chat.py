"""How a family writes conversations and items as text. The manifest has the ids (``vlmdata.format.tokenizer_info``)."""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of items.
IMAGE, VIDEO = "image", "video"


@dataclass(frozen=True)
class ChatFormat:
    r"""How chat templates of a family write turns: ``turn_start``, a header, the content, ``turn_end``.

    Attributes:
        turn_start: Text of the token that begins a turn.
        turn_end: Text of the token that ends a turn. The token that ends the header may follow, usually a newline; in
            an assistant turn it is learned with the turn's end.
        assistant_header: Text between ``turn_start`` and the content of an assistant turn, such as ``assistant\n``.
        think: Texts before and after the reasoning with which an assistant turn may begin, with their whitespace;
            None if the family has no such marks.
        begin: Text of the token that begins each conversation and document; "" without one.
        end_of_text: Text of the token that ends documents. A tokenizer without it ends them with its end token, or
            with ``turn_end``.
        tool_response: Texts of the tokens before and after the response of a tool, if templates write it within the
            assistant turn that called the tool; None if it is a turn of its own. The first one ends what the model
            says before it.
        markup: Parts of the texts of special tokens that data may contain as text: they mark up content, such as boxes,
            not turns or items.
    """

    turn_start: str
    turn_end: str
    assistant_header: str
    think: tuple[str, str] | None = None
    begin: str = ""
    end_of_text: str = "<|endoftext|>"
    tool_response: tuple[str, str] | None = None
    markup: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expansion:
    """The tokens of an item: ``before``, its placeholders as the family counts them, ``after``.

    Attributes:
        kind: Kind of the items.
        token: Text of the placeholder, the token that stands for a part of the item.
        before: Texts of the tokens directly before the placeholders.
        after: Texts of the tokens directly after them.
        margin: Text on both sides of these tokens, such as an empty line.
        written: The one of these tokens that chat templates write for an item; "" if they write all, with one
            placeholder. transformers' processor replaces it by all of them with their margins.
        caption: Text before each temporal patch of a video, formatted with its time in ``seconds``. With it, each
            temporal patch is a block of its own: caption, ``before``, placeholders, ``after``. All blocks stand in
            place of the placeholder that the template writes, so its own ``before`` and ``after`` enclose them. "" is
            one block for all of an item.
        between: Texts of other tokens that stand among the placeholders of a block, such as the break after a row.
            ``Family.placeholders`` tells where.
    """

    kind: str
    token: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    margin: str = ""
    written: str = ""
    caption: str = ""
    between: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.written and self.written not in self.texts:
            raise ValueError(f"written is {self.written!r}; it must be one of the item's tokens {self.texts}")

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of its tokens in order, with one placeholder."""
        return *self.before, self.token, *self.after

    def blocks(self, grid: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
        """Returns the grids of an item's blocks: runs of placeholders with text in between."""
        return ((1, *grid[1:]),) * grid[0] if self.caption else (grid,)
