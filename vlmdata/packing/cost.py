"""The training cost of a sample: a FLOP estimate used to balance packs across ranks.

    cost(sample) = per_token * s + per_token_squared * s^2 + per_target * n
                 + per_patch * p + per_patch_squared * sum over images of p_i^2

where s is the aligned token length, n the targets and p the vision patches. The coefficients are those of the trained
model. Packages with models register theirs in the entry point group ``vlmdata.cost_models``. All values are integers:
floating-point sums may differ in the last bit between machines, and ranks that break a tie differently would train on
different packs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.packing.arrays import IntArray
from vlmdata.wording import counted

#: Each entry is a function without arguments that returns cost models by the name of the model size. The name of a
#: family (:mod:`vlmdata.families`) stands for the size that balances its data if none is named.
GROUP = "vlmdata.cost_models"
#: The default model size for costs.
DEFAULT_COST = "4b"
# Costs are summed over whole steps. In units of 2**20 FLOP, the sums stay far below the int64 limit.
_UNIT_BITS = 20


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOP of one training step (forward and backward) on a sample, as coefficients.

    Attributes:
        per_token: FLOP per token: projections, feed-forward layers, gated delta net.
        per_token_squared: FLOP per squared token: causal attention of the full-attention layers.
        per_target: FLOP per target: the output layer, which computes logits only for targets.
        per_patch: FLOP per vision patch: vision blocks, patch embedding, merger.
        per_patch_squared: FLOP per squared patch of one vision attention span (an image).
    """

    per_token: int
    per_token_squared: int
    per_target: int
    per_patch: int
    per_patch_squared: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; costs are integers, at least 0 (they must be exact)")

    def sample_costs(
        self,
        tokens: npt.NDArray[np.integer],
        targets: npt.NDArray[np.integer],
        patches: npt.NDArray[np.integer],
        patches_squared: npt.NDArray[np.integer],
    ) -> IntArray:
        """Returns the cost of each sample.

        Args:
            tokens: (n,) aligned token lengths.
            targets: (n,) target tokens.
            patches: (n,) vision patches.
            patches_squared: (n,) sums over the sample's images of squared patches.

        Returns:
            int64 (n,) in units of 2**20 FLOP, rounded down.

        Raises:
            ValueError: If a cost does not fit in 63 bits.
        """
        if not len(tokens):
            return np.zeros(0, np.int64)
        columns = (tokens, targets, patches, patches_squared)
        bound = self._flop(*(int(column.max()) for column in columns))
        if bound >= 1 << 63:
            raise ValueError(
                f"a sample of {counted(int(tokens.max()), 'token')} and {counted(int(patches.max()), 'patch')} may "
                f"cost {bound:.1e} FLOP, more than int64 holds; scale the cost model's coefficients down"
            )
        return self._flop(*(column.astype(np.int64) for column in columns)) >> _UNIT_BITS

    def _flop[Number: (int, IntArray)](
        self, tokens: Number, targets: Number, patches: Number, patches_squared: Number
    ) -> Number:
        cost = (self.per_token_squared * tokens + self.per_token) * tokens + self.per_target * targets
        return cost + self.per_patch * patches + self.per_patch_squared * patches_squared


def cost_model(name: str) -> CostModel:
    """Returns the cost model of a named model size, with all parts of the model trained.

    Args:
        name: Model size, such as "0.8b", "2b", "4b" or "9b", or a family.

    Raises:
        UsageError: If no installed package has this size.
    """
    known = _named()
    if name not in known:
        raise UsageError(f"no cost model for {name!r}; known sizes: {', '.join(known) or 'none'}")
    return known[name]


def chosen_cost(choice: CostModel | str | None, family: str) -> CostModel:
    """Returns the cost model of a choice. None is that of the family's name, or of "4b" if there is none.

    Raises:
        UsageError: If no installed package has this size.
    """
    if choice is None:
        return _named().get(family) or cost_model(DEFAULT_COST)
    return cost_model(choice) if isinstance(choice, str) else choice


#: Qwen3.5-4b with all parts trained. It is duplicated here, so that a loader's default needs no installed models.
_OF_DEFAULT = CostModel(22_369_271_808, 221_184, 7_628_390_400, 1_855_979_520, 294_912)


@cache
def _named() -> Mapping[str, CostModel]:
    found: dict[str, CostModel] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        models: Callable[[], Mapping[str, CostModel]] = point.load()
        found |= models()
    found.setdefault(DEFAULT_COST, _OF_DEFAULT)
    return found
