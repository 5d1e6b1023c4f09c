"""Checks of gradients on one GPU, for :mod:`tests.model.gpu_checks`: small ones together, and one pass over all."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from tests.model.training.optimizer.toy_gradients import FORMS, Kind, step, wrapped
from tests.model.training.optimizer.two_passes import compare, divisor, learner, set_gradients
from vlmdata.model.training.optimizer.small_gradients import GradientBuffers

SHAPES = [(), (1,), (7,), (1024,), (6144,), (6144, 1, 4), (16, 128), (1536, 768), (1031,)]


def small_gradients() -> None:
    """megatron-core's sums, bit by bit, in a tenth of the launches."""
    kinds = [
        Kind(
            SHAPES[number % 9],
            (torch.float32, torch.bfloat16)[number % 8 > 0],
            FORMS[number % 3],
            adds=number in (5, 20),
            zero=number == 5,
        )
        for number in range(240)
    ]
    once = [(number, False) for number in range(240)]
    passes = [once, [*once, (3, True), (11, True), (12, False)], [(7, True), *once]]
    for overlap in (False, True):
        options: dict[str, Any] = {"overlap_grad_reduce": overlap, "bucket_size": 4_000_000}
        ours, theirs = wrapped(GradientBuffers, kinds, **options), wrapped(DistributedDataParallel, kinds, **options)
        for seed in range(3):
            for own, wanted in zip(step(ours, passes, seed), step(theirs, passes, seed), strict=True):
                assert torch.equal(own, wanted)
        added = [_kernels(partial(step, chunk, passes[2:], 9)) for chunk in (ours, theirs)]
        print(f"  overlap {overlap}: kernels that add gradients, ours {added[0]}, megatron-core's {added[1]}")
        assert sum(added[0].values()) < sum(added[1].values()) / 3


def sums_optimizer() -> None:
    """Norms and weights of one pass are those of megatron-core's two, also if gradients are not aligned."""
    unaligned = 0
    for dtype, distributed, moe in [
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
    ]:
        for clip in (0.0, 1.0):
            ours, theirs = (learner(clip, dtype, distributed, False, moe) for _ in range(2))
            norms = compare(ours, theirs, clip)
            unaligned += sum(each.grad.data_ptr() % 16 > 0 for each in ours.optimizer.get_parameters())
            print(f"  {dtype}, distributed {distributed}, experts {moe}, clip {clip}: norms {norms}")
        set_gradients(ours, 1.0, 0)
        next(iter(ours.model[0].parameters())).main_grad.view(-1)[3] = torch.nan
        assert not ours.optimizer.step(divisor(5.0)).isfinite()
    print(f"  {unaligned} gradients were not aligned to 16 bytes")
    assert unaligned > 0


def _kernels(work: Any) -> Counter[str]:
    """The number of kernels that add to or convert lists of tensors, and of those that add to one tensor."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    return Counter(
        kind
        for name in names
        for kind in ("multi_tensor_apply_kernel", "CUDAFunctor_add")
        if kind in name and ("multi" in kind or "multi" not in name)
    )
