"""A back end for CPUs whose first linear layers contain their norms, like Transformer Engine's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor, nn

from model.network import linear
from model.network.linear import ShortNormLinear, with_short_way
from model.network.provider import TorchProvider


class NormLinear(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A linear layer with an RMS norm, and the settings by which the short way decides."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps, self.zero_centered_gamma = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.empty(input_size))
        self.apply_bias = self.gemm_bias_unfused_add = self.te_return_bias = False
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self.fuse_wgrad_accumulation = self.is_fsdp2 = self.return_layernorm_output = False
        self.te_quant_params = self.fsdp_group = None
        self.tp_size, self.weight_names, self.normalization = 1, ["weight"], "RMSNorm"
        self.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: False)
        self.fwd_ln_sm_margin = self.inf_ln_sm_margin = self.bwd_ln_sm_margin = 0
        for name in linear._OVERLAPS:
            setattr(self, name, False)

    def forward(self, x: Tensor) -> Any:
        scale = self.layer_norm_weight + self.zero_centered_gamma
        return super().forward(F.rms_norm(x, x.shape[-1:], scale, self.eps))


class NormLinearProvider(TorchProvider):
    """The torch back end with such layers, and without what torch compiles."""

    compiled = False

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return with_short_way(NormLinear, ShortNormLinear)
