"""Settings of a plan: everything it depends on besides the samples and the epoch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from typing import Any, Literal

from vlmdata.differences import differing
from vlmdata.errors import UsageError
from vlmdata.packing.cost import DEFAULT_COST, CostModel, cost_model

# Changes whenever the same inputs give another plan, so that a resume across versions is rejected, not silently
# different.
ALGORITHM_VERSION = 2
# The same for plans with a shuffle_window; other plans stay valid if it changes.
WINDOWS_VERSION = 2

#: Names of the versions in :meth:`PlanConfig.to_dict`.
ALGORITHMS = ("algorithm:", "windows_algorithm:")

#: Boundaries in a pack are int32, a plan has at most that many samples, and patches are added up in int64.
_MOST = {"capacity": 2**31 - 1, "global_batch": 2**31 - 1, "max_patches": 2**63 - 1}

#: Settings that determine which rank runs which pack of a step. They change no pack and no step.
ASSIGNMENT_SETTINGS = ("balance", "cost")

LastStep = Literal["drop", "pad", "keep"]
BlendUnit = Literal["epochs", "tokens", "samples"]


@dataclass(frozen=True, slots=True)
class Blend:
    """The amount of each dataset in an epoch.

    Attributes:
        by: Meaning of ``weights``. "epochs": passes over each dataset, such as 2.5. "tokens" or "samples":
            shares of the epoch's tokens or samples, in any scale; the epoch is then as long as one pass over
            all datasets.
        weights: One per dataset, in the table's order, at least 0 and not all 0.
    """

    by: BlendUnit
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.by not in ("epochs", "tokens", "samples"):
            raise UsageError(f"blend by {self.by!r}: must be 'epochs', 'tokens' or 'samples'")
        if not all(isinstance(weight, Real) for weight in self.weights):
            raise UsageError(f"blend weights {list(self.weights)}: need numbers, not text")
        if not self.weights or min(self.weights) < 0 or not 0 < sum(self.weights) < float("inf"):
            raise UsageError(f"blend weights {list(self.weights)}: need numbers >= 0, not all 0")
        # 2 and 2.0 are the same weight and must have the same fingerprint.
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))

    def fractions(self) -> tuple[Fraction, ...]:
        """Returns the weights as exact decimal numbers: 0.1 is 1/10."""
        return tuple(Fraction(str(weight)) for weight in self.weights)


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Settings of a plan. A plan is a function of (sample table, settings, epoch) only.

    Attributes:
        capacity: Tokens per pack.
        global_batch: Packs per optimizer step, over all data-parallel ranks and micro-batches.
        alignment: Every sample is padded to a multiple of this many tokens
            (see :func:`vlmdata.packing.alignment.alignment`).
        max_patches: Vision patches per pack, or None for no limit.
        pad_to_capacity: Packs have exactly ``capacity`` tokens; the tail is a padded segment of its own.
        last: The incomplete last step of an epoch. "pad": fill it with empty packs (no targets), so it has as many
            micro-batches as any other step. "keep": only as many micro-batches as its packs need, with empty packs in
            the last one. "drop": omit it and its samples. The same on every rank.
        shuffle_window: Shards that are packed and shuffled together, so that storage is read nearly in order; None
            packs and shuffles globally.
        seed: Any integer.
        blend: Amount of each dataset in an epoch; None means one pass over each.
        balance: Assign packs to ranks by cost; otherwise in plan order.
        cost: Cost model for ``balance``.
    """

    capacity: int
    global_batch: int
    alignment: int = 1
    max_patches: int | None = None
    pad_to_capacity: bool = False
    last: LastStep = "pad"
    shuffle_window: int | None = None
    seed: int = 0
    blend: Blend | None = None
    balance: bool = True
    cost: CostModel = field(default_factory=lambda: cost_model(DEFAULT_COST))

    def __post_init__(self) -> None:
        for name in ("capacity", "global_batch", "alignment", "max_patches", "shuffle_window", "seed"):
            value = getattr(self, name)
            if value is None:
                continue
            # Convert to plain ints: numpy ints are equal, but JSON and seeding do not support them.
            object.__setattr__(self, name, operator.index(value))
            if name != "seed" and value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
            if value > (most := _MOST.get(name, value)):
                raise UsageError(f"{name} is {value}; it must be at most {most}")
        if self.last not in ("drop", "pad", "keep"):
            raise UsageError(f"last is {self.last!r}; it must be 'drop', 'pad' or 'keep'")
        if self.capacity < self.alignment:
            raise UsageError(f"capacity {self.capacity} is below the alignment {self.alignment}")
        if self.pad_to_capacity and self.capacity % self.alignment:
            down = self.capacity // self.alignment * self.alignment
            raise UsageError(
                f"pad_to_capacity needs a capacity that is a multiple of the alignment {self.alignment}, got "
                f"{self.capacity}; use {down} or {down + self.alignment}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON values, with the algorithm version of the plan."""
        windows = {} if self.shuffle_window is None else {"windows_algorithm": WINDOWS_VERSION}
        return {"algorithm": ALGORITHM_VERSION, **windows, **json.loads(json.dumps(dataclasses.asdict(self)))}

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the canonical JSON of :meth:`to_dict`; equal if and only if the settings are."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def config_differences(old: PlanConfig | dict[str, Any], new: PlanConfig | dict[str, Any]) -> list[str]:
    """Lists the differences of two configurations, for an error message.

    Either may be a :meth:`PlanConfig.to_dict` as read from a checkpoint. Gives one line per differing setting,
    "capacity: 8192 -> 4096", sorted by name; nested settings are dotted.
    """
    before, after = (each.to_dict() if isinstance(each, PlanConfig) else each for each in (old, new))
    return [f"{name}: {a} -> {b}" for name, a, b in differing(before, after)]


def concerns_assignment(difference: str) -> bool:
    """True if a line of :func:`config_differences` concerns one of :data:`ASSIGNMENT_SETTINGS`."""
    return difference.split(":")[0].split(".")[0] in ASSIGNMENT_SETTINGS
