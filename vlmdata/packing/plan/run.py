"""The plans of a run, epoch by epoch, with a schedule of mixtures.

A change that is scheduled for a step ends the epoch in which this step is, and begins a new one. In which epoch that
is depends on how many steps the epochs before have. So epochs are planned in order, once, up to the one asked for, or
from a position where the number of steps before is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from vlmdata.packing.config import Change, PlanConfig, Stage
from vlmdata.packing.plan.epoch import EpochPlan, check_limits, plan_epoch, uses_before
from vlmdata.packing.plan.history import Uses
from vlmdata.packing.table import SampleTable

#: The current epoch and the next one, for prefetching.
_KEPT = 2


class RunPlans:
    """Plans by epoch, computed on first use. Keeps the most recently used.

    Args:
        table: The samples.
        config: The settings, with a schedule or without.
        key_of: Returns a sample's key by table position, for error messages.
        known: An epoch, not before ``config.first_epoch``, and the optimizer steps of the run before it, if they are
            known: then only epochs from there on are planned.

    Raises:
        UsageError: If a scheduled mixture does not match the datasets, has no samples, or has some that fit no pack.
    """

    def __init__(
        self,
        table: SampleTable,
        config: PlanConfig,
        key_of: Callable[[int], str] | None = None,
        known: tuple[int, int] | None = None,
    ):
        self._table, self._key_of, self._base = table, key_of, config
        for change in config.schedule:
            check_limits(table, replace(config, blend=change.blend), key_of)
        self._first, steps = known if known is not None else (0, 0)
        self._steps = [steps]  # before epoch self._first, the next one, …
        self._used: tuple[int, Uses | None] = (0, None)
        # Changes before a known epoch are among the earlier settings. So should be the one that begins it.
        self._settled = replace(settings_at(config, steps - 1), earlier=config.earlier)
        self._next = sum(change.step < steps for change in config.schedule)  # number of the next change
        self._plan = lru_cache(_KEPT)(self._compute)
        self._begin(self._first)

    @property
    def config(self) -> PlanConfig:
        """The settings without a schedule: changes in epochs that were planned are among the earlier settings."""
        return self._settled

    def __getitem__(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch.

        Raises:
            UsageError: See :func:`plan_epoch`.
        """
        if self._base.schedule and epoch >= self._first:
            while self._first + len(self._steps) <= epoch + 1:
                self._go_on()
        return self._plan(epoch)

    def steps_before(self, epoch: int) -> int:
        """Returns the optimizer steps of the run before an epoch. Plans the epochs before, if it must."""
        if epoch < self._first:
            return sum(self[each].num_steps for each in range(epoch))
        while len(self._steps) <= epoch - self._first:
            self._go_on()
        return self._steps[epoch - self._first]

    def settled_before(self, epoch: int) -> PlanConfig:
        """Returns the given settings, with changes up to the beginning of an epoch among the earlier ones.

        Plans the epochs before, if it must. Whether later ones were planned makes no difference.
        """
        self.steps_before(epoch)
        given = len(self._base.earlier)
        more = [stage for stage in self._settled.earlier[given:] if (stage.epoch, stage.step) <= (epoch, 0)]
        return replace(self._base, earlier=(*self._base.earlier, *more))

    def _go_on(self) -> None:
        """Plans the next epoch to learn its number of steps, and makes the changes in it and right after it."""
        epoch, before = self._first + len(self._steps) - 1, self._steps[-1]
        changes = self._base.schedule
        steps = self._plan(epoch).num_steps
        if epoch >= self._base.first_epoch and self._next < len(changes) and changes[self._next].step < before + steps:
            steps = changes[self._next].step - before
            self._change(changes[self._next], epoch, steps)
        self._steps.append(before + steps)
        self._begin(epoch + 1)

    def _begin(self, epoch: int) -> None:
        """Makes the changes that are due at the beginning of the next epoch, before anybody plans or saves there."""
        changes = self._base.schedule
        while (
            epoch >= self._base.first_epoch
            and self._next < len(changes)
            and changes[self._next].step <= self._steps[-1]
        ):
            self._change(changes[self._next], epoch, 0)

    def _change(self, change: Change, epoch: int, step: int) -> None:
        """Ends the present settings at a step of an epoch."""
        old, self._next = self._settled, self._next + 1
        new = replace(old, blend=change.blend, seed=old.seed if change.seed is None else change.seed)
        if (epoch, step) > (old.first_epoch, 0):
            stage = Stage(replace(old, earlier=()), tuple(range(self._table.num_datasets)), epoch, step)
            new = replace(new, earlier=(*old.earlier, stage))
        self._settled = new
        if step:
            self._plan.cache_clear()  # this epoch is shorter now

    def _compute(self, epoch: int) -> EpochPlan:
        config = self._settled
        if epoch < config.first_epoch:
            return plan_epoch(self._table, config, epoch, self._key_of)
        if len(config.earlier) > self._used[0]:
            self._used = len(config.earlier), uses_before(self._table, config, self._used)
        return plan_epoch(self._table, config, epoch, self._key_of, self._used[1])


def settings_at(config: PlanConfig, steps: int) -> PlanConfig:
    """Returns the settings of a run with this schedule after so many steps, without earlier and scheduled ones."""
    found = replace(config, schedule=(), earlier=())
    for change in config.schedule:
        if change.step <= steps:
            found = replace(found, blend=change.blend, seed=found.seed if change.seed is None else change.seed)
    return found
