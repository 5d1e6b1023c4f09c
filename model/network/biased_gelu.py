"""GELU after a column-parallel layer that returns its bias instead of adding it, in plain torch and with a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def plain_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """Applies GELU, approximated by tanh, to the sum of a product (P, w) and a bias (w,)."""
    return F.gelu(product + bias, approximate="tanh")


def kernel_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """Computes the same with Triton kernels of our own, which also give the bias its gradient."""
    from model.kernels.biased_gelu import gelu_with_bias  # Triton is only available with CUDA

    return gelu_with_bias(product, bias)


def biased_gelu(config: TransformerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the GELU of a back end: with kernels for Transformer Engine, in plain torch otherwise."""
    return kernel_gelu if config.transformer_impl == "transformer_engine" else plain_gelu
