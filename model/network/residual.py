"""What lies between the linear layers of the vision tower's blocks, in plain torch and with kernels.

That is the residual stream, with its sums and adjacent norms, and the activation. Linear layers return their bias
instead of adding it. With tensor parallelism, the product of row-parallel ones is summed over ranks before it comes
here.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmdata.model.network.awaited import await_weight


class PlainResidual:
    """Computes sums and GELU in plain torch, and norms with the back end's layer."""

    def keep_and_norm(self, x_pc: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """Returns x and its layer norm, (P, c)."""
        return x_pc, norm(x_pc)

    def sum_and_norm(self, x_pc: Tensor, added: tuple[Tensor, Tensor], norm: Any) -> tuple[Tensor, Tensor]:
        """Adds a layer's product (P, c) and its bias (c,). Returns the sum and its layer norm."""
        x_pc = self.sum(x_pc, added)
        return x_pc, norm(x_pc)

    def sum(self, x_pc: Tensor, added: tuple[Tensor, Tensor]) -> Tensor:
        """Adds a layer's product and its bias."""
        out, bias = added
        return x_pc + (out + bias)

    def gelu(self, product: Tensor, bias: Tensor) -> Tensor:
        """Applies GELU, approximated by tanh, to the sum of a product (P, w) and a bias (w,)."""
        return F.gelu(product + bias, approximate="tanh")


class KernelResidual(PlainResidual):
    """Computes the same with Triton kernels of our own, which read and write the stream less often.

    Args:
        eps: Added to the variance in the norms.
    """

    def __init__(self, eps: float):
        self.eps = eps

    def keep_and_norm(self, x_pc: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """Returns x and its layer norm, (P, c)."""
        from vlmdata.model.kernels.residual_norm import keep_and_norm  # Triton is only available with CUDA

        return keep_and_norm(x_pc, *_parameters(norm), self.eps)

    def sum_and_norm(self, x_pc: Tensor, added: tuple[Tensor, Tensor], norm: Any) -> tuple[Tensor, Tensor]:
        """Adds a layer's product (P, c) and its bias (c,). Returns the sum and its layer norm."""
        from vlmdata.model.kernels.residual_norm import sum_and_norm

        return sum_and_norm(x_pc, *added, *_parameters(norm), self.eps)

    def sum(self, x_pc: Tensor, added: tuple[Tensor, Tensor]) -> Tensor:
        """Adds a layer's product and its bias."""
        from vlmdata.model.kernels.residual_norm import sum_with_bias

        return sum_with_bias(x_pc, *added)

    def gelu(self, product: Tensor, bias: Tensor) -> Tensor:
        """Applies GELU to the sum. Its backward pass also gives the bias its gradient."""
        from vlmdata.model.kernels.biased_gelu import gelu_with_bias

        return gelu_with_bias(product, bias)


def residual(config: TransformerConfig, eps: float) -> PlainResidual:
    """Returns the residual stream of a back end: with kernels for Transformer Engine, in plain torch otherwise."""
    return KernelResidual(eps) if config.transformer_impl == "transformer_engine" else PlainResidual()


def _parameters(norm: nn.Module) -> tuple[Any, Any]:
    await_weight(norm)
    return norm.weight, norm.bias
