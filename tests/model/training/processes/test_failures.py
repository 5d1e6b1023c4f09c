"""Ranks that cannot go on: all end soon, with the reason and once; no step that is not finite is saved."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from tests.model.training.conftest import ROOT, SETTINGS, environment, steps_of
from tests.model.training.ranks import Ranks, arguments_of
from vlmdata import StreamingLoader, VlmDataset
from vlmdata.model.training.processes.failure import NotFiniteError

pytestmark = pytest.mark.slow


def flip(data: Path, sample: int) -> None:
    """Changes a byte of a sample's tokens."""
    dataset = VlmDataset(data)
    with open(dataset.shard_path(int(dataset.index.shard[sample])), "r+b") as file:
        file.seek(int(dataset.index.data_offsets["input_ids"][sample]))
        value = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))


def sample_of(data: Path, rank: int, step: int) -> int:
    """A sample that only this one of two ranks reads, in this step from 0."""
    with StreamingLoader(
        data,
        capacity=SETTINGS["data.capacity"],
        global_batch=2,
        max_patches=SETTINGS["data.max_patches"],
        pad_multiple=SETTINGS["data.pad_multiple"],
        dp_rank=rank,
        dp_size=2,
    ) as loader:
        for batch in loader:
            if batch.step == step and batch.origins:
                return batch.origins[0].index
    raise AssertionError("no such step")


class TestOneRank:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_with_damaged_data_ends_all_and_names_rank_file_and_row(
        self, chats: Path, tmp_path: Path, workers: int
    ) -> None:
        data, out = tmp_path / "data", tmp_path / "run"
        shutil.copytree(chats, data)
        sample = sample_of(chats, rank=1, step=1)
        flip(data, sample)
        options = ("--set", f"data.workers={workers}", "--set", "data.global_batch=2")
        ranks = Ranks(arguments_of(data, out, *options), tmp_path / "said", 2)
        codes = ranks.wait()
        dataset = VlmDataset(data)
        shard, row = dataset.shard_path(int(dataset.index.shard[sample])), int(dataset.index.source_row[sample])
        assert f"error: rank 1: {shard}: row {row} key {dataset.index.key(sample)} input_ids" in ranks.said(1)
        assert codes == [1, 2]
        assert "error: rank 0: another rank has exited or hangs" in ranks.said(0)
        assert "Traceback" not in ranks.said(0) + ranks.said(1)
        assert [line["step"] for line in steps_of(out)] == [1]

    def test_with_nothing_to_train_ends_all_with_one_line(self, chats: Path, tmp_path: Path) -> None:
        ranks = Ranks(arguments_of(chats, tmp_path / "run", "--pp", "2", "--freeze", "language"), tmp_path / "said", 2)
        assert ranks.wait() == [2, 2]
        assert ranks.said(0) == ""
        assert ranks.said(1) == (
            "error: rank 1: model.freeze ['language'] leaves nothing to train on pipeline stage 2 of 2; "
            "freeze fewer parts, or use fewer stages (--pp)\n"
        )

    def test_without_its_data_ends_all(self, chats: Path, tmp_path: Path) -> None:
        # As where one node lacks the folder. Each rank looks at a path of its own, so the plans are the same.
        shared = arguments_of(chats, tmp_path / "run")
        own = [part if part != str(chats) else "rank-data" for part in shared]
        (tmp_path / "0").mkdir()
        (tmp_path / "0" / "rank-data").symlink_to(chats)
        (tmp_path / "1").mkdir()
        ranks = Ranks(own, tmp_path / "said", 2, folders=[tmp_path / "0", tmp_path / "1"])
        assert ranks.wait() == [2, 2]
        assert "error: rank 1: rank-data: no such directory" in ranks.said(1)
        assert ranks.said(0) == ""


