"""Adapters on CUDA: Transformer Engine against plain torch, with equal values, judged by torch in float32.

``python -m tests.model.gpu_checks adapters`` runs them. All output matrices have values, so that all factors get
gradients, and those of inputs pass through the adapters.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch

from tests.model.helpers import relative, values_of
from vlmdata.batch import PackedBatch
from vlmdata.model.families import spec_of
from vlmdata.model.lora.adapters import LinearAdapter
from vlmdata.model.lora.attach import adapters_of, attach, fill, plan_of
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.network.grouped import lay_out_experts
from vlmdata.model.network.quantized import held_by
from vlmdata.model.network.settings import ModelSettings, Storage

#: The tower has adapters, too.
OPTIONS = LoraOptions(rank=16, vision="lora", merger="lora")


def run(model: Any, wanted: Any, packed: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the adapters by name of the matrix and factor. Frozen weights get none and stay."""
    plan = plan_of(wanted, OPTIONS, mtp=wanted.mtp_layers > 0)
    attach(model, plan)
    lay_out_experts(model)
    fill(model, {name: tuple(_values(name, kind, site) for kind in "ab") for name, site in plan.sites.items()})  # type: ignore[misc]
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    before = {name: [part.clone() for part in held_by(each)] for name, each in frozen.items()}
    losses = model(packed.to(torch.device("cuda")))
    losses.sum().backward()
    for name, each in frozen.items():
        assert each.grad is None, name
        assert all(map(torch.equal, held_by(each), before[name])), name
    found: dict[str, torch.Tensor] = {}
    for _, adapter in adapters_of(model):
        if isinstance(adapter, LinearAdapter):
            factors = adapter.split(_gradient(adapter.a), _gradient(adapter.b))
        else:
            factors = {
                site.name: tuple(_gradient(each) for each in adapter.factors(layer))  # type: ignore[misc]
                for layer, site in adapter.sites.items()
            }
        found |= {
            f"{name} {kind}": value for name, both in factors.items() for kind, value in zip("ab", both, strict=True)
        }
    return float(losses.detach().sum()), found


def _gradient(parameter: Any) -> torch.Tensor:
    return parameter.grad.float()  # type: ignore[no-any-return]


def _values(name: str, kind: str, site: Any) -> torch.Tensor:
    """Values that depend on the name alone, as large as those of trained adapters."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind}".encode()))
    shape = (OPTIONS.rank, site.columns) if kind == "a" else (site.rows, OPTIONS.rank)
    whole = (site.experts, *shape) if site.experts else shape
    return torch.randn(whole, generator=generator) * (site.columns**-0.5 if kind == "a" else 0.05)


def adapters_against_torch(
    moe: bool, family: str = "qwen3_5", recompute: str = "none", storage: Storage = "plain"
) -> None:
    """One GPU, in bfloat16: errors of all gradients at most four times those of torch, or one rounding.

    Torch has the values of the stored weights in full.
    """
    from tests.model.gpu_checks import FACTOR
    from tests.model.gpu_models import architecture, batch, with_weights

    wanted, packed = architecture(moe, family), batch()
    engine = {"backend": "transformer_engine", "precision": "bf16", "recompute": recompute, "storage": storage}
    ours = with_weights(spec_of(wanted).build(wanted, ModelSettings(**engine)), wanted)
    weights = values_of(ours, wanted) if storage != "plain" else None
    loss, found = run(ours, wanted, packed)
    (exact_loss, exact), (_, plain) = (
        run(with_weights(spec_of(wanted).build(wanted, ModelSettings(**settings)), wanted, weights), wanted, packed)
        for settings in ({}, {"precision": "bf16"})
    )
    assert set(found) == set(exact)
    errors = {name: (relative(found[name], exact[name]), relative(plain[name], exact[name])) for name in exact}
    worst = sorted(errors, key=lambda name: -errors[name][0])[:5]
    print(f"  loss {exact_loss:.3f} exact, {loss:.3f} engine; {len(found)} factors; worst:")
    print(*(f"    {name} engine {errors[name][0]:.1e} torch {errors[name][1]:.1e}" for name in worst), sep="\n")
    assert abs(loss / exact_loss - 1) < 5e-3
    bad = [name for name, (ours, torchs) in errors.items() if not ours <= FACTOR * max(torchs, 4e-3) < math.inf]
    assert not bad, bad
