"""A decoder layer, put together from either back end's parts.

Mirrors transformers' ``Qwen3_5DecoderLayer``, ``Qwen3_5RMSNorm``, ``Qwen3_5MLP`` and ``Qwen3_5MoeSparseMoeBlock``.
The layer, the MLP and the expert layer are megatron-core's; a *provider* says which linear layers, norms, attention and
delta net they consist of. Both providers give parameters the same checkpoint keys.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from model.metrics import MetricSums
from model.network.attention import Qwen35SelfAttention, SegmentAttention
from model.network.gated_delta_net import Qwen35GatedDeltaNet, TorchGatedDeltaNet


class RMSNorm(nn.Module):
    """``Qwen3_5RMSNorm``: computed in float32, scaled by 1 + weight."""

    zero_centered = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.get_default_device() if config.use_cpu_initialization else torch.cuda.current_device()
        fresh = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(fresh(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each tensor-parallel rank sees some tokens only; megatron-core then sums the
        # gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.type_as(x)


class PlainRMSNorm(RMSNorm):
    """The norm inside ``Qwen3_5RMSNormGated``: scaled by the weight itself.

    megatron-core's delta net would have it zero-centred; ``w - 1`` of a small w does not come back exactly, so a
    checkpoint would change by being converted.
    """

    zero_centered = False


class LayerNorm(nn.LayerNorm):
    """torch's, in the vision tower; built as megatron-core builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        device = torch.get_default_device() if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)


class Provider(Protocol):
    """Which parts a back end uses: megatron-core's ``BackendSpecProvider`` and the three that it lacks."""

    def column_parallel_linear(self) -> type: ...  # noqa: D102

    def column_parallel_layer_norm_linear(self) -> type | None: ...  # noqa: D102

    def row_parallel_linear(self) -> type: ...  # noqa: D102

    def fuse_layernorm_and_linear(self) -> bool: ...  # noqa: D102

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any: ...  # noqa: D102

    def core_attention(self) -> type: ...  # noqa: D102

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any: ...  # noqa: D102

    def gated_delta_net(self) -> type:
        """The gated delta net."""
        ...

    def plain_rms_norm(self) -> Any:
        """An RMS norm whose scale is the weight itself, for the delta net's output."""
        ...


class TorchProvider(LocalSpecProvider):
    """Plain torch: runs on CPU and GPU."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Zero-centred RMS norm, or a layer norm."""
        return RMSNorm if rms_norm else LayerNorm

    def plain_rms_norm(self) -> Any:
        """RMS norm with a plain scale."""
        return PlainRMSNorm

    def core_attention(self) -> type:
        """Scaled dot product over segments."""
        return SegmentAttention

    def gated_delta_net(self) -> type:
        """Chunked delta rule in torch."""
        return TorchGatedDeltaNet


def transformer_engine_provider() -> Provider:
    """The Transformer Engine back end; CUDA only.

    Raises:
        ImportError: If Transformer Engine or flash-linear-attention is missing.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    from megatron.core.ssm.gated_delta_net.common import HAVE_FLA

    missing = [
        name for name, have in (("transformer-engine", HAVE_TE), ("flash-linear-attention", HAVE_FLA)) if not have
    ]
    if missing:
        raise ImportError(
            f"backend 'transformer_engine' needs {' and '.join(missing)}: install the extra 'gpu' on a CUDA machine, "
            "or choose backend 'torch'"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class PlainNorm:
        """Transformer Engine's RMS norm, scaled by the weight itself."""

        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> Any:
            plain = copy.copy(config)
            plain.layernorm_zero_centered_gamma = False
            return TENorm(plain, hidden_size, eps)

    class TransformerEngineProvider(TESpecProvider):
        """Transformer Engine's linear layers, norms and attention; flash-linear-attention's delta rule."""

        def plain_rms_norm(self) -> Any:
            return PlainNorm

        def gated_delta_net(self) -> type:
            return Qwen35GatedDeltaNet

    return TransformerEngineProvider()


@dataclass
class RouterState:
    """What all routers of a model share.

    Attributes:
        weight: Weight of the load-balancing loss of the micro-batch in work: the sum of its targets' weights, since
            the gradient is divided by that sum over the whole step in the end.
        metrics: Where the losses are counted.
    """

    weight: Tensor | float = 1.0
    metrics: MetricSums = field(default_factory=MetricSums)


