"""A small model's optimizer steps on chosen gradients, compared with megatron-core's two passes over them."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.model.helpers import small_architecture

#: For updates (relative and absolute) and the norm (relative): one way rounds once or twice more.
TOLERANCE = 1e-6


def learner(clip: float, dtype: torch.dtype, distributed: bool, fsdp: bool, moe: bool, experts: int = 1) -> Any:
    """A small model with its optimizer. In one process, experts share that of the other weights."""
    from vlmdata.model.families.qwen3_5.build import build_model
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.parallel.groups import seed_all
    from vlmdata.model.training.optimizer.learner import build_learner
    from vlmdata.model.training.settings.config_loading import load_config

    seed_all(5)
    # A rate and an epsilon at which updates show the size of gradients, which AdamW mostly hides.
    given = ["optimizer.overlap=false", "optimizer.lr=1e-2", "optimizer.eps=1e-1", f"optimizer.clip_grad={clip}"]
    given += ["parallel.fsdp=true"] if fsdp else [f"optimizer.distributed={str(distributed).lower()}"]
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    model = build_model(small_architecture(moe=moe), ModelSettings(precision=precision, expert_parallel=experts))
    if not fsdp:
        # Gradients that follow it in a buffer are not aligned to 16 bytes, except with a distributed optimizer.
        odd = torch.zeros(3, dtype=dtype, device=torch.cuda.current_device())
        model.add_module("odd", torch.nn.ParameterList([odd]))  # the last parameter is the first in a buffer
    # Told that it is on a GPU, as a distributed optimizer is refused elsewhere: only fused Adam restores it.
    return build_learner(model, load_config(None, given), torch.device("cpu" if fsdp else "cuda"), dtype)


def set_gradients(made: Any, scale: float, seed: int, rank: int = 0) -> None:
    """Sets random gradients, as after their reduction: those of experts differ between ranks, others do not."""
    generator, of_experts = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 100 * rank + 50)
    (chunk,) = made.model
    chunk.zero_grad_buffer()
    if made.sharded:
        for own in chunk.held:
            own.rows.main_grad = own.parameter.main_grad = scale * torch.randn(own.rows.shape, generator=generator)
    else:
        for parameter in chunk.parameters():
            drawn = generator if getattr(parameter, "allreduce", True) else of_experts
            parameter.main_grad.copy_(scale * torch.randn(parameter.shape, generator=drawn))


def divisor(total: float) -> torch.Tensor:
    """The sum of weights as the trainer passes it."""
    return torch.tensor(total, dtype=torch.float64, device=torch.cuda.current_device())


def in_two_passes(made: Any, total: float, clip: float) -> float:
    """Divides as megatron-core does before a step, and has it make the step."""
    made.model[0].scale_gradients(1.0 / total)
    for part in made.optimizer.chained_optimizers:
        part.config.clip_grad = clip or math.inf
    theirs = super(type(made.optimizer), made.optimizer)
    _, norm, _ = theirs.step()
    return float(norm)


def weights(made: Any) -> list[torch.Tensor]:
    """What the optimizer updates: the model's weights, or their float32 copies."""
    return [
        each.detach().clone().float()
        for part in made.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for each in group["params"]
    ]


#: Size of gradients and their divisor: clipped, if at all; not clipped; none, of a step without targets; and of a step
#: whose targets weigh 1e8, where squares of undivided gradients exceed float32.
STEPS = [(3e3, 1e5), (1.0, 3e6), (0.0, 0.0), (1e19, 8e14)]


def compare(ours: Any, theirs: Any, clip: float, rank: int = 0) -> list[float]:
    """Compares norms and weights with those of two passes. Returns the norms."""
    before, norms = weights(ours), []
    for seed, (scale, total) in enumerate(STEPS):
        set_gradients(ours, scale, seed, rank)
        set_gradients(theirs, scale, seed, rank)
        norm = ours.optimizer.step(divisor(total))
        wanted = in_two_passes(theirs, total or 1.0, clip)
        assert norm.shape == (1,)
        assert math.isclose(float(norm), wanted, rel_tol=TOLERANCE), (
            f"step {seed}: norm {float(norm)}, {wanted} in two passes"
        )
        assert (1 < wanted < math.inf) == (seed in (0, 3))
        for own, other in zip(weights(ours), weights(theirs), strict=True):
            torch.testing.assert_close(own, other, rtol=TOLERANCE, atol=TOLERANCE)
        norms.append(float(norm))
    changed = [not torch.equal(*each) for each in zip(weights(ours), before, strict=True)]
    assert sum(changed) > 0.9 * len(before)
    return norms
