"""The family's entry in :data:`vlmdata.model.families.REGISTRY`. Importing it needs no torch."""

from __future__ import annotations

from vlmdata.model import flops
from vlmdata.model.families.base import ModelSpec, imported_when_called
from vlmdata.model.families.processors import QWEN3_VL
from vlmdata.model.families.qwen3_vl.architecture import Qwen3VLArchitecture
from vlmdata.model.families.qwen3_vl.hf_config import FORMAT, from_hf, to_hf
from vlmdata.model.families.qwen3_vl.presets import PRESETS, SMALL
from vlmdata.model.network.settings import check_settings


def step_flops(
    model: Qwen3VLArchitecture, mtp: bool = False, frozen: tuple[str, ...] = (), adapted: tuple[str, ...] = ()
) -> flops.StepFlops:
    """Returns the FLOP coefficients of an architecture; see :class:`vlmdata.model.families.base.ModelSpec`.

    All layers have full attention. Adding image features to hidden states is not counted, like other sums.
    """
    layers = model.language.layers
    return flops.step_flops(model, frozen, adapted, full_layers=layers, gate=False, feed_forward_layers=layers)


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
    build=imported_when_called("vlmdata.model.families.qwen3_vl.build", "build_model"),
    parameter_maps=imported_when_called("vlmdata.model.families.qwen3_vl.names", "parameter_maps"),
    processor=QWEN3_VL,
)