class Qwen35Router(TopKRouter):
    """``Qwen3_5MoeTopKRouter`` with a load-balancing loss that counts no padding and does not depend on the layout.

    megatron-core's own loss is scaled by the rank's tokens and divided by the sum of tokens, which is off when the
    ranks' padding differs or not every token is a target; and of a pack that is all padding it is not a number.
    """

    state: RouterState

    def gating(self, input: Tensor) -> Tensor:
        """Router logits in float32. megatron-core's would move a CPU weight to CUDA."""
        return router_gating_linear(input, self.weight, self.bias, torch.float32)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Gives the loss its part in the gradient: experts x sum of (share of choices x mean probability).

        Equations 4 to 6 of "Switch Transformers" (Fedus et al. 2021), the shares over all choices of a token as
        megatron-core has it: 1 when tokens are spread evenly (transformers' ``load_balancing_loss_func`` gives as many
        as a token has choices). A rank adds its own tokens' part.

        Args:
            probs: Weights of the experts, which carry the gradient.
            scores_for_aux_loss: float32 (t, experts), probabilities, 0 for padding.
            routing_map: bool (t, experts), what was chosen, nothing for padding.
            with_padding_mask: Ignored.
        """
        coefficient, group = self.get_aux_loss_coeff("aux_loss"), self.tp_cp_group
        if coefficient == 0:
            return probs
        chosen = routing_map.sum(0).float()
        if group.size() > 1:
            dist.all_reduce(chosen, group=group)
        tokens = (chosen.sum() / self.topk).clamp(min=1)
        loss = (scores_for_aux_loss.sum(0) * chosen).sum() * chosen.numel() / (self.topk * tokens.square())
        weight = self.state.weight
        if self.training and torch.is_grad_enabled():
            share = torch.as_tensor(weight, dtype=torch.float32, device=loss.device) / group.size()
            self.state.metrics.add("moe_aux_loss", loss.detach() * weight, share)
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * coefficient * weight)
        return attached


def layer_spec(config: TransformerConfig, provider: Provider, *, linear: bool, moe: bool) -> ModuleSpec:
    """A decoder layer.

    Args:
        config: Of the decoder.
        provider: The back end.
        linear: Gated delta net, else full attention.
        moe: Mixture of experts, else a dense MLP.
    """
    fused = provider.fuse_layernorm_and_linear()
    norm = provider.layer_norm(rms_norm=True)
    into = provider.column_parallel_layer_norm_linear() if fused else provider.column_parallel_linear()
    if linear:
        attention = ModuleSpec(
            module=provider.gated_delta_net(),
            submodules=GatedDeltaNetSubmodules(
                in_proj=into, out_norm=provider.plain_rms_norm(), out_proj=provider.row_parallel_linear()
            ),
        )
    else:
        qk_norm = provider.layer_norm(rms_norm=True, for_qk=True)
        attention = ModuleSpec(
            module=Qwen35SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=into,
                core_attention=provider.core_attention(),
                linear_proj=provider.row_parallel_linear(),
                q_layernorm=qk_norm,
                k_layernorm=qk_norm,
            ),
        )
    # Transformer Engine keeps a norm's weight in the linear layer behind it; its checkpoint keys are used by both.
    keys = {}
    if not fused:
        keys["input_layernorm."] = f"self_attention.{'in_proj' if linear else 'linear_qkv'}.layer_norm_"
        if not moe:
            keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not moe else norm,
            mlp=_experts(config, provider) if moe else _dense(provider, into),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _dense(provider: Provider, into: Any) -> Any:
    """``Qwen3_5MLP``."""
    return partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=into, linear_fc2=provider.row_parallel_linear())
    )


def _experts(config: TransformerConfig, provider: Provider) -> Any:
    """``Qwen3_5MoeSparseMoeBlock``."""
    shared = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=provider.grouped_mlp_modules(config.moe_grouped_gemm),
            shared_experts=partial(SharedExpertMLP, submodules=shared),
            router=Qwen35Router,
        ),
    )
