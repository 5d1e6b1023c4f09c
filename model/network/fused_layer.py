"""A decoder layer with kernels of our own for its norms and for the sum between them.

Mirrors ``TransformerLayer`` of megatron-core 0.19.2 for dense layers with Transformer Engine, whose norms are part of
the linear layers that follow. All other layers are computed by megatron-core's class itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from model.network.awaited import await_weight
from model.network.linear import ShortNormLinear

#: Arguments that megatron-core's layer hands on to attention.
_OF_ATTENTION = (
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "rotary_pos_cos_sin",
    "attention_bias",
    "packed_seq_params",
    "sequence_len_offset",
)


def residual_sum(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Takes the place of megatron-core's ``get_bias_dropout_add``, which torch compiles: there is no dropout here."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = output
        assert dropout == 0
        return residual + (x if bias is None else x + bias)

    return add


class FusedLayer(TransformerLayer):
    """A decoder layer that normalises within its residual stream, if its linear layers allow it.

    The first linear layer of attention and that of the feed-forward part must take the short way
    (:mod:`model.network.linear`). The sum at the layer's end is megatron-core's.

    Args:
        projection: Name of the first linear layer of attention, or of what is in its place.
        args: See ``TransformerLayer``.
        options: See ``TransformerLayer``.

    Attributes:
        may_fuse: Whether the layer's settings allow it; None before its first call.
    """

    def __init__(self, *args: Any, projection: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._projection = projection
        self.may_fuse: bool | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Computes the layer.

        Args:
            hidden_states: (t, 1, H).
            args: See ``TransformerLayer.forward``.
            kwargs: See ``TransformerLayer.forward``.

        Returns:
            Hidden states (t, 1, H), and ``context``, unchanged.
        """
        if args or not self._fuses(hidden_states, kwargs):
            plain: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return plain
        # Triton is only available with CUDA.
        from model.kernels.residual_rms_norm import keep_and_rms_norm, sum_and_rms_norm

        first, second = self._linears()
        stream, normed = keep_and_rms_norm(hidden_states, *_norm(first))
        with first.given(normed):
            attended, bias = self.self_attention(normed, **{name: kwargs.get(name) for name in _OF_ATTENTION})
        assert bias is None
        stream, normed = sum_and_rms_norm(stream, attended, *_norm(second))
        with second.given(normed):
            product = self.mlp(normed)
        return self._forward_post_mlp(product, stream), kwargs.get("context")

    def _fuses(self, x: Tensor, options: dict[str, Any]) -> bool:
        if self.may_fuse is None:
            self.may_fuse = self._may_fuse()
        if not self.may_fuse or options.get("inference_context") or options.get("inference_params"):
            return False
        return all(each.goes_short(x) for each in self._linears())

    def _may_fuse(self) -> bool:
        """Whether a layer's settings allow it. They are final once the layer is called."""
        config = self.config
        if self.is_moe_layer or not all(isinstance(each, ShortNormLinear) for each in self._linears()):
            return False
        # A part that is computed in chunks, or again, calls its linear layer with another tensor than the layer's.
        chunked = config.mlp_chunks_for_training > 1 or config.recompute_granularity == "selective"
        plain = self.submodules_config.self_attn_bda is residual_sum and not config.add_bias_linear
        return plain and not (chunked or config.fp32_residual_connection)

    def _linears(self) -> tuple[Any, Any]:
        """The linear layers that follow the norms."""
        return getattr(self.self_attention, self._projection), self.mlp.linear_fc1


def _norm(linear: ShortNormLinear) -> tuple[Any, float, bool]:
    """Returns the norm's weight, once it has arrived, eps, and whether its scale is 1 + weight."""
    await_weight(linear)
    return linear.layer_norm_weight, linear.eps, linear.zero_centered_gamma
