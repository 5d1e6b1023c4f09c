"""Finds what a tensor of a pack should be among the tensors of its samples alone."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.integrations.check.packs import UNITS_OF, SampleBatch
from vlmdata.integrations.check.record import RecordedCall

type Calls = Mapping[str, list[RecordedCall]]


@dataclass(frozen=True)
class Spot:
    """A tensor of the computation: what a module got, or what it gave.

    Attributes:
        place: Name of the module or function.
        given: Whether it is an input.
        path: Which of its tensors.
    """

    place: str
    given: bool
    path: str


@dataclass(frozen=True, eq=False)
class Expected:
    """What a tensor of a pack should be.

    Attributes:
        parts: The tensor of each sample alone, None for one without rows of the unit.
        axis: The axis of rows.
        unit: What a row is: ``token``, ``target``, or a unit of images or of videos.
    """

    parts: Sequence[torch.Tensor | None]
    axis: int
    unit: str

    def is_made_of(self, parts: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are its parts: the same tensors, not equal ones."""
        return len(parts) == len(self.parts) and all(one is other for one, other in zip(parts, self.parts, strict=True))


class Replaced:
    """Knows tensors that were put in the place of others, because modules pass them on to each other."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Expected]] = {}

    def add(self, tensor: torch.Tensor, expected: Expected) -> None:
        """Takes note of a tensor that has all rows of the expected one."""
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, expected)

    def has(self, tensor: torch.Tensor, expected: Expected) -> bool:
        """Whether a tensor is one of these, unchanged, and made of the parts that are expected now."""
        found, version, before = self._known.get(id(tensor), (None, 0, expected))
        return (
            found is not None
            and found() is tensor
            and version == tensor._version
            and (before.axis, before.unit) == (expected.axis, expected.unit)
            and before.is_made_of(expected.parts)
        )


def expected_of(
    tensor: torch.Tensor, spot: Spot, calls: Sequence[list[RecordedCall]], data: SampleBatch, turn: int = 0
) -> Expected | None:
    """Finds what a tensor of a pack should be among those of its samples alone.

    The vision encoder may be called twice, for images and for videos: then the number of rows tells which.

    Args:
        tensor: The tensor.
        spot: What it is.
        calls: Of each sample.
        data: The pack.
        turn: How often the place was called before. It decides if a pack has as many rows of images as of videos.

    Returns:
        None if a sample does not have it, or has it in another shape.
    """
    there = [[(call.inputs if spot.given else call.outputs).get(spot.path) for call in each] for each in calls]
    for unit in sorted(data.totals, key=lambda unit: turn > 0 and unit in UNITS_OF[IMAGE]):
        for axis in range(tensor.ndim):
            if tensor.shape[axis] != data.totals[unit]:
                continue
            parts = _parts_of(tensor, there, data, unit, axis)
            if parts is not None:
                return Expected(parts, axis, unit)
    return None


def _parts_of(
    tensor: torch.Tensor, there: Sequence[Sequence[torch.Tensor | None]], data: SampleBatch, unit: str, axis: int
) -> list[torch.Tensor | None] | None:
    """Returns the part of each sample, None for one without rows of the unit; None if a sample has none that fits."""
    twice = any(unit in units for units in UNITS_OF.values())
    parts: list[torch.Tensor | None] = []
    for each, rows in zip(there, data.rows, strict=True):
        if len(each) > 1 and not twice:
            return None
        shape = list(tensor.shape)
        shape[axis] = rows.count(unit)
        fitting = [part for part in each if part is not None and list(part.shape) == shape]
        if not fitting and (rows.count(unit) or (each and not twice)):
            return None
        parts.append(fitting[-1 if unit in UNITS_OF[VIDEO] else 0] if fitting and rows.count(unit) else None)
    return parts if any(part is not None for part in parts) else None


def stitched(tensor: torch.Tensor, expected: Expected, data: SampleBatch) -> torch.Tensor:
    """Puts the parts of a tensor together; rows of padding are 0."""
    present = next(part for part in expected.parts if part is not None)
    whole = torch.zeros_like(tensor, dtype=present.dtype)
    for part, rows in zip(expected.parts, data.rows, strict=True):
        if part is not None:
            begin, end = rows.spans[expected.unit]
            whole.narrow(expected.axis, begin, end - begin).copy_(part)
    return whole
