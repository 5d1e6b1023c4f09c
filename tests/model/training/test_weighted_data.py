"""Runs on data with loss weights: what is logged and learned, in training and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from tests.model.training.conftest import SETTINGS, evaluations_of, short_rows, steps_of, train_here
from tests.model.training.plain import plain_loss, write_checkpoint
from tests.weighted import build_weighted, with_weights
from vlmdata import StreamingLoader
from vlmdata.preprocess.config import ImageConfig


def build(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return build_weighted(folder, rows, image=ImageConfig(1024, 16384), rows_per_shard=12, pad_multiple=16)


def test_the_logged_loss_is_the_weighted_mean_and_targets_are_counted(one_process: None, tmp_path: Path) -> None:
    data = build(tmp_path / "data", with_weights(short_rows(60)))
    theirs = write_checkpoint(tmp_path / "checkpoint", data)
    names = ("capacity", "max_patches", "global_batch", "pad_multiple")
    with StreamingLoader(data, **{name: SETTINGS[f"data.{name}"] for name in names}) as loader:
        step = [batch for batch, _ in zip(loader, range(SETTINGS["data.global_batch"]), strict=False)]
    assert any(batch.loss_weights is not batch.loss_mask for batch in step)
    train_here(
        tmp_path / "run",
        data,
        model__hf=str(tmp_path / "checkpoint"),
        run__steps=1,
        data__eval_paths=[str(data)],
        run__eval_every=1,
    )
    wanted, targets = plain_loss(theirs, data, [origin.index for batch in step for origin in batch.origins])
    first = steps_of(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(wanted, rel=1e-5)
    assert first["targets"] == targets
    before = evaluations_of(tmp_path / "run")[0]
    assert (before["loss"], before["targets"]) == pytest.approx(plain_loss(theirs, data), rel=1e-5)


def test_equal_weights_learn_what_none_do_to_the_last_bit(one_process: None, tmp_path: Path) -> None:
    rows, found = short_rows(60), []
    for name, extra in (("none", {}), ("quarter", {"of_sample": 0.25})):
        data = build(tmp_path / name, [{**row, **extra} for row in rows])
        train_here(tmp_path / name / "run", data, run__steps=2)
        found.append(
            [
                [step[value] for value in ("loss", "mtp_loss", "grad_norm", "targets")]
                for step in steps_of(tmp_path / name / "run")
            ]
        )
    assert found[0] == found[1]
