"""Model families that can be trained, one folder each. docs/extend/model.md shows how to add one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from vlmdata.model.architecture import Architecture
from vlmdata.model.families.base import ModelSpec
from vlmdata.packing.cost import CostModel

#: Families by name. A new one is a folder here with a constant ``SPEC`` in its ``spec.py``, and a line below.
REGISTRY: Mapping[str, str] = {
    "qwen3_5": "vlmdata.model.families.qwen3_5.spec",
    "qwen3_vl": "vlmdata.model.families.qwen3_vl.spec",
}

__all__ = [
    "REGISTRY",
    "ModelSpec",
    "adopts_vocabulary",
    "architecture_from_hf",
    "architecture_to_hf",
    "model_spec",
    "preset",
    "preset_costs",
    "presets",
    "spec_of",
]


@cache
def model_spec(name: str) -> ModelSpec[Any]:
    """Returns the family of a name.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown model family {name!r}; known families: {', '.join(REGISTRY)}")
    found: ModelSpec[Any] = import_module(REGISTRY[name]).SPEC
    return found


def spec_of(architecture: Architecture) -> ModelSpec[Any]:
    """Returns the family of an architecture."""
    return model_spec(architecture.family)


@cache
def presets() -> Mapping[str, Architecture]:
    """Returns the presets of all families by name."""
    return {name: made for family in REGISTRY for name, made in model_spec(family).presets.items()}


def preset(name: str) -> Architecture:
    """Returns a preset by name.

    Raises:
        ValueError: If the name is unknown; lists the known presets.
    """
    if name not in presets():
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(presets())}")
    return presets()[name]


def adopts_vocabulary(name: str) -> bool:
    """True for a small preset, which takes the vocabulary of its dataset; published sizes keep their own."""
    return name in spec_of(preset(name)).small


def preset_costs() -> dict[str, CostModel]:
    """Cost models of all presets with all parts trained, an entry point for ``vlmdata plan --cost NAME``.

    The names of families of data stand for typical presets.
    """
    costs = {name: spec_of(each).step_flops(each, True, ()).cost_model() for name, each in presets().items()}
    specs = map(model_spec, REGISTRY)
    return costs | {spec.presets[spec.typical].data_family: costs[spec.typical] for spec in specs}


def architecture_from_hf(config: Mapping[str, Any] | Any, *, ignore: Collection[str] = ()) -> Architecture:
    """Reads the config of a checkpoint of any family.

    Args:
        config: The content of ``config.json``, or a transformers config object.
        ignore: Names of unknown fields (without their section) that do not change the result.

    Raises:
        ValueError: If no family has such models, a field has a value that the model does not compute, or fields
                are unknown.
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    specs = [model_spec(name) for name in REGISTRY]
    for spec in specs:
        if kind in spec.model_types:
            made: Architecture = spec.from_hf(config, ignore)
            return made
    known = " or ".join(each for spec in specs for each in spec.model_types)
    raise ValueError(
        f"need the top-level config of a {known} vision-language checkpoint (with text_config), got model_type {kind!r}"
    )


def architecture_to_hf(architecture: Architecture) -> dict[str, Any]:
    """Returns a ``config.json`` from which :func:`architecture_from_hf` and transformers restore this model."""
    return spec_of(architecture).to_hf(architecture)
