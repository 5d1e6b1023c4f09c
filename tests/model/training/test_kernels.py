"""Which kernels a run compiles while it starts."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import vlmdata.model.training.kernels
from vlmdata.model.kernels.shapes import AttentionShape, DecoderKernels, DeltaNetShape, Kernels, TowerKernels
from vlmdata.model.training.kernels import compile_ahead, needs_compiler
from vlmdata.model.training.settings.config_loading import load_config

SHAPE = DeltaNetShape(tokens=16384, key_heads=16, value_heads=32, key_width=128, value_width=128, taps=4)


def kernels_of(command: list[str]) -> Kernels:
    kernels: Kernels = pickle.loads(bytes.fromhex(command[-1]))
    return kernels


class TestTheStart:
    """When the trainer compiles ahead, and for what."""

    @pytest.fixture(autouse=True)
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[Kernels]:
        found: list[Kernels] = []
        monkeypatch.setattr(vlmdata.model.training.kernels, "can_compile_ahead", lambda: True)
        monkeypatch.setattr(
            vlmdata.model.training.kernels, "KernelsAhead", lambda command: found.append(kernels_of(command))
        )
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        return found

    def start(self, **settings: Any) -> None:
        compile_ahead(load_config(None, [(name.replace("__", "."), value) for name, value in settings.items()]))

    def test_with_the_heads_of_a_rank(self, started: list[Kernels]) -> None:
        self.start(model__preset="4b", parallel__tp=2, parallel__cp=2, data__capacity=8192)
        attention = AttentionShape(2, 4, 256, 64, gated=True, zero_centered=True, feed_forward=4608)
        decoder = DecoderKernels(DeltaNetShape(8192, 4, 8, 128, 128, 4), attention)
        assert started == [Kernels(decoder, tower=TowerKernels(8, 64, 1024, 2048), vocabulary=None, every=False)]

    def test_with_all_configurations_if_they_are_tuned(self, started: list[Kernels]) -> None:
        self.start(model__preset="2b", model__tune_kernels=True, model__language_only=True)
        assert [(each.every, each.tower) for each in started] == [(True, None)]

    def test_with_layers_and_cross_entropy(self, started: list[Kernels]) -> None:
        self.start(model__preset="2b")
        self.start(model__preset="35b-a3b")
        self.start(model__preset="35b-a3b", parallel__tp=4, parallel__sp=True)
        self.start(model__preset="2b", model__compile=True)
        assert [each.vocabulary for each in started] == [248320, 248320, None, 248320]
        shapes = [each.decoder.attention for each in started]
        assert shapes[0] == AttentionShape(2, 4, 256, 64, gated=True, zero_centered=True, feed_forward=6144)
        assert shapes[1] == AttentionShape(2, 8, 256, 64, gated=True, zero_centered=True, feed_forward=None)
        assert shapes[2] == AttentionShape(0, 4, 256, 64, gated=True, zero_centered=True, feed_forward=None)
        assert shapes[3] is None

    def test_for_a_checkpoint(self, started: list[Kernels], tmp_path: Path) -> None:
        from vlmdata.model.families import architecture_to_hf, preset

        (tmp_path / "config.json").write_text(json.dumps(architecture_to_hf(preset("2b"))))
        self.start(model__hf=str(tmp_path))
        assert [each.decoder.delta_net.value_heads for each in started] == [16]

    @pytest.mark.parametrize(
        "settings",
        [
            {"model__preset": "qwen3-vl-2b"},
            {"model__preset": "2b", "model__backend": "torch"},
            {"model__preset": "2b", "run__precision": "fp32"},
            {"model__hf": "somebody/of-the-hub"},
        ],
    )
    def test_not_without_such_kernels(self, started: list[Kernels], settings: dict[str, Any]) -> None:
        self.start(**settings)
        assert not started

    def test_once_on_a_node(self, started: list[Kernels], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        self.start(model__preset="2b")
        assert not started


@pytest.mark.parametrize(
    ("settings", "compiler"),
    [
        ({"model.preset": "2b"}, False),
        ({"model.preset": "35b-a3b"}, True),
        ({"model.preset": "2b", "model.compile": True}, True),
        ({"model.preset": "2b", "model.backend": "torch"}, True),
        ({"model.hf": "somebody/of-the-hub"}, True),
    ],
)
def test_torchs_compiler_is_needed_by_experts_and_on_request(settings: dict[str, Any], compiler: bool) -> None:
    assert needs_compiler(load_config(None, list(settings.items()))) == compiler
