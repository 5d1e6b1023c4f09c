"""The family's entry in :data:`vlmdata.model.families.REGISTRY`. Importing it needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmdata.model import flops
from vlmdata.model.families.base import ModelSpec, imported_when_called
from vlmdata.model.families.processors import QWEN3_VL
from vlmdata.model.families.qwen3_5.architecture import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen35Architecture,
    Qwen35LanguageArchitecture,
)
from vlmdata.model.families.qwen3_5.hf_config import FORMAT, from_hf, to_hf
from vlmdata.model.families.qwen3_5.presets import PRESETS, SMALL
from vlmdata.model.families.qwen3_5.sizes import check
from vlmdata.model.kernels.shapes import AttentionShape, DecoderKernels, DeltaNetShape
from vlmdata.model.network.settings import ModelSettings

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def _build(architecture: Qwen35Architecture, settings: ModelSettings, **stage: bool) -> MegatronModule:
    from vlmdata.model.kernels.hollow import import_flash_linear_attention

    import_flash_linear_attention()  # before megatron-core imports all of it
    from vlmdata.model.families.qwen3_5.build import build_model

    return build_model(architecture, settings, **stage)


def step_flops(
    model: Qwen35Architecture, mtp: bool = True, frozen: tuple[str, ...] = (), adapted: tuple[str, ...] = ()
) -> flops.StepFlops:
    """Returns the FLOP coefficients of an architecture; see :class:`vlmdata.model.families.base.ModelSpec`.

    Terms in addition to those of :mod:`vlmdata.model.flops`, per sample of s true tokens, forward:

    - per token: the projections and the convolution of gated delta nets, and the delta rule in its recurrent form
      (read, correct, write: 6 d_k d_v per value head);
    - multi-token prediction: its projection, one full-attention layer with feed-forward, and the output layer again.
    """
    language, predicting = model.language, model.mtp_layers if mtp else 0
    full = language.layer_types.count(FULL_ATTENTION)
    linear = language.num_layers - full
    joining = predicting * 2 * 2 * language.hidden_size * language.hidden_size
    return flops.step_flops(
        model,
        frozen,
        adapted,
        full_layers=full + predicting,
        gate=True,
        feed_forward_layers=language.num_layers + predicting,
        outputs=1 + predicting,
        own_projections=joining + linear * _delta_net_per_token(language),
        own_mixing=linear * _delta_rule_per_token(language),
    )


def _delta_net_per_token(language: Qwen35LanguageArchitecture) -> int:
    keys = language.linear_num_key_heads * language.linear_key_head_dim
    heads = language.linear_num_value_heads
    values = heads * language.linear_value_head_dim
    projections = 2 * language.hidden_size * (2 * keys + 2 * values + 2 * heads + values)
    convolution = 2 * language.linear_conv_kernel_dim * (2 * keys + values)
    return projections + convolution


def _delta_rule_per_token(language: Qwen35LanguageArchitecture) -> int:
    return 6 * language.linear_num_value_heads * language.linear_key_head_dim * language.linear_value_head_dim


def decoder_kernels(architecture: Qwen35Architecture, settings: ModelSettings, tokens: int) -> DecoderKernels | None:
    """Returns the kernels of the decoder on a rank, or None if flash-linear-attention does not compute delta nets."""
    language = architecture.language
    if settings.backend != "transformer_engine" or settings.precision != "bf16":
        return None
    if LINEAR_ATTENTION not in language.layer_types:
        return None
    ranks = settings.tensor_parallel * settings.context_parallel
    delta_net = DeltaNetShape(
        tokens=tokens,
        key_heads=language.linear_num_key_heads // ranks,
        value_heads=language.linear_num_value_heads // ranks,
        key_width=language.linear_key_head_dim,
        value_width=language.linear_value_head_dim,
        taps=language.linear_conv_kernel_dim,
    )
    return DecoderKernels(delta_net, None if settings.compile else _attention_shape(language, settings))


def _attention_shape(language: Qwen35LanguageArchitecture, settings: ModelSettings) -> AttentionShape:
    ranks = settings.tensor_parallel
    groups = language.num_key_value_heads // ranks
    return AttentionShape(
        groups=groups,
        queries=language.num_attention_heads // ranks // max(1, groups),
        width=language.head_dim,
        rotated=language.rotary_dim,
        gated=True,
        zero_centered=True,
        feed_forward=language.intermediate_size // ranks if language.moe is None else None,
    )


SPEC = ModelSpec[Qwen35Architecture](
    name="qwen3_5",
    model_types=FORMAT.kinds,
    presets=PRESETS,
    typical="4b",
    small=SMALL,
    from_hf=from_hf,
    to_hf=to_hf,
    step_flops=step_flops,
    check=check,
    build=_build,
    parameter_maps=imported_when_called("vlmdata.model.families.qwen3_5.names", "parameter_maps"),
    processor=QWEN3_VL,
    kernels=decoder_kernels,
)
