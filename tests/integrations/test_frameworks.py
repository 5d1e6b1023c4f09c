"""The scripts of ``docs/frameworks.md``, in two processes and alone: who gets what, what is learned, how it continues.

They train a tiny Qwen3.5 on packs. It must learn what it learns from the samples one by one, with the same loss at each
step. Frameworks that are not installed are skipped: ``make adapters`` installs each in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import MODELS, Forked
from tests.integrations.framework_run import FRAMEWORKS, SETTINGS, STOP, TOTAL, make_model, summary
from tests.integrations.saved_models import save_model
from tests.integrations.tiny_models import losses_of_sample
from tests.integrations.tokenizers import write_tokenizer
from tests.loader.synthetic import write_dataset
from tests.ports import free_port
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.loader import StreamingLoader

pytestmark = pytest.mark.slow  # imports of the frameworks

ROOT = Path(__file__).resolve().parents[2]
Results = dict[str, list[dict[str, Any]]]
#: Processes of each framework: two ranks, and for some one without a group.
RANKS = ("0", "1", "alone")
#: How far the losses of a framework may be from those of samples one by one, relatively, in float32.
NEAR = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 weighted samples with no to three images."""
    folder = write_dataset(tmp_path_factory.mktemp("frameworks") / "data", 4, 8, family="qwen3_5", weighted=True)
    write_tokenizer(folder / "tokenizer")
    return folder


def installed(framework: str) -> bool:
    package = FRAMEWORKS[framework].package
    return package is None or importlib.util.find_spec(package) is not None


def chosen(framework: str) -> bool:
    """``ADAPTERS``, a list with commas, names the frameworks to run; by default all that are installed."""
    return framework in os.environ.get("ADAPTERS", ",".join(FRAMEWORKS)).split(",")


