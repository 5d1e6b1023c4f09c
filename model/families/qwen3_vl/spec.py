"""The family's entry in :data:`model.families.REGISTRY`. Importing it needs no torch."""

from __future__ import annotations

from model.families.base import ModelSpec, imported_when_called
from model.families.qwen3_vl.architecture import Qwen3VLArchitecture
from model.families.qwen3_vl.flops import step_flops
from model.families.qwen3_vl.hf_config import FORMAT, from_hf, to_hf
from model.families.qwen3_vl.presets import PRESETS, SMALL
from model.network.settings import check_settings

SPEC = ModelSpec[Qwen3VLArchitecture](
    name="qwen3_vl",
    model_types=FORMAT.kinds,
    presets=PRESETS,
    typical="qwen3-vl-4b",
    small=SMALL,
    from_hf=from_hf,
    to_hf=to_hf,
    step_flops=step_flops,
    check=check_settings,
    build=imported_when_called("model.families.qwen3_vl.build", "build_model"),
    parameter_maps=imported_when_called("model.families.qwen3_vl.names", "parameter_maps"),
)
