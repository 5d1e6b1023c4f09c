"""FLOP of a step with adapters, beside what torch counts: no gradients of frozen weights; the adapters' products."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from tests.model.helpers import mixed_samples, pack
from tests.model.test_flops import built, counted_with_backward, full_attention
from vlmdata.model.families import REGISTRY, spec_of
from vlmdata.model.lora.attach import attach, plan_of
from vlmdata.model.lora.flops import with_adapters
from vlmdata.model.lora.options import LoraOptions

pytestmark = pytest.mark.usefixtures("one_process")

FROZEN = ("vision", "merger", "language")


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("family", REGISTRY)
def test_forward_and_backward(family: str, moe: bool) -> None:
    """Of matrices that no other shares a layer with: where several do, adapters multiply zeros, too, and that is not
    counted.
    """
    architecture = full_attention(family, moe)
    model = built(architecture)
    plan = plan_of(architecture, LoraOptions(4, targets=("o_proj", "experts" if moe else "mlp.down_proj")), mtp=False)
    attach(model, plan)
    batch = pack(mixed_samples()[:1], alignment=1)
    patches = np.array([h * w for _, h, w in batch.image_grid_thw.tolist()])
    plain = spec_of(architecture).step_flops(architecture, False, FROZEN, ("language",))
    flops = with_adapters(plain, plan.sites.values(), 4, architecture)
    lengths, rows = np.array([batch.total_tokens]), min(128, batch.total_tokens)
    expected = flops.of(lengths, patches) + flops.per_token_squared * float(lengths[0]) ** 2 + flops.per_target * rows
    if architecture.language.moe is not None:
        # megatron-core computes the gradient of a router's weights even where nobody asks for it.
        experts, width = architecture.language.moe.num_experts, architecture.language.hidden_size
        expected += architecture.language.num_layers * 2 * experts * width * batch.total_tokens
    assert counted_with_backward(lambda: model(batch)) == pytest.approx(expected, rel=1e-12)
