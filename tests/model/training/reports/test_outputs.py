"""What a run writes beside checkpoints: profiles, ids, numbers that any reader of JSON takes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.model.training.conftest import steps_of
from vlmdata.errors import ResourceError
from vlmdata.model.training.reports.logs import JsonLines, RunLog, StepReport, TensorBoard, WeightsAndBiases
from vlmdata.model.training.reports.profiling import Profiler
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.step import StepResult


def events_of(trace: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events


class TestProfiles:
    @staticmethod
    def profiled(folder: Path, first: int, last: int, ran: range, fails_at: int | None = None) -> list[str]:
        """The steps that a trace shows, when these steps ran."""
        profiler = Profiler((first, last), folder / "trace.json", torch.device("cpu"))
        try:
            for step in ran:
                with profiler.at(step), torch.profiler.record_function(f"step-{step}"):
                    assert step != fails_at
        except AssertionError:
            pass
        finally:
            profiler.close()
        names = {event.get("name", "") for event in events_of(folder / "trace.json")}
        assert "Self CPU" in (folder / "trace.txt").read_text()
        return sorted(name for name in names if name.startswith("step-"))

    def test_hold_the_steps_of_the_range(self, tmp_path: Path) -> None:
        assert self.profiled(tmp_path, 2, 3, range(1, 5)) == ["step-2", "step-3"]

    def test_are_written_when_the_run_ends_within_the_range(self, tmp_path: Path) -> None:
        assert self.profiled(tmp_path, 2, 9, range(1, 4)) == ["step-2", "step-3"]

    def test_are_written_when_the_run_fails_within_the_range(self, tmp_path: Path) -> None:
        assert self.profiled(tmp_path, 2, 9, range(1, 9), fails_at=3) == ["step-2", "step-3"]

    def test_hold_what_is_left_when_a_run_begins_within_the_range(self, tmp_path: Path) -> None:
        assert self.profiled(tmp_path, 2, 4, range(3, 6)) == ["step-3", "step-4"]

    def test_are_made_of_a_resumed_run(self, run: Callable[..., Any], tmp_path: Path) -> None:
        run(run__steps=2, data__global_batch=1)
        assert not (tmp_path / "run" / "profile").exists()
        run(run__steps=3, data__global_batch=1, resume=True, run__profile=[2, 5])
        assert any("aten::mm" in event.get("name", "") for event in events_of(tmp_path / "run/profile/rank-00000.json"))

    @pytest.mark.parametrize("full", [False, True])  # no room for the trace; nor for its table
    def test_that_cannot_be_written_do_not_end_the_run(
        self, small_disk: Callable[..., Path], capfd: pytest.CaptureFixture[str], full: bool
    ) -> None:
        disk = small_disk(32)
        if full:
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                (disk / "filling").write_bytes(bytes(1 << 20))
        profiler = Profiler((1, 1), disk / "profile" / "rank-00000.json", torch.device("cpu"))
        with profiler.at(1):
            for _ in range(500):
                torch.ones(2).add(1)
        why = r"no profile of these steps: .+ \(0\.0 MB free\)\. .*Free space"
        assert re.search(rf"warning: {disk}/profile/rank-00000\.json: {why}", capfd.readouterr().err)
        assert not list(disk.glob("profile/*.json*"))


class TestWeightsAndBiasesIds:
    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """Arguments of every start of a run."""
        calls: list[dict[str, Any]] = []

        def init(**options: Any) -> SimpleNamespace:
            calls.append(options)
            return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
        return calls

    def test_equal_runs_are_two_and_a_resumed_one_is_the_same(
        self, started: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        configs = [load_config(None, ["run.wandb=receipts", f"run.out={tmp_path / name}"]) for name in ("a", "b")]
        for config in configs:
            Path(config.run.out).mkdir()
            WeightsAndBiases(config, resumed=False)
        WeightsAndBiases(configs[0], resumed=True)
        more_steps = dataclasses.replace(configs[0], run=dataclasses.replace(configs[0].run, steps=7))
        WeightsAndBiases(more_steps, resumed=True)
        WeightsAndBiases(configs[0], resumed=False)
        a, b, again, changed, fresh = (call["id"] for call in started)
        assert a == again == changed
        assert len({a, b, fresh}) == 3
        assert (tmp_path / "a" / "wandb-id").read_text().strip() == fresh
        assert {(call["project"], call["resume"]) for call in started} == {("receipts", "allow")}

    def test_a_run_that_was_logged_elsewhere_before_gets_one(
        self, started: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        WeightsAndBiases(load_config(None, ["run.wandb=x", f"run.out={tmp_path}"]), resumed=True)
        assert started[0]["id"] == (tmp_path / "wandb-id").read_text().strip()

    @pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
    def test_wandb_takes_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        for resumed in (False, True):
            log = WeightsAndBiases(load_config(None, ["run.wandb=x", f"run.out={tmp_path}"]), resumed)
            log.write(1 + resumed, {"loss": 1.0})
            log.close()
        kept = (tmp_path / "wandb-id").read_text().strip()
        assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{kept}"))) >= 1


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl", None)
    log.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3, "samples": "ab"})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None, "lr": 1e-3, "samples": "ab"}
    assert "NaN" not in line


def test_the_line_of_a_step_shows_both_sides_of_a_separate_tower() -> None:
    """Waits, memory and FLOP of the tower's ranks, whose numbers a mean over all ranks would hide."""
    result = StepResult(
        loss=1.5, extra_losses={}, grad_norm=2.0, targets=10, tokens=900, slots=1000, images=3, patches=40, flops=4e12,
        seconds=2.0, data_wait=0.5, memory=50 << 30, interrupted=False, not_finite=(), batches=(), vision_flops=1e12,
        vision_memory=48 << 30, vision_wait=0.4, language_wait=0.02,
    )  # fmt: skip
    apart = StepReport(3, result, {"mfu": 0.3, "vision_mfu": 0.2, "language_mfu": 0.4})
    assert apart.line(10).endswith(
        "wait 25.0% (vision 20.0%, language 1.0%)  mfu 30.0% (vision 20.0%, language 40.0%)  "
        "mem 50.0 GiB (vision 48.0)  2.00 s"
    )
    assert apart.metrics["vision_memory_gib"] == 48
    together = dataclasses.replace(result, vision_memory=0, vision_wait=None, language_wait=None)
    line = StepReport(3, together, {"mfu": 0.3}).line(10)
    assert line.endswith("wait 25.0%  mfu 30.0%  mem 50.0 GiB  2.00 s")


