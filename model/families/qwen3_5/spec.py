"""The family's entry in :data:`model.families.REGISTRY`. Importing it needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.families.base import ModelSpec, imported_when_called
from model.families.qwen3_5.architecture import Qwen35Architecture
from model.families.qwen3_5.flops import step_flops
from model.families.qwen3_5.hf_config import FORMAT, from_hf, to_hf
from model.families.qwen3_5.kernels import decoder_kernels
from model.families.qwen3_5.presets import PRESETS, SMALL
from model.families.qwen3_5.sizes import check

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from model.network.settings import ModelSettings


def _build(architecture: Qwen35Architecture, settings: ModelSettings, **stage: bool) -> MegatronModule:
    from model.kernels.hollow import import_flash_linear_attention

    import_flash_linear_attention()  # before megatron-core imports all of it
    from model.families.qwen3_5.build import build_model

    return build_model(architecture, settings, **stage)


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
    parameter_maps=imported_when_called("model.families.qwen3_5.names", "parameter_maps"),
    kernels=decoder_kernels,
)
