"""Layers take the kernels of gates where torch shall not compile."""

from __future__ import annotations

import pytest

from tests.model.helpers import small_architecture

pytest.importorskip("megatron.core")


def test_a_decoder_layer_takes_them_if_torch_shall_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.mlp import MLP

    from vlmdata.model.families.qwen3_5.build import language_config
    from vlmdata.model.network.decoder_layer import full_attention, layer_spec
    from vlmdata.model.network.provider import TorchProvider
    from vlmdata.model.network.settings import ModelSettings

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())  # Transformer Engine's, which needs CUDA
    settings = ModelSettings(backend="transformer_engine", precision="bf16", compile=False)
    config = language_config(small_architecture(), settings)
    assert (config.use_te_activation_func, config.bias_activation_fusion, config.bias_dropout_fusion) == (
        True,
        False,
        False,
    )
    provider = TorchProvider()
    provider.compiled = False
    layer = layer_spec(config, provider, full_attention(provider)).submodules
    assert layer.self_attention.module.__name__ == "KernelSelfAttention"
    assert layer.mlp.keywords["submodules"].activation_func(config).__class__.__name__ == "SwiGLUActivation"
    assert layer.mlp.func.__self__ is MLP
