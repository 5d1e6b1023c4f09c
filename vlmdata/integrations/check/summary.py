"""The largest difference of each part of a model, for the table of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmdata.integrations.check.compare import FORWARD, Difference, Tolerance
from vlmdata.integrations.check.diagnose import Leak, Scene, kind_of
from vlmdata.integrations.check.expected import Spot
from vlmdata.integrations.check.outcomes import Whole

#: The parts of a report, in its order. Modules of kind ``other`` are norms, projections, experts.
PARTS = (
    "tokens",
    "images",
    "deepstack",
    "positions",
    "attention",
    "linear attention",
    "other modules",
    "multi-token prediction",
    "logits",
    "loss",
    "gradients",
)
_PART_OF = {
    Leak.TOKENS: "tokens",
    Leak.PIXELS: "images",
    Leak.DEEPSTACK: "deepstack",
    Leak.POSITION: "positions",
    Leak.ATTENTION: "attention",
    Leak.STATE: "linear attention",
    Leak.CONVOLUTION: "linear attention",
    Leak.LABELS: "loss",
    Leak.MTP: "multi-token prediction",
}


@dataclass(frozen=True)
class Comparison:
    """What was compared of one part of a model.

    Attributes:
        part: One of :data:`PARTS`.
        places: How many modules, functions or parameters.
        error: The largest relative error, in relation to its tolerance.
        tolerance: The tolerance there.
    """

    part: str
    places: int
    error: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the part is as it should be."""
        return self.error <= self.tolerance


def comparisons_of(
    differences: Sequence[tuple[Difference, Scene]], wholes: Sequence[Whole], tolerance: Tolerance
) -> tuple[Comparison, ...]:
    """Finds the largest difference of each part."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for difference, scene in differences:
        spot = difference.spot
        if spot.place != FORWARD:
            part = _PART_OF.get(kind_of(difference, scene, tolerance), "other modules")
            found.setdefault(part, []).append((spot.place, difference.error, tolerance.of(spot)))
    for whole in wholes:
        for name, error in whole.outputs.items():
            part = name if name in PARTS else "multi-token prediction"
            allowed = max(tolerance.whole, tolerance.measured.get(Spot(FORWARD, True, name), 0.0))
            found.setdefault(part, []).append((name, error, allowed))
        for name, error in whole.gradients.items():
            found.setdefault("gradients", []).append((name, error, tolerance.of_gradient(name)))
    made = []
    for part in PARTS:
        if part in found:
            _, error, allowed = max(found[part], key=lambda each: each[1] / each[2])
            made.append(Comparison(part, len({name for name, _, _ in found[part]}), error, allowed))
    return tuple(made)
