"""The dense model beside experts has their active FLOP, at the true width of the preset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vlmdata.model.families import preset, spec_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import their neighbours

from benchmarks.expert_layers import NARROW, forms, ratios


@pytest.mark.parametrize("name", ["35b-a3b", "qwen3-vl-30b-a3b"])
def test_dense_layers_have_the_flop_of_the_experts_of_a_token(name: str) -> None:
    found = forms(preset(name))
    language: Any = found["experts"].language
    width, moe = language.hidden_size, language.moe
    layers = preset(name).language.num_layers
    router = 3 * layers * 2 * width * (moe.num_experts + bool(moe.shared_expert_intermediate_size))
    of = {form: spec_of(each).step_flops(each, False, ()).per_token for form, each in found.items()}
    assert of["experts"] - router == of["dense"]
    assert of["narrow"] == of["dense"] - 3 * layers * 6 * width * (found["dense"].language.intermediate_size - NARROW)


def test_ratios_are_of_the_whole_and_of_the_feed_forward_layers() -> None:
    found = {form: {"kernels": seconds} for form, seconds in (("experts", 5.0), ("dense", 3.0), ("narrow", 1.0))}
    assert ratios(found, "kernels") == {"whole": 0.6, "feed_forward": 0.5}
