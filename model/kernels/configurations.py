"""Kernel configurations of the gated delta net, measured on Hopper GPUs, in place of Triton's search at each start.

flash-linear-attention has Triton's autotuner compile and time about 150 configurations of 14 kernels, which takes more
than two minutes. The table below names one configuration of each. ``benchmarks/kernel_choice.py`` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model.kernels.delta_net import autotuners

#: The compute capability that the table was measured on: H100, H200.
HOPPER = (9, 0)
#: Head widths up to which every configuration of the table fits into shared memory.
_WIDEST = 128


@dataclass(frozen=True)
class Configuration:
    """A kernel's configuration.

    Attributes:
        warps: Warps of a program.
        stages: Stages of software pipelining.
        blocks: Block sizes and other constants, by their names in the kernel.
    """

    warps: int
    stages: int = 3
    blocks: Mapping[str, Any] = field(default_factory=dict)

    def is_that_of(self, config: Any) -> bool:
        """Whether a ``triton.Config`` is this one."""
        return (config.num_warps, config.num_stages, config.kwargs) == (self.warps, self.stages, dict(self.blocks))


#: The configuration of each kernel.
CHOSEN: Mapping[str, Configuration] = {
    "causal_conv1d_fwd_kernel": Configuration(4, blocks={"BD": 32}),
    "causal_conv1d_bwd_kernel": Configuration(4, blocks={"BD": 32}),
    "l2norm_fwd_kernel": Configuration(8, blocks={"BT": 32}),
    "l2norm_bwd_kernel": Configuration(8, blocks={"BT": 32}),
    "chunk_local_cumsum_scalar_kernel": Configuration(2),
    "chunk_scaled_dot_kkt_fwd_kernel": Configuration(4, 3, {"BK": 64}),
    "merge_16x16_to_64x64_inverse_kernel": Configuration(4, 3, {"DOT_PRECISION": "ieee"}),
    "recompute_w_u_fwd_kernel": Configuration(4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": Configuration(4, 3, {"BV": 64}),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": Configuration(4, 3, {"BV": 64}),
    "chunk_fwd_kernel_o": Configuration(8, 3, {"BK": 128, "BV": 128}),
    "chunk_bwd_kernel_dv_local": Configuration(4, 3),
    "chunk_bwd_kernel_dqkwg": Configuration(4, 3),
    "prepare_wy_repr_bwd_kernel": Configuration(4, 3),
}


def choose_configurations(key_width: int, value_width: int, capability: tuple[int, int]) -> list[str]:
    """Restricts Triton's autotuners to the configurations of the table, for this process.

    Where a configuration may not fit (other GPUs, wider heads, another version of flash-linear-attention), the
    autotuner keeps its own.

    Args:
        key_width: Width of a query or key head.
        value_width: Width of a value head.
        capability: Compute capability of the GPU.

    Returns:
        Names of the kernels that are still tuned.
    """
    tuners = autotuners()
    if capability != HOPPER or max(key_width, value_width) > _WIDEST:
        return sorted(tuners)
    tuned = []
    for name, tuner in tuners.items():
        chosen = CHOSEN.get(name)
        configs = [each for each in tuner.configs if chosen is not None and chosen.is_that_of(each)]
        if configs:
            tuner.configs = configs
        else:
            tuned.append(name)
    return sorted(tuned)
