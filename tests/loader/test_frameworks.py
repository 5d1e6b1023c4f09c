"""The scripts of ``docs/frameworks.md``, in two processes and alone: who gets what, what is learned, how it continues.

They train a tiny Qwen3.5 on packs. It must learn what it learns from the samples one by one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import losses_of_sample
from tests.loader.framework_run import ALONE, SETTINGS, STOP, TOTAL, make_model, summary
from tests.loader.synthetic import write_dataset
from tests.ports import free_port
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.loader import StreamingLoader

pytestmark = pytest.mark.slow  # imports of the frameworks

ROOT = Path(__file__).resolve().parents[2]
#: What each script needs besides what vlmdata itself needs.
FRAMEWORKS = {"ddp": None, "accelerate": "accelerate", "trainer": "accelerate", "lightning": "lightning"}
Results = dict[str, list[dict[str, Any]]]
#: Processes of each framework: two ranks, and for some one without a group.
RANKS = ("0", "1", "alone")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 weighted samples with no to three images."""
    return write_dataset(tmp_path_factory.mktemp("frameworks") / "data", 4, 8, family="qwen3_5", weighted=True)


def installed(framework: str) -> bool:
    package = FRAMEWORKS[framework]
    return package is None or importlib.util.find_spec(package) is not None


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each process did under each framework. Imports take most of the time, so all run in the same processes."""
    folder = tmp_path_factory.mktemp("frameworks")
    frameworks = [framework for framework in FRAMEWORKS if installed(framework)]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",  # as `accelerate launch --cpu` sets it
    }
    command = [sys.executable, "-m", "tests.loader.framework_run", str(data), str(folder), *frameworks]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True) as started,
    ):
        try:
            started.wait(timeout=500)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    found: Results = {}
    for framework in frameworks:
        for rank in RANKS[: 3 if framework in ALONE else 2]:
            path = folder / f"{framework}-{rank}.json"
            logs = "".join(log.read_text()[-4000:] for log in sorted(folder.glob("log*")))
            assert path.exists(), f"rank {rank} under {framework}: {logs}"
            found.setdefault(framework, []).append(json.loads(path.read_text()))
            assert "error" not in found[framework][-1], found[framework][-1]["error"]
    return found


@pytest.fixture(scope="module")
def alone(data: Path) -> tuple[list[tuple[int, int, set[str]]], list[float]]:
    """The steps in a single process, and the weights after them: of samples one by one, without any framework."""
    model, dataset = make_model(), VlmDataset(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = []
    with StreamingLoader(data, dp_rank=0, dp_size=1, **SETTINGS) as loader:
        assert len({loader.steps(epoch) for epoch in range(3)}) > 1, "epochs differ in length"
        for _ in range(TOTAL):
            at = loader.position
            batches = [next(iter(loader)) for _ in range(SETTINGS["global_batch"])]
            samples = [dataset[origin.index] for batch in batches for origin in batch.origins]
            weights = [torch.from_numpy(sample.loss_weights[1 : sample.length].copy()) for sample in samples]
            total = sum(float(each.sum()) for each in weights)
            for sample, each in zip(samples, weights, strict=True):
                ((losses_of_sample(model, sample) * each).sum() / total).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append((at.epoch, at.step, {key for batch in batches for key in batch.sample_keys}))
    assert steps[STOP][1] > 0, "the run is stopped within an epoch"
    assert steps[STOP][0] > 0
    return steps, summary(model)


@pytest.mark.parametrize("framework", FRAMEWORKS)
class TestFrameworks:
    @pytest.fixture
    def ranks(self, framework: str, results: Results) -> list[dict[str, Any]]:
        if not installed(framework):
            pytest.skip(f"{FRAMEWORKS[framework]} is not installed")
        return results[framework][:2]

    def test_every_rank_gets_its_part_of_every_step(self, ranks: list[dict[str, Any]], alone: Any) -> None:
        found: dict[tuple[int, int], list[str]] = {}
        for epoch, step, _, keys, _ in chain.from_iterable(rank["whole"] for rank in ranks):
            found.setdefault((epoch, step), []).extend(keys)
        images = [[each[-1] > 0 for each in rank["whole"]] for rank in ranks]
        assert images[0] != images[1], "one rank has images where the other has none"
        assert len(ranks[0]["whole"]) == len(ranks[1]["whole"]) == TOTAL * SETTINGS["global_batch"] // 2
        assert list(found) == [(epoch, step) for epoch, step, _ in alone[0]]
        for epoch, step, keys in alone[0]:
            assert len(found[epoch, step]) == len(keys), "no sample twice"
            assert set(found[epoch, step]) == keys

    def test_it_learns_what_one_process_learns(self, ranks: list[dict[str, Any]], alone: Any) -> None:
        for rank in ranks:
            assert rank["weights"] == pytest.approx(alone[1], rel=1e-4, abs=1e-4)

    def test_it_learns_the_same_without_a_process_group(self, framework: str, results: Results, alone: Any) -> None:
        if framework not in ALONE or not installed(framework):
            pytest.skip(f"{framework} needs a process group, or is not installed")
        assert len(results[framework][2]["whole"]) == TOTAL * SETTINGS["global_batch"]
        assert results[framework][2]["weights"] == pytest.approx(alone[1], rel=1e-4, abs=1e-4)

    def test_a_continued_run_is_the_uninterrupted_one(self, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            assert len(rank["before"]) == STOP * SETTINGS["global_batch"] // 2
            assert rank["before"] + rank["after"] == rank["whole"]
            assert rank["continued"] == pytest.approx(rank["weights"], rel=1e-6)