class TestAllRanks:
    def test_with_the_same_error_say_it_once(self, chats: Path, tmp_path: Path) -> None:
        ranks = Ranks(arguments_of(chats, tmp_path / "run", "--capacity", "32"), tmp_path / "said", 2)
        assert ranks.wait() == [2, 2]
        both = ranks.said(0) + ranks.said(1)
        assert both.count("longer than capacity 32") == 1
        assert both.startswith("error: rank ")

    def test_with_a_configuration_that_is_refused_say_it_once(self, chats: Path, tmp_path: Path) -> None:
        ranks = Ranks(arguments_of(chats, tmp_path / "run", "--tp", "3"), tmp_path / "said", 2)
        assert ranks.wait() == [2, 2]
        assert "error: rank 0: world size 2 is not a multiple of tensor 3" in ranks.said(0)
        assert ranks.said(1) == ""


#: Each step changes the weights by about the learning rate, so the second one overflows.
DIVERGING = {"optimizer__lr": 1e30, "optimizer__min_lr": 0.0, "optimizer__warmup_steps": 0, "data__global_batch": 2}


class TestNotFinite:
    def test_stops_the_run_and_is_not_saved(
        self, run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(NotFiniteError) as found:
            run(run__save_every=1, **DIVERGING)
        out = tmp_path / "run"
        text = str(found.value)
        assert text.startswith(("step 2 gave loss nan", "step 2 gave loss inf"))
        assert f"the last good checkpoint is {out / 'checkpoints' / 'step-00000001'}" in text
        assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
        assert "try a lower optimizer.lr" in text

        def no_constant(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        lines = [
            json.loads(line, parse_constant=no_constant) for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line.get("event") for line in lines] == [None, "not_finite"]
        assert lines[1]["step"] == 2
        assert lines[1]["loss"] is None
        assert f"(digest {lines[1]['samples']} on rank 0)" in text
        packs = json.loads((out / "not-finite-step-00000002.json").read_text())["packs"]
        assert len(packs) == 2
        named = next(pack for pack in packs if not pack["finite"])
        assert f"micro-batch {named['micro_batch']} of data-parallel rank 0: samples {named['sample_keys'][0]}" in text
        assert capsys.readouterr().err.count("step 2 gave") == 1

    def test_is_reported_where_its_list_cannot_be_written(self, run: Callable[..., Any], tmp_path: Path) -> None:
        (tmp_path / "run" / "not-finite-step-00000002.json").mkdir(parents=True)
        with pytest.raises(NotFiniteError, match=r"could not be listed in .*/not-finite-step-00000002\.json: Is a dir"):
            run(**DIVERGING)

    def test_a_gradient_that_overflows_on_its_own_is_distinguished_from_a_loss_that_does(
        self, run: Callable[..., Any], tmp_path: Path
    ) -> None:
        # fp32 holds these gradients, but not the sum of their squares.
        with pytest.raises(NotFiniteError, match=r"^step 1 gave grad_norm inf; .*so the gradient overflowed"):
            run(model__mtp_loss_scale=1e25, data__global_batch=2)

    def test_ends_all_ranks_with_its_exit_code(self, chats: Path, tmp_path: Path) -> None:
        settings = [
            part for name, value in DIVERGING.items() for part in ("--set", f"{name.replace('__', '.')}={value}")
        ]
        ranks = Ranks(arguments_of(chats, tmp_path / "run", *settings), tmp_path / "said", 2)
        assert ranks.wait() == [4, 4]
        both = ranks.said(0) + ranks.said(1)
        assert both.count("error: rank ") == 1
        assert "there is no checkpoint yet" in both
        packs = json.loads((tmp_path / "run" / "not-finite-step-00000002.json").read_text())["packs"]
        assert [(pack["data_parallel_rank"], pack["micro_batch"]) for pack in packs] == [(0, 0), (1, 0)]
        assert "Traceback" not in both


def test_a_taken_port_is_named(chats: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run(
            [sys.executable, "train.py", *arguments_of(chats, tmp_path / "run")],
            env={**environment(), **rank},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert f"port {port} of 127.0.0.1 is in use by another process: choose another" in done.stderr
