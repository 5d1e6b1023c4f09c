"""The learning rate of every step, against a formula on paper."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from tests.model.training.conftest import steps_of
from vlmdata.model.training.optimizer.learner import build_schedule
from vlmdata.model.training.settings.config import ConfigError, OptimizerConfig, RunConfig, TrainConfig
from vlmdata.model.training.settings.config_loading import load_config


def rates(config: TrainConfig, steps: int) -> list[float]:
    group: dict[str, Any] = {}
    schedule = build_schedule(SimpleNamespace(param_groups=[group]), config)
    found = []
    for _ in range(steps):
        found.append(group["lr"])
        schedule.step(1)
    return found


def on_paper(step: int, peak: float, least: float, warmup: int, steps: int, kind: str) -> float:
    """Of a step from 1."""
    if step <= warmup:
        return peak * step / (warmup + 1)
    if kind == "constant":
        return peak
    share = (step - 1 - warmup) / (steps - warmup)
    return least + (peak - least) * (0.5 * (1 + math.cos(math.pi * share)) if kind == "cosine" else 1 - share)


@given(
    steps=st.integers(1, 60),
    warmup=st.none() | st.integers(0, 59),
    kind=st.sampled_from(["cosine", "linear", "constant"]),
    peak=st.floats(1e-6, 1.0),
    least=st.floats(0.0, 1.0),
)
def test_every_step_has_the_rate_on_paper(steps: int, warmup: int | None, kind: Any, peak: float, least: float) -> None:
    if warmup is not None:
        warmup = min(warmup, steps - 1)
    optimizer = OptimizerConfig(lr=peak, min_lr=peak * least, warmup_steps=warmup, schedule=kind)
    found = rates(TrainConfig(optimizer=optimizer, run=RunConfig(steps=steps)), steps)
    used = min(10, steps // 10) if warmup is None else warmup
    wanted = [on_paper(step, peak, peak * least, used, steps, kind) for step in range(1, steps + 1)]
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-300)
    assert found[0] > 0
    assert found[used] == pytest.approx(peak)


def test_a_run_logs_the_rates_it_trains_with(run: Callable[..., Any], tmp_path: Path) -> None:
    run(run__steps=2, run__save_every=1, data__global_batch=1, optimizer__warmup_steps=1, optimizer__decay_steps=None)
    assert [line["lr"] for line in steps_of(tmp_path / "run")] == [1e-3, 2e-3]
    assert json.loads((tmp_path / "run/checkpoints/step-00000002/run.json").read_text())["step"] == 2


def test_the_last_learning_rate_follows_the_first() -> None:
    assert load_config(None, ["optimizer.lr=1e-6"]).optimizer.last_lr == pytest.approx(1e-7)
    assert load_config(None, ["optimizer.lr=1e-6", "optimizer.min_lr=0.0"]).optimizer.last_lr == 0
    with pytest.raises(ConfigError, match=r"optimizer.min_lr 0.01 is above optimizer.lr 0.001"):
        load_config(None, ["optimizer.lr=1e-3", "optimizer.min_lr=1e-2"])
