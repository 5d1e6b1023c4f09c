"""The registry of model families."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vlmdata.families import REGISTRY as DATA_FAMILIES
from vlmdata.model.families import REGISTRY, architecture_from_hf, model_spec, preset_costs, presets, spec_of


@pytest.mark.parametrize("name", REGISTRY)
def test_a_family_is_whole(name: str) -> None:
    spec = model_spec(name)
    assert spec.name == name
    assert spec.typical in set(spec.presets) - spec.small
    assert preset_costs()[spec.presets[spec.typical].data_family] == preset_costs()[spec.typical]
    for made in spec.presets.values():
        assert made.data_family in DATA_FAMILIES
        assert spec_of(made) is spec
        written = spec.to_hf(made)
        assert written["model_type"] in spec.model_types
        assert architecture_from_hf(written) == made
    assert set(spec.presets) <= set(presets())
    assert set(spec.presets) <= set(preset_costs())


def test_names_of_presets_are_unique() -> None:
    assert len(presets()) == sum(len(model_spec(name).presets) for name in REGISTRY)


def test_the_registry_needs_no_torch() -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nimport vlmdata.model.families as f\nf.preset_costs(), f.preset('4b')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match="unknown model family 'llama'; known families: qwen3_5"):
        model_spec("llama")
