"""Few configurations of the gated delta net's kernels for Triton to choose from at a run's first start.

flash-linear-attention has Triton's autotuner compile and time 179 configurations of 14 kernels, one after the other,
for minutes. The table below leaves the likely ones. They are compiled ahead
(:mod:`vlmdata.model.kernels.compile_ahead`) and timed for milliseconds each, and Triton keeps the result on disk.
``benchmarks/kernel_choice.py`` times all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

#: Modules of flash-linear-attention with the kernels of a gated delta net.
_MODULES = (
    "fla.modules.conv.triton.kernels",
    "fla.modules.l2norm",
    "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_o",
    "fla.ops.common.chunk_scaled_dot_kkt",
    "fla.ops.gated_delta_rule.wy_fast",
    "fla.ops.utils.cumsum",
    "fla.ops.utils.solve_tril",
)
#: The compute capability that the table is made for: H100, H200.
HOPPER = (9, 0)
#: Head widths up to which every configuration of the table fits into shared memory.
_WIDEST = 128
#: Milliseconds for which a configuration is run, first to warm up and then to be timed.
_WARM_UP, _TIMED = 5, 20


class Configuration(NamedTuple):
    """A kernel's configuration."""

    warps: int  # warps of a program
    stages: int = 3  # stages of software pipelining
    blocks: Mapping[str, Any] = {}  # block sizes and other constants, by their names in the kernel


#: The configurations of each kernel, the likeliest first. Each is within 2 % of the fastest for some numbers of heads
#: (``benchmarks/kernel_choice.py``, 2026-11-23). ``tests/model/gpu_configurations.py`` checks each of the
#: delta rule's against float64.
CANDIDATES: Mapping[str, tuple[Configuration, ...]] = {
    "causal_conv1d_fwd_kernel": (Configuration(4, blocks={"BD": 32}), Configuration(4, blocks={"BD": 64})),
    "causal_conv1d_bwd_kernel": (Configuration(4, blocks={"BD": 32}), Configuration(4, blocks={"BD": 64})),
    "l2norm_fwd_kernel": (Configuration(8, blocks={"BT": 32}),),
    "l2norm_bwd_kernel": (Configuration(8, blocks={"BT": 32}),),
    "chunk_local_cumsum_scalar_kernel": (Configuration(2),),
    "chunk_scaled_dot_kkt_fwd_kernel": (Configuration(2, 3, {"BK": 64}), Configuration(4, 3, {"BK": 64})),
    "merge_16x16_to_64x64_inverse_kernel": (Configuration(2, 3, {"DOT_PRECISION": "ieee"}),),
    "recompute_w_u_fwd_kernel": (Configuration(4, 3), Configuration(8, 3)),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (
        Configuration(4, 2, {"BV": 64}),
        Configuration(4, 3, {"BV": 64}),
    ),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": (
        Configuration(4, 2, {"BV": 32}),
        Configuration(4, 3, {"BV": 64}),
    ),
    "chunk_fwd_kernel_o": (Configuration(4, 3, {"BK": 64, "BV": 64}), Configuration(8, 3, {"BK": 128, "BV": 128})),
    "chunk_bwd_kernel_dv_local": (Configuration(2, 3), Configuration(4, 3)),
    "chunk_bwd_kernel_dqkwg": (Configuration(4, 3),),
    # With four warps, Triton miscompiles its sibling without a gate on Hopper (flash-linear-attention's pull request
    # 988). This one is right.
    "prepare_wy_repr_bwd_kernel": (Configuration(4, 3),),
}


def miscompiled(key_width: int, value_width: int, capability: tuple[int, int], triton: str) -> bool:
    """Whether Triton compiles a kernel of the delta rule wrongly, so that gradients are wrong.

    On Hopper and before version 3.7.1, it does so for heads of 33 to 64 columns: flash-linear-attention's
    ``chunk_bwd_kernel_dqkwg`` with tiles of 64 (its issue 640).
    """
    version = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    return capability == HOPPER and version < (3, 7, 1) and any(32 < width <= 64 for width in (key_width, value_width))


def choose_configurations(key_width: int, value_width: int, capability: tuple[int, int]) -> list[str]:
    """Restricts Triton's autotuners to the configurations of the table, for this process.

    Where they may not fit (other GPUs, wider heads, another version of flash-linear-attention), an autotuner keeps its
    own. Returns the names of these kernels.
    """
    tuners = autotuners()
    if capability != HOPPER or max(key_width, value_width) > _WIDEST:
        return sorted(tuners)
    from triton.testing import do_bench

    kept = []
    for name, tuner in tuners.items():
        candidates = CANDIDATES.get(name, ())
        configs = [each for each in tuner.configs if (each.num_warps, each.num_stages, each.kwargs) in candidates]
        if configs:
            tuner.configs = configs
            tuner.do_bench = partial(do_bench, warmup=_WARM_UP, rep=_TIMED)
        else:
            kept.append(name)
    return sorted(kept)


def autotuners() -> dict[str, Any]:
    """Returns Triton's autotuners of these kernels, by the name of the kernel."""
    from triton.runtime.autotuner import Autotuner

    found: dict[str, Any] = {}
    for each in (each for name in _MODULES for each in vars(import_module(name)).values() if hasattr(each, "fn")):
        while each is not None and not isinstance(each, Autotuner):
            each = getattr(each, "fn", None)
        if each is not None:
            found[each.base_fn.__name__] = each
    return found
