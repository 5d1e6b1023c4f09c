"""From a configuration to the model's settings."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.model.helpers import small_architecture
from vlmdata.model.families.qwen3_5.build import language_config
from vlmdata.model.training.build import build
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.settings.model_settings import settings_of


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_the_recipe_of_fp8_reaches_megatron_core(recipe: str) -> None:
    architecture = small_architecture()
    config = load_config(None, ["run.fp8=true", f"run.fp8_recipe={recipe}", "model.backend=transformer_engine"])
    settings = settings_of(config, architecture, on_gpu=False)
    # megatron-core refuses Transformer Engine's options where that is not installed.
    made = language_config(architecture, dataclasses.replace(settings, backend="torch"))
    assert (made.fp8, made.fp8_recipe) == ("hybrid", recipe)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("parallel.tp=3", "parallel.tp 3 does not divide"),
        ("parallel.sp=true", "parallel.sp splits tokens over tensor-parallel ranks: it needs parallel.tp > 1"),
        ("run.fp8=true", "run.fp8 needs model.backend 'transformer_engine'"),
        ("model.vision_attention=flash_attention_4", "model.vision_attention 'flash_attention_4' computes in bfloat16"),
    ],
)
def test_what_the_builder_refuses_is_reported_in_the_words_of_the_configuration(
    one_process: None, setting: str, message: str
) -> None:
    config = load_config(None, [setting])
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(config, small_architecture(), RankPlace.here(), torch.device("cpu"))
