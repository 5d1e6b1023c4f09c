"""From a configuration to the model's settings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("megatron.core")

from model.network.build import language_config
from model.training.config import load_config
from model.training.setup import settings_of
from tests.model.helpers import small_architecture


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_the_recipe_of_fp8_reaches_megatron_core(recipe: str) -> None:
    architecture = small_architecture()
    config = load_config(None, ["run.fp8=true", f"run.fp8_recipe={recipe}", "model.backend=transformer_engine"])
    settings = settings_of(config, architecture, torch.device("cpu"))
    # megatron-core refuses Transformer Engine's options where that is not installed.
    made = language_config(architecture, dataclasses.replace(settings, backend="torch"))
    assert (made.fp8, made.fp8_recipe) == ("hybrid", recipe)
