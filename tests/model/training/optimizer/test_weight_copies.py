"""The distributed optimizer's copies in one launch: megatron-core's values, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def learner(dtype: torch.dtype, *frozen: str) -> Any:
    """A small model with a distributed optimizer, and random gradients."""
    from tests.model.helpers import small_architecture
    from vlmdata.model.families.qwen3_5.build import build_model
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.training.optimizer.learner import build_learner, freeze
    from vlmdata.model.training.settings.config_loading import load_config

    torch.manual_seed(5)
    config = load_config(None, ["optimizer.distributed=true", "optimizer.overlap=false", "optimizer.lr=1e-2"])
    settings = ModelSettings(precision="bf16" if dtype == torch.bfloat16 else "fp32")
    model = build_model(small_architecture(), settings)
    freeze(model, frozen)
    # Told that it is on a GPU, as a distributed optimizer is refused elsewhere: only fused Adam restores it.
    return build_learner(model, config, torch.device("cuda"), dtype)


def step(made: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.model[0].parameters():
        if parameter.requires_grad:
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    made.optimizer.step(torch.ones((), dtype=torch.float64))


def state(made: Any) -> dict[str, torch.Tensor]:
    found = {name: each.detach() for name, each in made.model[0].named_parameters()}
    for part in made.optimizer.chained_optimizers:
        for number, group in enumerate(part.optimizer.param_groups):
            found |= {f"{number}.{place}": each.detach() for place, each in enumerate(group["params"])}
    return found


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each joint copy."""
    found: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda own, *rest: (found.append(len(own)), copy(own, *rest))[1])
    return found


@DTYPES
@pytest.mark.parametrize("frozen", [(), ("vision", "merger")])
def test_values_are_megatron_cores(
    one_process: None, dtype: torch.dtype, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    ours, theirs = learner(dtype, *frozen), learner(dtype, *frozen)
    for part in theirs.optimizer.chained_optimizers:
        part.__class__ = DistributedOptimizer
    before = {name: each.clone() for name, each in state(ours).items()}
    found = launches(monkeypatch)
    for seed in (1, 2, 3):
        step(ours, seed)
        trained = sum(each.requires_grad for each in ours.model[0].parameters())
        assert sum(found) == (trained if dtype == torch.bfloat16 else 0), "a float32 weight is its own copy"
        assert len(found) == (1 if dtype == torch.bfloat16 else 0)
        step(theirs, seed)
        assert len(found) == (1 if dtype == torch.bfloat16 else 0), "theirs copies one by one"
        found.clear()
    wanted = state(theirs)
    assert set(wanted) == set(state(ours))
    for name, each in state(ours).items():
        assert torch.equal(each, wanted[name]), name
    changed = {name for name, each in wanted.items() if not torch.equal(each, before[name])}
    fixed = {name for name in wanted if frozen and ".vision." in name}
    assert not changed & fixed
    assert len(changed) > 0.9 * len(set(wanted) - fixed), "bfloat16 rounds a few updates away"


def test_tensors_that_are_replaced_are_found_again(one_process: None) -> None:
    made = learner(torch.bfloat16)
    step(made, 1)
    part = made.optimizer.chained_optimizers[0]
    number = next(number for number, group in enumerate(part.model_float16_groups) if group)
    parameter = part.model_float16_groups[number][0]
    part.shard_fp32_from_float16_groups[number][0] = torch.full((parameter.numel(),), 3.0)
    part._copy_main_params_to_model_params()
    assert (parameter == 3).all()
    part._copy_model_grads_to_main_grads()
    new = part.shard_fp32_from_float16_groups[number][0]
    assert torch.equal(new.grad, parameter.main_grad.view(-1))


def test_quantised_weights_are_left_to_megatron_core(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner(torch.bfloat16)
    part = made.optimizer.chained_optimizers[0]
    found = launches(monkeypatch)
    part._copy_main_params_to_model_params()
    assert len(found) == 1
    for where, name in ((part.ddp_config, "fp4_param_gather"), (part, "is_stub_optimizer")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, True)
            if name == "fp4_param_gather":
                theirs = "megatron.core.optimizer.distrib_optimizer.quantize_nvfp4_param_shard"
                patch.setattr(theirs, lambda *_: None)
            part._copy_main_params_to_model_params()
        assert len(found) == 1, name
