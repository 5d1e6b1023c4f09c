"""Builds a Qwen3.5-VL from an architecture and settings.

It adds to :mod:`vlmdata.model.network.megatron_config` what only Qwen3.5 has: the gated delta net and the output gate
of attention. The process groups are those of :mod:`vlmdata.model.parallel.groups`.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from vlmdata.model.families.qwen3_5.architecture import FULL_ATTENTION, LINEAR_ATTENTION, Qwen35Architecture
from vlmdata.model.families.qwen3_5.gated_delta_net import KernelGatedDeltaNet, Qwen35GatedDeltaNet, TorchGatedDeltaNet
from vlmdata.model.families.qwen3_5.language import Qwen35Language
from vlmdata.model.families.qwen3_5.model import Qwen35VL
from vlmdata.model.families.qwen3_5.sizes import check
from vlmdata.model.network import assembly, megatron_config
from vlmdata.model.network.decoder_layer import first_linear, full_attention, layer_spec
from vlmdata.model.network.provider import Provider, TorchProvider
from vlmdata.model.network.settings import ModelSettings, SettingError


def build_model(architecture: Qwen35Architecture, settings: ModelSettings, **stage: Any) -> Qwen35VL:
    """Builds this rank's part of a model; see :class:`vlmdata.model.families.base.Build`."""
    check(settings, architecture)
    provider = assembly.provider_of(settings, "flash-linear-attention")
    if settings.backend == "transformer_engine":
        require_compiler(settings)
        _prepare_kernels(architecture, settings.tune_kernels)
    config = language_config(architecture, settings)
    kinds = {
        LINEAR_ATTENTION: layer_spec(config, provider, _delta_net(provider), "in_proj"),
        FULL_ATTENTION: layer_spec(config, provider, full_attention(provider)),
    }
    predict = settings.mtp_layers_of(architecture) > 0
    decoder = partial(
        Qwen35Language,
        provider=provider,
        mtp_layer=kinds[FULL_ATTENTION] if predict else None,
        mtp_loss_scale=settings.mtp_loss_scale,
    )
    model, layers = partial(Qwen35VL, mtp=predict), [kinds[kind] for kind in architecture.language.layer_types]
    return assembly.build_stage(architecture, settings, config, provider, layers, model, decoder=decoder, **stage)


def language_config(architecture: Qwen35Architecture, settings: ModelSettings) -> TransformerConfig:
    """The decoder's ``TransformerConfig``."""
    language = architecture.language
    return megatron_config.language_config(
        architecture,
        settings,
        recomputed=("gdn_norm_out",),
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind == LINEAR_ATTENTION) for kind in language.layer_types],
        linear_conv_kernel_dim=language.linear_conv_kernel_dim,
        linear_key_head_dim=language.linear_key_head_dim,
        linear_value_head_dim=language.linear_value_head_dim,
        linear_num_key_heads=language.linear_num_key_heads,
        linear_num_value_heads=language.linear_num_value_heads,
    )


def require_compiler(settings: ModelSettings) -> None:
    """Checks for what selective recomputation needs.

    At the first backward pass, megatron-core compiles a C++ function that drops the output of the delta net's norm.

    Raises:
        SettingError: If there is no compiler.
    """
    if settings.recompute != "selective":
        return
    tools = ("ninja", os.environ.get("CXX", "c++"))
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise SettingError(
            f"«recompute» 'selective' has megatron-core compile a C++ function, but {' and '.join(missing)} cannot be "
            "found on PATH: install ninja and a C++ compiler (apt install ninja-build g++), or set it to 'none' or "
            "'full'"
        )


def _prepare_kernels(architecture: Qwen35Architecture, tune: bool) -> None:
    """Chooses configurations of the delta net's kernels, unless all are tuned.

    Raises:
        SettingError: If gradients would be wrong on this GPU.
    """
    import triton  # only available with CUDA

    from vlmdata.model.kernels.configurations import choose_configurations, miscompiled

    language, capability = architecture.language, torch.cuda.get_device_capability()
    widths = language.linear_key_head_dim, language.linear_value_head_dim
    if miscompiled(*widths, capability, triton.__version__):
        raise SettingError(
            f"«backend» 'transformer_engine' would compute wrong gradients: Triton {triton.__version__} miscompiles a "
            f"kernel of delta nets with heads of {widths[0]} and {widths[1]} columns on this GPU; install Triton 3.7.1 "
            "or later, or use 'torch'"
        )
    if not tune:
        choose_configurations(*widths, capability)


def _delta_net(provider: Provider) -> ModuleSpec:
    engine = Qwen35GatedDeltaNet if provider.compiled else KernelGatedDeltaNet
    return ModuleSpec(
        module=TorchGatedDeltaNet if isinstance(provider, TorchProvider) else engine,
        submodules=GatedDeltaNetSubmodules(
            in_proj=first_linear(provider), out_norm=provider.plain_rms_norm(), out_proj=provider.row_parallel_linear()
        ),
    )
