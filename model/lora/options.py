"""Options of low-rank adapters. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from vlmdata.model.network.settings import Storage
from vlmdata.options import OptionHelp

#: How a part of the vision side is trained.
Training = Literal["frozen", "lora", "full"]


@dataclass(frozen=True)
class LoraOptions:
    """What low-rank adapters adapt, and how. Without a rank, there are none."""

    rank: Annotated[int | None, OptionHelp("Rank r of the adapters; unset trains the weights themselves.", least=1)] = (
        None
    )
    alpha: Annotated[float | None, "The product of an adapter counts alpha / r; unset means twice the rank."] = None
    dropout: Annotated[
        float, OptionHelp("Share of an adapter's inputs that are dropped in training; not for routed experts.", least=0)
    ] = 0.0
    rslora: Annotated[bool, "Count alpha / sqrt(r) instead, as in rank-stabilised LoRA."] = False
    targets: Annotated[
        tuple[str, ...],
        (
            'Matrices of the language model to adapt: groups ("attention", "delta_net", "mlp", "shared_experts", '
            '"experts", "mtp"), names in transformers\' model ("q_proj") or patterns ("layers.1?.self_attn.*"). Empty '
            'means all groups but "mtp".'
        ),
    ] = ()
    vision: Annotated[
        Training, 'The vision tower without its mergers: "frozen", "lora" for adapters, "full" for its own weights.'
    ] = "frozen"
    merger: Annotated[Training, "The same for its mergers."] = "frozen"
    weights: Annotated[str | None, "Folder of an adapter in PEFT's format to start from."] = None
    base: Annotated[
        Storage,
        (
            "How the frozen weights of the language model's linear layers are stored: \"plain\", in the run's "
            'precision, or "nf4", in 4 bits (QLoRA; package bitsandbytes).'
        ),
    ] = "plain"

    @property
    def used_alpha(self) -> float:
        """``alpha``, or its default."""
        assert self.rank is not None
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        assert self.rank is not None
        return self.used_alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def adapted_parts(self) -> tuple[str, ...]:
        """Parts of the model that have adapters; there are always some in the language model."""
        return ("language", *(part for part in ("vision", "merger") if getattr(self, part) == "lora"))

    @property
    def full_parts(self) -> tuple[str, ...]:
        """Parts whose own weights are trained."""
        return tuple(part for part in ("vision", "merger") if getattr(self, part) == "full")
