"""FLOP of adapters: products of low rank, forward, and the gradients of their weights and inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vlmdata.model.architecture import Architecture
from vlmdata.model.flops import StepFlops
from vlmdata.model.lora.sites import LoraSite


def with_adapters(flops: StepFlops, sites: Iterable[LoraSite], rank: int, architecture: Architecture) -> StepFlops:
    """Returns a formula with the FLOP of adapters added.

    Args:
        flops: The formula of the model, whose weights are frozen.
        sites: The adapted matrices.
        rank: Rank of the adapters.
        architecture: The model. Of its experts, a token uses some; four patches use a merger once.
    """
    moe, unit = architecture.language.moe, architecture.vision.merge_unit
    tokens = patches = 0
    for site in sites:
        # A multiply-add counts 2, and each product has two more in the backward pass.
        own = 6 * rank * (site.rows + site.columns)
        if site.group == "vision":
            patches += own
        elif site.group == "merger":
            patches += own // unit
        else:
            tokens += own * (moe.num_experts_per_tok if site.experts and moe is not None else 1)
    return replace(flops, per_token=flops.per_token + tokens, per_patch=flops.per_patch + patches)
