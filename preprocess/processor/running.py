"""Runs a processor on the rendered text and the images of one sample, and follows the text to its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.families.tensors import JoinError
from vlmdata.media.image_file import picture_of

#: What a processor returns besides tensors for the model.
_TEXT = frozenset({"input_ids", "attention_mask", "text_replacement_offsets", "labels"})


class NotFollowed(ValueError):
    """The processor's text or tokens do not follow from the rendered text."""


@dataclass(frozen=True, eq=False)
class Processed:
    """What a processor made of a sample.

    Attributes:
        text: The text that it tokenized: that of the template with each placeholder replaced.
        ids: int64 (L,), its tokens.
        starts: int64 (L,), first character of each token in ``text``.
        ends: int64 (L,), one past its last character.
        moved: Where the parts of the rendered text between placeholders are: first character there, one past the last,
            and first character in ``text``.
        tensors: Arguments of the model by name.
    """

    text: str
    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    moved: tuple[tuple[int, int, int], ...]
    tensors: Mapping[str, torch.Tensor]

    def weights(
        self, weights: npt.NDArray[np.float32], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Moves the loss weights of the tokens of the rendered text to the tokens of the sample, by their characters.

        Args:
            weights: float32 (T,), of each token of the rendered text.
            starts: int64 (T,), its first character.
            ends: int64 (T,), one past its last.

        Raises:
            NotFollowed: If a target lies across a placeholder.
        """
        moved = np.zeros(len(self.ids), np.float32)
        bounds = np.flatnonzero(np.diff(weights, prepend=0, append=0))
        for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if not weights[first]:
                continue
            begin, end = int(starts[first]), int(ends[stop - 1])
            part = next((part for part in self.moved if part[0] <= begin and end <= part[1]), None)
            if part is None:
                raise NotFollowed("a target lies across the placeholder of an image")
            shift = part[2] - part[0]
            inside = (self.starts >= begin + shift) & (self.ends <= end + shift)
            moved[inside & (self.ends > self.starts)] = weights[first]
        return moved


@dataclass(frozen=True, eq=False)
class Runner:
    """A processor that is called as ``apply_chat_template`` calls it.

    Attributes:
        processor: The processor; its tokenizer keeps the texts that it gets.
        image: The token that stands for an image in rendered text.
        options: More arguments of each call.
        arguments: Names of the tensors that the model takes; None if they are not known.
    """

    processor: Any
    image: str
    options: Mapping[str, Any]
    arguments: frozenset[str] | None

    def run(self, text: str, images: Sequence[npt.NDArray[np.uint8]]) -> Processed:
        """Runs the processor on one sample.

        Args:
            text: The rendered text, with a placeholder for each image.
            images: uint8 (H, W, 3) each.

        Raises:
            NotFollowed: If its text or its tokens cannot be followed.
            JoinError: If something that it returns is not one tensor.
            Exception: Whatever the processor raises.
        """
        result, seen = self.call([text], [images])
        ids = _tensor("input_ids", result["input_ids"])[0].numpy().astype(np.int64)
        expanded = next((each for each in reversed(seen) if each is not None), None)
        expanded = expanded[0] if isinstance(expanded, list | tuple) and len(expanded) == 1 else expanded
        if not isinstance(expanded, str):
            raise NotFollowed("it does not give its tokenizer the text")
        encoding = self.processor.tokenizer.backend_tokenizer.encode(expanded, add_special_tokens=False)
        if encoding.ids != ids.tolist():
            raise NotFollowed("its tokens are not those of the text that it gives its tokenizer")
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        tensors = self._tensors(result)
        return Processed(expanded, ids, offsets[:, 0], offsets[:, 1], self._moved(text, expanded), tensors)

    def call(
        self, texts: Sequence[str], images: Sequence[Sequence[npt.NDArray[np.uint8]]], **options: Any
    ) -> tuple[Mapping[str, Any], list[Any]]:
        """Calls the processor on samples. Returns what it returns, and the texts that its tokenizer got."""
        seen: list[Any] = []
        self.processor.tokenizer.vlmdata_seen = seen
        pictures = [[picture_of(image) for image in each] for each in images]
        given = {"images": pictures} if any(pictures) else {}
        result = self.processor(
            text=list(texts),
            **given,
            **{"return_tensors": "pt", "add_special_tokens": False, **self.options, **options},
        )
        return result, seen

    def batch(self, texts: Sequence[str], images: Sequence[Sequence[npt.NDArray[np.uint8]]]) -> dict[str, torch.Tensor]:
        """Returns the tensors of samples together in a padded batch, without those that have a row per sample."""
        result, _ = self.call(texts, images, padding=True)
        found = self._tensors(result)
        rows = _tensor("input_ids", result["input_ids"]).shape
        return {name: value for name, value in found.items() if value.shape[:2] != rows}

    def _tensors(self, result: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        names = [name for name in result if name not in _TEXT]
        wanted = names if self.arguments is None else [name for name in names if name in self.arguments]
        return {name: _tensor(name, result[name]) for name in wanted}

    def _moved(self, text: str, expanded: str) -> tuple[tuple[int, int, int], ...]:
        """Finds the parts of the rendered text between placeholders in the expanded text, in order."""
        parts, found = text.split(self.image), list[tuple[int, int, int]]()
        begin = there = 0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            at = expanded.rfind(part) if last and number else expanded.find(part, there)
            if at < there or (last and expanded[at + len(part) :]) or (not number and at):
                raise NotFollowed(f"it does not keep the text around images: {part[:60]!r} is missing or moved")
            found.append((begin, begin + len(part), at))
            begin, there = begin + len(part) + len(self.image), at + len(part)
        return tuple(found)


def _tensor(name: str, value: Any) -> torch.Tensor:
    """Returns a value as a tensor; a JoinError if it is none, as lists of tensors of several sizes."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(each, int | float) for each in value):
            return torch.tensor(value)
        parts = [_tensor(name, each) for each in value]
        if len({(part.shape, part.dtype) for part in parts}) == 1:
            return torch.stack(parts)
        raise JoinError(f"{name}: it is a list of {[list(part.shape) for part in parts]!r:.120}, not one tensor")
    raise JoinError(f"{name}: it is a {type(value).__name__}, not a tensor")


def keep_texts(tokenizer: Any) -> None:
    """Lets a tokenizer keep the texts of its calls in ``vlmdata_seen``: a processor returns only their tokens."""
    kind = type(tokenizer)

    def called(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.vlmdata_seen.append(text)
        return kind.__call__(self, text, *args, **kwargs)

    # Some processors look at the name of the class.
    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": called, "__module__": kind.__module__})
    tokenizer.vlmdata_seen = []
