"""Compares a pack with its samples alone, module by module, each with the inputs that it should have had.

While a pack is computed, every tensor that is also known from the samples alone is compared with them, and then
replaced by them. So each module computes with right inputs: what it gets wrong is its own fault, one fault does not
hide another, and rounding does not add up from layer to layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlmdata.integrations.check.expected import Calls, Replaced, Spot, expected_of, stitched
from vlmdata.integrations.check.own import Computed
from vlmdata.integrations.check.packs import SampleBatch
from vlmdata.integrations.check.probe import Influence, probe
from vlmdata.integrations.check.record import (
    RecordedCall,
    Site,
    Tensors,
    inputs_of,
    into_shared,
    named_arguments,
    replaced,
    tensors_of,
)

#: Rows are compared relative to their own size, or to this share of the median row's where they are smaller.
_LEAST_SHARE = 0.1
#: The place of what the forward pass returns.
FORWARD = "forward"


@dataclass(frozen=True, eq=False)
class Difference:
    """How far a tensor of a pack is from those of its samples alone.

    Attributes:
        spot: Which tensor.
        caller: Name of the module whose code was running: for an input, the one that made it.
        order: Running number in the computation.
        error: Largest error of a row, relative to its size.
        sample: Number in the pack of the sample with that row.
        row: Number of that row in the sample.
        unit: What a row is.
        rows: float32 (rows of the unit,), the error of each row of the pack; 0 on padding.
        source: Key of another sample whose values the worst row has, or "".
        values: Integers of that row in the pack and alone, in words, or "".
    """

    spot: Spot
    caller: str
    order: int
    error: float
    sample: int
    row: int
    unit: str
    rows: torch.Tensor
    source: str = ""
    values: str = ""


class Forced:
    """A listener that compares a pack with its samples alone, and puts their values in the place of its own.

    Args:
        data: The pack.
        alone: The calls of each of its samples, in pack order.
        probed: Places at which to find out how far tokens of a sample reach into others.
        ends: Last tokens of a sample that modules of multi-token prediction may compute from anything, because they
            have no target.

    Attributes:
        differences: By spot, in order of computation.
        influences: By name of a probed place.
        places: All places that were called, by name.
    """

    def __init__(self, data: SampleBatch, alone: Sequence[Calls], probed: frozenset[str] = frozenset(), ends: int = 0):
        self.data, self._alone, self._probed, self._ends = data, alone, probed, ends
        self.differences: dict[Spot, Difference] = {}
        self.influences: dict[str, Influence] = {}
        self.places: dict[str, Site] = {}
        self._callers: list[str] = []
        self._heard: Counter[str] = Counter()
        self._passive = False
        self._replaced = Replaced()
        self._masks: dict[tuple[str, torch.device, int], torch.Tensor] = {}

    def call(self, place: Site, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compares and replaces inputs and outputs of a call."""
        if self._passive:
            return compute(*args, **kwargs)
        self.places[place.name] = place
        turn = self._heard[place.name]
        self._heard[place.name] += 1
        names = list(named_arguments(place.module, args, {}, bool(place.function)))
        right = self._right(place, True, turn)
        args = tuple(replaced(value, right, name) for name, value in zip(names, args, strict=True))
        kwargs = into_shared(kwargs, {name: replaced(value, right, name) for name, value in kwargs.items()})
        self._callers.append(place.name)
        output = compute(*args, **kwargs)
        self._callers.pop()
        if place.name in self._probed and place.name not in self.influences:
            self._passive = True
            found = self._probe(place, compute, args, kwargs, output, turn)
            self._passive = False
            if found is not None:
                self.influences[place.name] = found
        return replaced(output, self._right(place, False, turn))

    def finish(self, outcome: Computed, alone: Sequence[Computed]) -> None:
        """Compares what the forward pass returned; a loss that is a scalar is compared by the caller."""
        theirs = [RecordedCall({}, tensors_of_outcome(each)) for each in alone]
        for path, value in tensors_of_outcome(outcome).items():
            self._compare(Spot(FORWARD, False, path), value, [[each] for each in theirs])

    def _probe(
        self,
        place: Site,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        turn: int,
    ) -> Influence | None:
        calls = self._calls_of(place.name)
        given = inputs_of(place.module, args, kwargs, bool(place.function))
        tensors = ((True, given), (False, tensors_of(output)))
        found = [_axes(each, into, place, calls, self.data, turn) for into, each in tensors]
        unit = next((unit for _, unit in found[1].values()), "")
        into, out = ({path: axis for path, (axis, of) in each.items() if of == unit} for each in found)
        return probe(place, compute, args, kwargs, self.data, unit, into, out) if into and out else None

    def _calls_of(self, name: str) -> list[list[RecordedCall]]:
        return [each.get(name, []) for each in self._alone]

    def _right(self, place: Site, given: bool, turn: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
        calls = self._calls_of(place.name)

        def right(path: str, tensor: torch.Tensor) -> torch.Tensor:
            return self._compare(Spot(place.name, given, path), tensor, calls, turn)

        return right

    def _compare(
        self, spot: Spot, tensor: torch.Tensor, calls: Sequence[list[RecordedCall]], turn: int = 0
    ) -> torch.Tensor:
        expected = expected_of(tensor, spot, calls, self.data, turn)
        if expected is None:
            return tensor
        if self._replaced.has(tensor, expected):
            if is_compared(spot, tensor) and spot not in self.differences:
                self.differences[spot] = self._none(spot, expected.unit)
            return tensor
        value = stitched(tensor, expected, self.data)
        if is_compared(spot, tensor):
            found, wanted = tensor.detach().movedim(expected.axis, 0), value.movedim(expected.axis, 0)
            difference = self._difference(spot, found, wanted, expected.unit)
            if spot not in self.differences or difference.error > self.differences[spot].error:
                self.differences[spot] = difference
        mask = self._real_rows(expected.unit, tensor.device)
        shape = [-1 if axis == expected.axis else 1 for axis in range(tensor.ndim)]
        right = torch.where(mask.view(shape), value.to(tensor.dtype), tensor)
        if value.dtype == tensor.dtype:
            self._replaced.add(right, expected)
        return right

    def _none(self, spot: Spot, unit: str) -> Difference:
        rows = torch.zeros(self.data.totals[unit])
        return Difference(spot, self._caller(), len(self.differences), 0.0, 0, 0, unit, rows)

    def _caller(self) -> str:
        return self._callers[-1] if self._callers else ""

    def _real_rows(self, unit: str, device: torch.device, ends: int = 0) -> torch.Tensor:
        """Returns bool (rows,), False on padding and on the last ``ends`` rows of each sample."""
        key = (unit, device, ends)
        if key not in self._masks:
            mask = torch.zeros(self.data.totals[unit], dtype=torch.bool)
            for each in self.data.rows:
                begin, end = each.spans[unit]
                mask[begin : max(begin, end - ends)] = True
            self._masks[key] = mask.to(device)
        return self._masks[key]

    def _difference(self, spot: Spot, found: torch.Tensor, wanted: torch.Tensor, unit: str) -> Difference:
        ends = self._ends if "mtp" in spot.place and unit == "token" else 0
        mask = self._real_rows(unit, found.device, ends)
        rows = row_errors(found, wanted, mask, whole=spot.place == FORWARD)
        worst = int(rows.argmax()) if len(rows) else 0
        spans = [each.spans[unit] for each in self.data.rows]
        sample = next((number for number, (begin, end) in enumerate(spans) if begin <= worst < end), 0)
        error = float(rows[worst]) if len(rows) else 0.0
        source = values = ""
        if error > 1e-3 and found.is_floating_point():
            source = self._source(found[worst], wanted, spans, sample)
        elif error:
            values = f"{_numbers(found[worst])}, alone {_numbers(wanted[worst])}"
        order = self.differences[spot].order if spot in self.differences else len(self.differences)
        return Difference(
            spot, self._caller(), order, error, sample, worst - spans[sample][0], unit, rows.cpu(), source, values
        )

    def _source(self, row: torch.Tensor, wanted: torch.Tensor, spans: Sequence[tuple[int, int]], sample: int) -> str:
        """Key of another sample that has such a row, if its own sample has none."""
        flat, row = wanted.reshape(len(wanted), -1).float(), row.reshape(-1).float()
        if row.numel() < 4 or not bool(row.any()):
            return ""
        near = (flat - row).norm(dim=1) <= 1e-3 * row.norm()
        holders = [n for n, (begin, end) in enumerate(spans) if bool(near[begin:end].any())]
        return self.data.rows[holders[0]].key if holders and sample not in holders else ""


def _numbers(row: torch.Tensor) -> str:
    """The first integers of a row, each once if all are equal."""
    numbers = row.flatten()[:4].tolist()
    return ", ".join(str(each) for each in (numbers[:1] if len(set(numbers)) == 1 else numbers))


def tensors_of_outcome(outcome: Computed) -> Tensors:
    """The tensors of an outcome that have rows, by name."""
    found: Tensors = {} if outcome.logits is None else {"logits": outcome.logits}
    if outcome.losses.ndim:
        found["loss"] = outcome.losses
    return found | {f"mtp_losses.{depth}": each for depth, each in enumerate(outcome.mtp)}


def is_compared(spot: Spot, tensor: torch.Tensor) -> bool:
    """Whether a difference of a tensor is a fault: numbers of experts may differ by rounding."""
    return tensor.is_floating_point() or (spot.given and not any(part in spot.place for part in ("mlp", "experts")))


def _axes(
    tensors: Tensors, given: bool, place: Site, calls: Sequence[list[RecordedCall]], data: SampleBatch, turn: int
) -> dict[str, tuple[int, str]]:
    """The axis of tokens or patches of each tensor that has one, by path, and which of them it is."""
    found = {}
    for path, tensor in tensors.items():
        expected = expected_of(tensor, Spot(place.name, given, path), calls, data, turn)
        if expected is not None and expected.unit in ("token", "patch", "video patch") and tensor.is_floating_point():
            found[path] = (expected.axis, expected.unit)
    return found


def row_errors(found: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor, whole: bool = False) -> torch.Tensor:
    """Relative error of each row: float32 (rows,), 0 where the mask is False. Integers are equal (0) or not (1).

    Args:
        found: (rows, …).
        wanted: (rows, …).
        mask: bool (rows,).
        whole: Whether small rows count relative to the size of all, as losses of almost 0 do.
    """
    found, wanted = found.reshape(len(mask), -1), wanted.reshape(len(mask), -1)
    if not found.is_floating_point():
        return ((found != wanted).any(dim=1) & mask).float()
    found, wanted = found.float(), wanted.float()
    norms = wanted.norm(dim=1)
    real = norms[mask]
    least = 0.0
    if len(real):
        least = float(real.square().mean().sqrt()) if whole else _LEAST_SHARE * float(real.median())
    errors = (found - wanted).norm(dim=1) / norms.clamp(min=max(least, 1e-12))
    errors = torch.where(mask, errors, torch.zeros_like(errors))
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True)
class Tolerance:
    """The largest relative error that is no fault.

    Attributes:
        local: Of a tensor whose inputs are right, at least.
        mean: Of a mean loss whose inputs are right, at least: wrong targets change it little.
        whole: Of logits and losses of an unchanged run, at least.
        gradients: Of gradients, at least.
        measured: By spot, for low precision: of a tensor; of a whole output, with ``given``; of a gradient, with the
            parameter as place.
    """

    local: float
    mean: float
    whole: float
    gradients: float
    measured: Mapping[Spot, float] = field(default_factory=dict)

    def of(self, spot: Spot) -> float:
        """The tolerance of a tensor."""
        return max(self.local, self.measured.get(spot, 0.0))

    def of_gradient(self, parameter: str) -> float:
        """The tolerance of the gradient of a parameter."""
        return max(self.gradients, self.measured.get(Spot(parameter, False, "gradient"), 0.0))