def begin(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    """Starts the ranks: forked from a process with torch and transformers, unless a trainer's environment is tested."""
    name = "tests.integrations.framework_run"
    if "ADAPTERS" in os.environ:
        return subprocess.Popen([sys.executable, "-m", name, *arguments], text=True, start_new_session=True, **options)
    return Forked(f"{name}:main", [name, *arguments], server=MODELS, nurseries=0, start_new_session=True, **options)


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each process did under each framework. Imports take most of the time, so all run in the same processes."""
    folder = tmp_path_factory.mktemp("frameworks")
    frameworks = [framework for framework in FRAMEWORKS if installed(framework) and chosen(framework)]
    if any(FRAMEWORKS[framework].saved for framework in frameworks):
        save_model(make_model(), data.with_name("model"))
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",  # as `accelerate launch --cpu` sets it
    }
    with open(folder / "log", "wb") as log:
        started = begin([str(data), str(folder), *frameworks], cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            started.wait(timeout=float(os.environ.get("ADAPTERS_SECONDS", 550)))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    found: Results = {}
    for framework in frameworks:
        for rank in RANKS[: 3 if FRAMEWORKS[framework].alone else 2]:
            path = folder / f"{framework}-{rank}.json"
            logs = "".join(log.read_text()[-4000:] for log in sorted(folder.glob("log*")))
            assert path.exists(), f"rank {rank} under {framework}: {logs}"
            found.setdefault(framework, []).append(json.loads(path.read_text()))
            assert "error" not in found[framework][-1], found[framework][-1]["error"]
    return found


@dataclass(frozen=True)
class Alone:
    """The run in a single process, of samples one by one, without any framework.

    Attributes:
        steps: Epoch, step and sample keys of each step.
        losses: The mean loss of each step.
        weights: A summary of the weights after the last one.
    """

    steps: list[tuple[int, int, set[str]]]
    losses: list[float]
    weights: list[float]


@pytest.fixture(scope="module")
def alone(data: Path) -> Alone:
    model, dataset = make_model(), VlmDataset(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps, losses, differences = [], [], []
    with StreamingLoader(data, dp_rank=0, dp_size=1, **SETTINGS) as loader:
        assert len({loader.steps(epoch) for epoch in range(3)}) > 1, "epochs differ in length"
        for _ in range(TOTAL):
            at = loader.position
            batches = [next(iter(loader)) for _ in range(SETTINGS["global_batch"])]
            sums, weights = [], []  # of each pack
            for batch in batches:
                if not batch.origins:
                    continue  # fills the last step of an epoch
                samples = [dataset[origin.index] for origin in batch.origins]
                each = [torch.from_numpy(sample.loss_weights[1 : sample.length].copy()) for sample in samples]
                parts = [(losses_of_sample(model, s) * w).sum() for s, w in zip(samples, each, strict=True)]
                sums.append(torch.stack(parts).sum())
                weights.append(float(sum(w.sum() for w in each)))
            mean = torch.stack(sums).sum() / sum(weights)
            mean.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append((at.epoch, at.step, {key for batch in batches for key in batch.sample_keys}))
            losses.append(float(mean))
            by_pack = [float(s) / w for s, w in zip(sums, weights, strict=True)]
            differences.append(abs(sum(by_pack) / len(by_pack) / losses[-1] - 1))
    assert max(differences) > 20 * NEAR, "the mean of the packs' means is another loss"
    assert steps[STOP][1] > 0, "the run is stopped within an epoch"
    assert steps[STOP][0] > 0
    return Alone(steps, losses, summary(model))


def by_step(ranks: Iterable[dict[str, Any]]) -> list[float]:
    """The mean loss of each step, from what the batches of all ranks add to it."""
    found: dict[tuple[int, int], float] = {}
    for rank in (ranks := list(ranks)):
        for (epoch, step, *_), loss in zip(rank["seen"], rank["losses"], strict=True):
            found[epoch, step] = found.get((epoch, step), 0.0) + loss / len(ranks)
    return [found[at] for at in sorted(found)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
class TestFrameworks:
    @pytest.fixture
    def ranks(self, framework: str, results: Results) -> list[dict[str, Any]]:
        if framework not in results:
            pytest.skip(f"{FRAMEWORKS[framework].package} is not installed: make adapters")
        return results[framework][:2]

    def test_every_rank_gets_its_part_of_every_step(self, ranks: list[dict[str, Any]], alone: Alone) -> None:
        found: dict[tuple[int, int], list[str]] = {}
        for epoch, step, _, keys, _ in chain.from_iterable(rank["whole"]["seen"] for rank in ranks):
            found.setdefault((epoch, step), []).extend(keys)
        images = [[each[-1] > 0 for each in rank["whole"]["seen"]] for rank in ranks]
        assert images[0] != images[1], "one rank has images where the other has none"
        assert {len(rank["whole"]["seen"]) for rank in ranks} == {TOTAL * SETTINGS["global_batch"] // 2}
        assert list(found) == [(epoch, step) for epoch, step, _ in alone.steps]
        for epoch, step, keys in alone.steps:
            assert len(found[epoch, step]) == len(keys), "no sample twice"
            assert set(found[epoch, step]) == keys

    def test_the_losses_are_those_of_samples_one_by_one(
        self, framework: str, ranks: list[dict[str, Any]], alone: Alone
    ) -> None:
        assert by_step(rank["whole"] for rank in ranks) == pytest.approx(alone.losses, rel=NEAR)
        if FRAMEWORKS[framework].state:  # what the trainer itself logs
            assert ranks[0]["logged"] == pytest.approx(alone.losses, rel=NEAR)

    def test_it_learns_what_one_process_learns(self, ranks: list[dict[str, Any]], alone: Alone) -> None:
        for rank in ranks:
            assert rank["whole"]["weights"] == pytest.approx(alone.weights, rel=1e-4, abs=1e-4)

    def test_it_learns_the_same_without_a_process_group(self, framework: str, results: Results, alone: Alone) -> None:
        if framework not in results or not FRAMEWORKS[framework].alone:
            pytest.skip(f"{framework} needs a process group, or is not installed")
        run = results[framework][2]["whole"]
        assert len(run["seen"]) == TOTAL * SETTINGS["global_batch"]
        assert by_step([run]) == pytest.approx(alone.losses, rel=NEAR)
        assert run["weights"] == pytest.approx(alone.weights, rel=1e-4, abs=1e-4)

    def test_a_continued_run_is_the_uninterrupted_one(self, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            whole, before, after = rank["whole"], rank["before"], rank["after"]
            assert len(before["seen"]) == STOP * SETTINGS["global_batch"] // 2
            assert before["seen"] + after["seen"] == whole["seen"]
            assert before["losses"] + after["losses"] == pytest.approx(whole["losses"], rel=1e-5)
            assert after["weights"] == pytest.approx(whole["weights"], rel=1e-6)
