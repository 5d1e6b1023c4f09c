"""Checks of all experts' products in one on CUDA, for ``python -m tests.model.gpu_checks``.

Transformer Engine's products of single experts and torch in float64 judge them.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch

from tests.model.helpers import relative
from vlmdata.model.network.grouped import lay_out_experts, weights_in_line
from vlmdata.model.network.provider import transformer_engine_provider

CUDA = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def products_agree() -> None:
    """Outputs and gradients of a layer, beside Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear

    for experts, k, n, most in ((4, 128, 256, 9), (16, 2048, 1024, 300), (8, 72, 200, 1000)):
        generator = torch.Generator().manual_seed(experts)
        counts = torch.randint(0, most, (experts,), generator=generator)
        counts[1] = counts[-1] = 0
        layer = _layer(experts, k, n)
        x = torch.randn(int(counts.sum()), k, device=CUDA).bfloat16()
        lay_out_experts(layer)
        ours = _results(layer, layer, x, counts)
        theirs = _results(layer, TEColumnParallelGroupedLinear.forward, x, counts.tolist())
        for name, wanted in _exact(layer, x, counts).items():
            found, other = relative(ours[name].double(), wanted), relative(theirs[name].double(), wanted)
            print(f"  {experts} experts, {k} to {n}, {name}: {found:.1e}, one by one {other:.1e}")
            assert found <= max(1.5 * other, 1e-6), name
        assert weights_in_line(layer, x) is not None
        for number in range(experts):
            getattr(layer, f"weight{number}").data = getattr(layer, f"weight{number}").detach().clone()
        assert weights_in_line(layer, x) is None


def in_the_buffers() -> None:
    """Weights are in line in the buffers of either optimizer, and steps have Transformer Engine's gradients."""
    for distributed, overlap in ((False, False), (True, False), (True, True)):
        made = [_learner(distributed, overlap)]
        with patch(
            "vlmdata.model.training.optimizer.learner.lay_out_experts"
        ):  # Transformer Engine multiplies one by one
            made.append(_learner(distributed, overlap))
        for layer in _grouped(made[0]):
            x = torch.zeros(1, layer.in_features, device=CUDA, dtype=torch.bfloat16)
            assert weights_in_line(layer, x) is not None, f"distributed {distributed}"
        for step in range(3):
            norms = [_step(each, step) for each in made]
            print(f"  distributed {distributed}, overlap {overlap}, step {step}: gradient norms {norms}")
            assert abs(norms[0] / norms[1] - 1) < 1e-2
            for ours, theirs in zip(*map(_grouped, made), strict=True):
                for own, other in zip(_weights(ours), _weights(theirs), strict=True):
                    assert relative(own.main_grad, other.main_grad) < 1e-2 or not other.main_grad.any()
                    assert own.main_grad.any() == other.main_grad.any()


def _learner(distributed: bool, overlap: bool) -> Any:
    from tests.model.gpu_models import architecture
    from vlmdata.model.families.qwen3_5.build import build_model
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.parallel.groups import seed_all
    from vlmdata.model.training.optimizer.learner import build_learner
    from vlmdata.model.training.settings.config_loading import load_config

    seed_all(5)
    settings = ModelSettings(
        backend="transformer_engine", precision="bf16", fused_cross_entropy=True, gradient_accumulation_fusion=True
    )
    given = [f"optimizer.distributed={str(distributed).lower()}", f"optimizer.overlap={str(overlap).lower()}"]
    model = build_model(architecture(True), settings).to(CUDA)
    return build_learner(model, load_config(None, given), CUDA, torch.bfloat16)


def _grouped(made: Any) -> list[Any]:
    found = [each for each in made.model[0].modules() if hasattr(each, "num_gemms")]
    assert found
    return found


def _step(made: Any, seed: int) -> float:
    """Two passes and an update; the norm of the gradients."""
    from tests.model.gpu_models import batch
    from vlmdata.model.training.step import run_passes

    (chunk,) = made.model
    chunk.zero_grad_buffer()
    packs = [batch(True).to(CUDA) for _ in range(2)]
    capacity = max(len(each.input_ids) for each in packs)
    run_passes(made, None, iter(packs), (), len(packs), capacity)
    return float(made.optimizer.step(torch.tensor(10.0 + seed, dtype=torch.float64, device=CUDA)))


def _layer(experts: int, k: int, n: int) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from tests.model.gpu_models import architecture
    from vlmdata.model.families.qwen3_5.build import language_config
    from vlmdata.model.network.settings import ModelSettings

    config = language_config(architecture(True), ModelSettings(backend="transformer_engine", precision="bf16"))
    experts_of = transformer_engine_provider("flash-linear-attention").grouped_mlp_modules(True)
    layer = experts_of.keywords["submodules"].linear_fc1(
        experts, k, n, config=config, init_method=config.init_method, bias=False, skip_bias_add=False, is_expert=True,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip
    layer.fuse_wgrad_accumulation = True
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return layer.to(CUDA)


def _weights(layer: Any) -> list[Any]:
    return [getattr(layer, f"weight{number}") for number in range(layer.num_gemms)]


def _pull(rows: int, n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * n, device=CUDA).bfloat16().view(n, rows).T  # not contiguous


def _results(layer: Any, forward: Any, x: torch.Tensor, counts: Any) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    layer.is_first_microbatch = False
    for each in _weights(layer):
        each.main_grad.fill_(0.5)
    x = x.detach().clone().requires_grad_()
    out = (forward(x, counts) if forward is layer else forward(layer, x, counts))[0]
    out.backward(_pull(*out.shape))
    assert layer.weight0.grad_added_to_main_grad
    assert layer.weight0.grad is not None
    return {"out": out, "x": x.grad, "weights": torch.stack([each.main_grad.clone() for each in _weights(layer)])}  # type: ignore[dict-item]


def _exact(layer: Any, x: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = [each.detach().double() for each in _weights(layer)]
    parts = x.double().split(counts.tolist())
    pulls = _pull(len(x), len(weights[0])).double().split(counts.tolist())
    return {
        "out": torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)]),
        "x": torch.cat([pull @ weight for pull, weight in zip(pulls, weights, strict=True)]),
        "weights": torch.stack([pull.T @ part for part, pull in zip(parts, pulls, strict=True)]) + 0.5,
    }
