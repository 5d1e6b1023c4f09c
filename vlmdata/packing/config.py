"""Settings of a plan: everything it depends on besides the samples and the epoch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from typing import Any, Literal, get_args

from vlmdata.differences import differing
from vlmdata.errors import UsageError
from vlmdata.packing.cost import DEFAULT_COST, CostModel, cost_model

# Changes whenever the same inputs give another plan, so that a resume across versions is rejected, not silently
# different.
ALGORITHM_VERSION = 5
# The same for plans with a shuffle_window; other plans stay valid if it changes.
WINDOWS_VERSION = 2

#: Names of the versions in :meth:`PlanConfig.to_dict`.
ALGORITHMS = ("algorithm:", "windows_algorithm:")

#: Boundaries in a pack are int32, a plan has at most that many samples, and patches are added up in int64.
_MOST = {"capacity": 2**31 - 1, "global_batch": 2**31 - 1, "max_patches": 2**63 - 1}

#: Settings that determine which rank runs which pack of a step. They change no pack and no step.
ASSIGNMENT_SETTINGS = ("balance", "cost")

#: Settings that the state of a run adds, and a user does not give.
HISTORY_SETTING = "earlier"

LastStep = Literal["drop", "pad", "keep"]
BlendUnit = Literal["epochs", "tokens", "samples", "targets"]


@dataclass(frozen=True, slots=True)
class Blend:
    """The amount of each dataset in an epoch, and which of its samples.

    Attributes:
        by: Meaning of ``weights``. "epochs": passes over each dataset, such as 2.5. "tokens", "samples" or "targets":
            shares of the epoch's tokens, samples or target tokens, in any scale; the epoch is then as long as one pass
            over all datasets.
        weights: One per dataset, in the table's order, at least 0 and not all 0.
        max_samples: One per dataset: only so many of its samples are used, always the same ones; None means all.
            Empty means all of every dataset.
        max_length: Only samples of at most so many tokens are used; None means all.
    """

    by: BlendUnit
    weights: tuple[float, ...]
    max_samples: tuple[int | None, ...] = ()
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.by not in get_args(BlendUnit):
            raise UsageError(f"blend by {self.by!r}: must be 'epochs', 'tokens', 'samples' or 'targets'")
        if not all(isinstance(weight, Real) for weight in self.weights):
            raise UsageError(f"blend weights {list(self.weights)}: need numbers, not text")
        if not self.weights or min(self.weights) < 0 or not 0 < sum(self.weights) < float("inf"):
            raise UsageError(f"blend weights {list(self.weights)}: need numbers >= 0, not all 0")
        # 2 and 2.0 are the same weight and must have the same fingerprint.
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        caps = tuple(None if each is None else operator.index(each) for each in self.max_samples)
        if caps and len(caps) != len(self.weights):
            raise UsageError(f"blend has {len(caps)} max_samples for {len(self.weights)} weights; give one each")
        for name, most in (*(("max_samples", each) for each in caps), ("max_length", self.max_length)):
            if most is not None and operator.index(most) < 1:
                raise UsageError(f"blend {name} is {most}; it must be at least 1")
        object.__setattr__(self, "max_samples", caps if any(each is not None for each in caps) else ())

    def fractions(self) -> tuple[Fraction, ...]:
        """Returns the weights as exact decimal numbers: 0.1 is 1/10."""
        return tuple(Fraction(str(weight)) for weight in self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Returns the blend as JSON values; limits only if there are any, as in states of earlier versions."""
        limits: dict[str, Any] = {"max_samples": list(self.max_samples), "max_length": self.max_length}
        return {"by": self.by, "weights": list(self.weights)} | {name: each for name, each in limits.items() if each}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Blend:
        """Returns the blend of :meth:`to_dict`."""
        return cls(
            values["by"], tuple(values["weights"]), tuple(values.get("max_samples", ())), values.get("max_length")
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the mixture that is planned in advance.

    Attributes:
        step: The first optimizer step of the run, from 0, with this mixture.
        blend: The mixture from there on; None means one pass over each dataset.
        seed: The seed from there on; None means the same as before.
    """

    step: int
    blend: Blend | None
    seed: int | None = None

    def __post_init__(self) -> None:
        if operator.index(self.step) < 1:
            raise UsageError(f"a mixture changes at step {self.step}; it must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Returns the change as JSON values."""
        return {"step": self.step, "blend": None if self.blend is None else self.blend.to_dict(), "seed": self.seed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Change:
        """Returns the change of :meth:`to_dict`."""
        return cls(values["step"], _blend_from(values["blend"]), values["seed"])


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
            the last one. "drop": omit it and its samples, unless it is the only one; then as "pad". The same on
            every rank.
        shuffle_window: Shards that are packed and shuffled together, so that storage is read nearly in order; None
            packs and shuffles globally.
        seed: Any integer.
        blend: Amount of each dataset in an epoch; None means one pass over each.
        balance: Assign packs to ranks by cost; otherwise in plan order.
        cost: Cost model for ``balance``.
        schedule: Changes of the mixture in later steps, in their order (:class:`vlmdata.packing.plan.run.RunPlans`).
        earlier: What the run did before it had these settings, in its order. It begins a new epoch with them.
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
    schedule: tuple[Change, ...] = ()
    earlier: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        for name in ("capacity", "global_batch", "alignment", "max_patches", "shuffle_window", "seed"):
            value = getattr(self, name)
            if value is None and name in ("max_patches", "shuffle_window"):
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise UsageError(f"{name} is {value!r}; it must be an integer")
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
        steps = [change.step for change in self.schedule]
        if steps != sorted(set(steps)):
            raise UsageError(f"the mixture changes at steps {steps}; they must increase")
        ends = [(stage.epoch, stage.step) for stage in self.earlier]
        if ends != sorted(set(ends)) or (0, 0) in ends:
            raise UsageError(f"earlier settings end at (epoch, step) {ends}; these must increase, from after (0, 0)")

    @property
    def first_epoch(self) -> int:
        """First epoch with these settings: after the earlier ones."""
        return first_epoch(self.earlier)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON values, with the algorithm version of the plan.

        Changes are included only if there are any, as in states of earlier versions.
        """
        windows = {} if self.shuffle_window is None else {"windows_algorithm": WINDOWS_VERSION}
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        values["cost"] = dataclasses.asdict(self.cost)
        values["blend"] = None if self.blend is None else self.blend.to_dict()
        for name in ("schedule", "earlier"):
            values[name] = [each.to_dict() for each in values[name]]
            if not values[name]:
                del values[name]
        return {"algorithm": ALGORITHM_VERSION, **windows, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanConfig:
        """Returns the settings of :meth:`to_dict`, whatever their algorithm version.

        Raises:
            UsageError: If a setting is invalid.
            KeyError: If something is missing.
            TypeError: If something is of another type, or unknown.
        """
        given = {name: value for name, value in values.items() if f"{name}:" not in ALGORITHMS}
        given["cost"] = CostModel(**given["cost"])
        given["blend"] = _blend_from(given["blend"])
        given["schedule"] = tuple(Change.from_dict(each) for each in given.get("schedule", ()))
        given["earlier"] = tuple(Stage.from_dict(each) for each in given.get("earlier", ()))
        return cls(**given)

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the canonical JSON of :meth:`to_dict`; equal if and only if the settings are."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Stage:
    """Earlier settings of a run, which changed.

    Attributes:
        config: The settings, without earlier or scheduled ones.
        datasets: The datasets that it had, in its order, as numbers among those of the run now.
        epoch: The epoch in which the settings changed.
        step: The first step of this epoch that the run did not make with them.
    """

    config: PlanConfig
    datasets: tuple[int, ...]
    epoch: int
    step: int

    def __post_init__(self) -> None:
        if self.config.earlier or self.config.schedule:
            raise UsageError("earlier settings of a run must not have earlier or scheduled ones themselves")
        if not self.datasets or len(set(self.datasets)) < len(self.datasets) or min(self.datasets) < 0:
            raise UsageError(
                f"earlier settings of a run are for datasets {list(self.datasets)}; need different numbers"
            )
        if min(operator.index(self.epoch), operator.index(self.step)) < 0:
            raise UsageError(
                f"earlier settings of a run end at epoch {self.epoch}, step {self.step}; both count from 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the stage as JSON values."""
        config = {name: each for name, each in self.config.to_dict().items() if not name.endswith("algorithm")}
        return {"config": config, "datasets": list(self.datasets), "epoch": self.epoch, "step": self.step}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Stage:
        """Returns the stage of :meth:`to_dict`."""
        config = PlanConfig.from_dict(values["config"])
        return cls(config, tuple(values["datasets"]), values["epoch"], values["step"])


def first_epoch(earlier: Sequence[Stage]) -> int:
    """Returns the epoch after these stages: that of their end, or the next one if that had begun."""
    return earlier[-1].epoch + (earlier[-1].step > 0) if earlier else 0


def _blend_from(values: Mapping[str, Any] | None) -> Blend | None:
    return None if values is None else Blend.from_dict(values)


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
