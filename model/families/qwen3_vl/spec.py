"""The family's entry in :data:`model.families.REGISTRY`. Importing it needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model.families.base import ModelSpec
from model.families.qwen3_vl.architecture import Qwen3VLArchitecture
from model.families.qwen3_vl.flops import step_flops
from model.families.qwen3_vl.hf_config import MODEL_TYPES, from_hf, to_hf
from model.families.qwen3_vl.presets import PRESETS, SMALL
from model.families.qwen3_vl.sizes import check

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from model.network.settings import ModelSettings
    from model.weights.mapping import ParameterMap


def _build(architecture: Qwen3VLArchitecture, settings: ModelSettings, **stage: bool) -> MegatronModule:
    from model.families.qwen3_vl.build import build_model

    return build_model(architecture, settings, **stage)


def _parameter_maps(architecture: Qwen3VLArchitecture, **options: Any) -> dict[str, ParameterMap]:
    from model.families.qwen3_vl.names import parameter_maps

    return parameter_maps(architecture, **options)


SPEC = ModelSpec[Qwen3VLArchitecture](
    name="qwen3_vl",
    model_types=MODEL_TYPES,
    presets=PRESETS,
    typical="qwen3-vl-4b",
    small=frozenset(SMALL),
    from_hf=from_hf,
    to_hf=to_hf,
    step_flops=step_flops,
    check=check,
    build=_build,
    parameter_maps=_parameter_maps,
)
