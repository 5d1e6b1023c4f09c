"""The load-balancing loss equals transformers' on the tokens that are no padding, and knows packs without any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.model.conftest import Pair
from tests.model.helpers import mixed_samples, pack, relative
from vlmdata.batch import IGNORE_INDEX

COEFFICIENT = 0.05
TOLERANCE = 1e-5


@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradient_are_those_of_transformers(make_pair: Callable[..., Pair], weighted: bool) -> None:
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

    from vlmdata.model.network.router import BalancedRouter

    batch = pack(mixed_samples(weighted), tail=24)
    assert batch.padding_mask is not None
    assert batch.loss_weights is not None
    gradients, seen = [], {}
    for coefficient in (COEFFICIENT, 0.0):
        pair = make_pair(moe=True, moe_aux_loss=coefficient)
        routers = {name: each for name, each in pair.ours.named_modules() if isinstance(each, BalancedRouter)}
        for name, router in routers.items():
            router.register_forward_pre_hook(lambda _m, inputs, name=name: seen.update({name: inputs[0].detach()}))
        pair.ours(batch).sum().backward()
        last, router = list(routers.items())[-1]
        gradients.append(router.weight.grad.clone())
        if coefficient:
            found = pair.ours.metrics.pop(("moe_aux_loss",))["moe_aux_loss"]
            moe = pair.architecture.language.moe
            experts, choices = moe.num_experts, moe.num_experts_per_tok

    def loss(name: str, weight: torch.Tensor) -> torch.Tensor:
        logits = seen[name].reshape(-1, seen[name].shape[-1]) @ weight.T
        total = load_balancing_loss_func((logits,), experts, choices, (~batch.padding_mask).long())
        assert isinstance(total, torch.Tensor)
        return total / choices

    wanted = torch.stack([loss(name, router.weight.detach()) for name, router in routers.items()]).mean()
    assert found == pytest.approx(float(wanted), rel=TOLERANCE)
    weight = router.weight.detach().clone().requires_grad_()
    (batch.loss_weights.sum() * COEFFICIENT * loss(last, weight)).backward()
    assert relative(gradients[0] - gradients[1], weight.grad) < 100 * TOLERANCE  # a difference of large numbers


def test_a_pack_that_is_all_padding_adds_nothing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(moe=True, moe_aux_loss=COEFFICIENT)
    batch = pack(mixed_samples(), tail=24)
    nothing = dataclasses.replace(
        batch,
        labels=torch.full_like(batch.labels, IGNORE_INDEX),
        loss_mask=torch.zeros_like(batch.loss_mask),
        loss_weights=None,
        padding_mask=torch.ones_like(batch.padding_mask),
    )
    loss = pair.ours(nothing).sum()
    loss.backward()
    assert loss == 0
    for name, parameter in pair.ours.named_parameters():
        assert not parameter.grad.any(), name
    assert pair.ours.metrics.pop(("moe_aux_loss",)) == {}