@pytest.mark.parametrize("before", ["", '{"step": 1}\n', '{"step": 1}\n{"st', '{"st'])
def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path, before: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(before)
    log = JsonLines(file, 1)
    log.write(2, {})
    log.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    whole = [{"step": 1}] if "}" in before else []
    assert lines == [*whole, {"event": "resumed", "step": 1}, {"step": 2}]


class TestLogsOnAFullDisk:
    @pytest.fixture
    def full(self, small_disk: Callable[..., Path]) -> Path:
        disk = small_disk(64)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (disk / "filling").write_bytes(bytes(1 << 20))
        (disk / "run").mkdir()
        return disk / "run"

    def test_end_the_run_with_a_word(self, full: Path) -> None:
        config = load_config(None, [f"run.out={full}", "run.tensorboard=false"])
        message = rf"{full}: logs could not be written: {os.strerror(errno.ENOSPC)}; 0.0 MB free.*Free space"
        with pytest.raises(ResourceError, match=message), RunLog(config, True, None) as log:
            log.event("noted", 1, {})

    def test_end_it_before_a_run_of_weights_and_biases_begins(
        self, full: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=None))  # type: ignore[arg-type]
        with pytest.raises(ResourceError, match=f"{full}: logs could not be written"):
            WeightsAndBiases(load_config(None, ["run.wandb=x", f"run.out={full}"]), resumed=False)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_are_reported_though_tensorboard_writes_behind_our_back(self, full: Path) -> None:
        def written_for_seconds() -> None:
            log = TensorBoard(full / "tensorboard", None)
            for step in range(100):
                log.write(step, {"loss": 1.0})
                time.sleep(0.05)

        with pytest.raises(ResourceError, match=rf"{full}: logs could not be written"):
            written_for_seconds()

    def test_do_not_hide_what_failed_before(self, full: Path) -> None:
        config = load_config(None, [f"run.out={full}", "run.tensorboard=false"])

        def failing() -> None:
            with RunLog(config, True, None) as log:
                with pytest.raises(ResourceError):
                    log.event("noted", 1, {})
                raise KeyError

        with pytest.raises(KeyError):
            failing()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_run_trains_from_a_url_as_from_a_folder(
    run: Callable[..., Any], chats: Path, tmp_path: Path, scheme: str
) -> None:
    import fsspec

    url = f"file://{chats}"
    memory = fsspec.filesystem("memory")
    if scheme == "memory":
        url = "memory://bucket/training"
        memory.put(f"{chats}/", "/bucket/training/", recursive=True)
    try:
        options = {"run__steps": 1, "data__global_batch": 1}
        run("url", data__paths=[url], data__cache_dir=str(tmp_path / "cache"), **options)
        run("folder", **options)
    finally:
        if scheme == "memory":
            memory.rm("/bucket", recursive=True)
    ours, theirs = steps_of(tmp_path / "url"), steps_of(tmp_path / "folder")
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]
