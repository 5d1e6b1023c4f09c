"""What an edit of a row changed in its sample: lines of text, and boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.boxes import BoxDescription
from vlmdata.inspect.sample import SampleDescriber, SampleDescription
from vlmdata.select.compare import ChangedSample


@dataclass(frozen=True)
class Edit:
    """A sample of two datasets, and how it differs. Texts are those of the tokens, template included.

    Attributes:
        id: What the data calls its row; None if it is paired by its key.
        keys: Its key in each dataset.
        parts: What differs: tokens, targets, weights, positions, images.
        old: Lines of text that only the first has.
        new: Lines of text that only the second has.
        old_boxes: Boxes and points that only the first has: label and numbers as in the text.
        new_boxes: Those that only the second has.
    """

    id: str | None
    keys: tuple[str, str]
    parts: tuple[str, ...]
    old: tuple[str, ...]
    new: tuple[str, ...]
    old_boxes: tuple[str, ...]
    new_boxes: tuple[str, ...]


class EditDescriber:
    """Describes changed samples of two datasets. Reads the shards of these samples.

    Raises:
        DatasetFormatError: If the tokenizer of one cannot be read.
    """

    def __init__(self, first: VlmDataset, second: VlmDataset):
        self._sides = (SampleDescriber(first), SampleDescriber(second))

    def __call__(self, changed: ChangedSample) -> Edit:
        """Describes one changed sample."""
        keys = (changed.key, changed.second_key or changed.key)
        one, other = (side(side.dataset.index.position_of(key)) for side, key in zip(self._sides, keys, strict=True))
        old, new = _other_lines(_text(one), _text(other))
        boxes = [Counter(map(_box, each.boxes)) for each in (one, other)]
        return Edit(
            changed.id,
            keys,
            changed.parts,
            old,
            new,
            tuple((boxes[0] - boxes[1]).elements()),
            tuple((boxes[1] - boxes[0]).elements()),
        )


def _text(sample: SampleDescription) -> str:
    return "".join(span.text for span in sample.spans)


def _other_lines(first: str, second: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the lines that only one of two texts has, in their order."""
    one, other = first.splitlines(), second.splitlines()
    steps = [step for step in SequenceMatcher(None, one, other, autojunk=False).get_opcodes() if step[0] != "equal"]
    return _joined(one[a:b] for _, a, b, _, _ in steps), _joined(other[c:d] for _, _, _, c, d in steps)


def _joined(parts: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(line for part in parts for line in part)


def _box(box: BoxDescription) -> str:
    numbers = ", ".join(f"{number:g}" for number in box.written)
    return f"{box.label or 'no label'} [{numbers}]"
