"""Adapters compute and learn what PEFT's do in transformers' models, in float32, and go to its files and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")
pytest.importorskip("peft")

from peft import PeftModel

from tests.model.conftest import Pair
from tests.model.helpers import Sample, mixed_samples, pack, relative
from vlmdata.batch import IGNORE_INDEX
from vlmdata.model.lora.attach import Plan, adapters_of, attach, plan_of
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.lora.peft_files import write_adapter
from vlmdata.model.lora.sites import sites_of
from vlmdata.model.network.wrapping import is_of_wrapper

#: Float32, whose products differ by processor: up to 2.4e-5 was seen. A wrong scale or a lost term is over 1e-2.
TOLERANCE = 1e-4
RATE, STEPS = 3e-3, 10
#: Models, and what is adapted in each.
CASES: dict[str, tuple[dict[str, Any], LoraOptions]] = {
    "qwen3_5 dense, all": ({}, LoraOptions(4, alpha=6.0)),
    "qwen3_5 dense, delta net and some of attention": (
        {},
        LoraOptions(3, rslora=True, targets=("delta_net", "q_proj", "v_proj")),
    ),
    "qwen3_5 experts, all and the tower": ({"moe": True}, LoraOptions(4, vision="lora", merger="lora")),
    "qwen3_5 experts, one of their matrices": (
        {"moe": True},
        LoraOptions(4, targets=("experts.down_proj", "layers.[01].mlp.shared_expert.up_proj")),
    ),
    "qwen3_vl dense, attention and mlp": ({"family": "qwen3_vl"}, LoraOptions(4, targets=("attention", "mlp"))),
    "qwen3_vl experts, all and the mergers": ({"family": "qwen3_vl", "moe": True}, LoraOptions(4, merger="lora")),
}


@dataclasses.dataclass
class Both:
    """Our model with adapters and transformers' with PEFT's, with equal values."""

    pair: Pair
    plan: Plan
    theirs: Any
    frozen: dict[str, torch.Tensor]


@pytest.fixture(params=CASES)
def both(request: pytest.FixtureRequest, make_pair: Callable[..., Pair], tmp_path: Path) -> Both:
    settings, options = CASES[request.param]
    pair = make_pair(moe_aux_loss=0.0, **settings)
    return adapted(pair, options, tmp_path)


def adapted(pair: Pair, options: LoraOptions, folder: Path) -> Both:
    """Adapters of both, from one file; no output matrix is zero."""
    plan = plan_of(pair.architecture, options, mtp=False)
    frozen = {name: each.detach().clone() for name, each in pair.ours.named_parameters()}
    attach(pair.ours, plan)
    generator = torch.Generator().manual_seed(7)
    for _, adapter in adapters_of(pair.ours):
        for parameter in adapter.parameters():
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    write(pair, plan, folder)
    theirs = PeftModel.from_pretrained(pair.theirs, folder, is_trainable=True)
    return Both(pair, plan, theirs, frozen)


def factors(pair: Pair, values: Callable[[Any], torch.Tensor] = lambda parameter: parameter.detach()) -> dict[str, Any]:
    """Our adapters by names of the matrices, or other values of their parameters' shapes."""
    from vlmdata.model.lora.adapters import LinearAdapter

    found: dict[str, Any] = {}
    for _, adapter in adapters_of(pair.ours):
        if isinstance(adapter, LinearAdapter):
            found |= adapter.split(values(adapter.a), values(adapter.b))
        else:
            found |= {
                site.name: tuple(values(each) for each in adapter.factors(layer))
                for layer, site in adapter.sites.items()
            }
    return found


def write(pair: Pair, plan: Plan, folder: Path, values: Any = lambda parameter: parameter.detach()) -> dict[str, Any]:
    """Writes values to a file of PEFT's; returns its tensors."""
    from safetensors.torch import load_file

    folder.mkdir(exist_ok=True)
    write_adapter(folder, factors(pair, values), sites_of(plan.maps), plan.options, base=None)
    return load_file(folder / "adapter_model.safetensors")


def loss_of(model: Any, samples: list[Sample]) -> torch.Tensor:
    total = torch.tensor(0.0)
    for sample in samples:
        logits = model(**sample.transformers_inputs(), use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, sample.labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total


def test_logits_gradients_and_ten_steps(both: Both, tmp_path: Path) -> None:
    pair, theirs, samples = both.pair, both.theirs, mixed_samples()
    batch = pack(samples, tail=24)
    trained = {name: each for name, each in pair.ours.named_parameters() if each.requires_grad}
    assert all(is_of_wrapper(name) for name in trained)
    of_theirs = {name.replace(".default.", "."): each for name, each in theirs.named_parameters() if each.requires_grad}
    with torch.no_grad():
        logits = pair.ours(dataclasses.replace(batch, labels=None))[0]
        starts = batch.cu_seqlens_padded.tolist()
        for sample, start in zip(samples, starts, strict=False):
            wanted = theirs(**sample.transformers_inputs(), use_cache=False).logits[0]
            assert relative(logits[start : start + len(sample.ids)], wanted) < 1e-5
    optimizers = [torch.optim.AdamW(each, lr=RATE, weight_decay=0.1) for each in (trained.values(), of_theirs.values())]
    for step in range(STEPS):
        ours, wanted = pair.ours(batch).sum(), loss_of(theirs, samples)
        assert relative(ours, wanted) < TOLERANCE
        for loss in (ours, wanted):
            loss.backward()
        if step == 0:
            found = write(pair, both.plan, tmp_path / "gradients", lambda parameter: parameter.grad)
            assert found.keys() == of_theirs.keys()
            for name, gradient in found.items():
                assert relative(gradient, of_theirs[name].grad) < TOLERANCE, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for name, value in write(pair, both.plan, tmp_path / "after").items():
        assert relative(value, of_theirs[name]) < 2e-4, name
    for name, value in both.frozen.items():
        now = pair.ours.get_parameter(name)
        assert torch.equal(now, value), name
        assert now.grad is None
