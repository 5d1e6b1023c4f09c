"""Runs with the vision tower on processes of its own: as one process, and across layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.chat_rows import write_jsonl
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import evaluations_of, short_rows, steps_of
from tests.model.training.many_runs import Run, train_all
from tests.model.training.plain import write_hf_folder
from tests.model.workers import run_in_all

pytestmark = pytest.mark.slow

#: One process, and runs without sides that others continue; experts on one rank or spread over two.
ONE, EXPERTS, SPREAD = "one process", "experts, one process", "experts, EP 2"
#: The run whose steps and evaluations another one must repeat.
REFERENCES = {ONE: ONE, EXPERTS: EXPERTS, SPREAD: EXPERTS}
FOUR, FROZEN, TEXTS = "four packs, one process", "frozen {}, one process", "texts, one process"


@dataclass(frozen=True)
class Layout:
    """A layout of two sides.

    Attributes:
        world: Processes.
        settings: Its settings.
        plain: The run without sides that it continues after one step, and that continues it after two or three more.
        evaluated: Whether it evaluates, too, after the second and the fourth step.
    """

    world: int
    settings: dict[str, Any]
    plain: str = ONE
    evaluated: bool = False

    @property
    def steps(self) -> int:
        """The last step with sides."""
        return 4 if self.evaluated else 3


LAYOUTS = {
    "2 + 1": Layout(3, {"vision_gpus": 2}),
    "1 + 2, TP 2 and SP": Layout(3, {"vision_gpus": 1, "tp": 2, "sp": True}),
    "1 + 2, CP 2, ahead 0": Layout(3, {"vision_gpus": 1, "cp": 2, "vision_ahead": 0}, evaluated=True),
    "1 + 2, PP 2": Layout(3, {"vision_gpus": 1, "pp": 2}, evaluated=True),
    "1 + 2, DP 2": Layout(3, {"vision_gpus": 1}),
    "2 + 2, TP 2 each": Layout(4, {"vision_gpus": 2, "vision_tp": 2, "tp": 2, "sp": True}, evaluated=True),
    "1 + 2, EP 2": Layout(3, {"vision_gpus": 1, "ep": 2}, SPREAD),
}


def plainly(name: str) -> str:
    """The run without sides that continues one with sides."""
    return f"{name}, then none"


@dataclass(frozen=True)
class Runs:
    """All runs.

    Attributes:
        folder: Where their folders are.
        said: For each process, by run: the message with which it was refused or stopped, or nothing.
    """

    folder: Path
    said: list[dict[str, str]]

    def assert_same(self, name: str, reference: str, steps: Sequence[int], evaluated: Sequence[int] = ()) -> None:
        """Asserts that a run has made these steps, and evaluations after these, with the results of another run."""
        assert {said[name] for said in self.said if name in said} == {""}
        ours, theirs = ({each["step"]: each for each in steps_of(self.folder / run)} for run in (name, reference))
        assert list(ours) == list(steps)
        for step, mine in ours.items():
            other = theirs[step]
            waits = {"vision_wait", "language_wait"}
            assert mine.keys() - waits == other.keys() - waits
            assert all(mine[value] >= 0 for value in waits & mine.keys())
            for value in {"loss", "mtp_loss", "moe_aux_loss", "grad_norm"} & mine.keys():
                assert mine[value] == pytest.approx(other[value], rel=2e-4), (step, value)
            for value in ("targets", "tokens", "images", "patches", "lr", "epoch"):
                assert mine[value] == other[value], (step, value)
            assert mine["tflops"] * mine["seconds"] == pytest.approx(other["tflops"] * other["seconds"])
        found, wanted = (
            {each["step"]: each["loss"] for each in evaluations_of(self.folder / run)} for run in (name, reference)
        )
        assert list(found) == list(evaluated)
        assert found == pytest.approx({step: wanted[step] for step in found}, rel=2e-4)


@pytest.fixture(scope="module")
def runs(chats: Path, validation: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Makes all runs in four processes."""
    folder = tmp_path_factory.mktemp("runs")
    for preset in ("tiny", "tiny-moe"):
        write_hf_folder(folder / preset, chats, preset)
    dense, experts = (
        {"model.preset": preset, "model.weights": str(folder / preset), "run.keep": 0}
        for preset in ("tiny", "tiny-moe")
    )
    evaluation = {"data.eval_paths": [str(validation)], "run.eval_every": 2}
    made = [
        Run(ONE, 1, dense | evaluation | {"run.steps": 5, "run.save_every": 1}),
        Run(EXPERTS, 1, experts | {"run.steps": 4, "run.save_every": 1}),
        Run(SPREAD, 2, experts | {"run.steps": 1, "parallel.ep": 2}),
    ]
    for name, layout in LAYOUTS.items():
        settings = {f"parallel.{setting}": value for setting, value in layout.settings.items()}
        base = dense if layout.plain == ONE else experts
        evaluated = evaluation if layout.evaluated else {}
        made.append(Run(name, layout.world, base | settings | evaluated | {"run.steps": layout.steps}, layout.plain))
        spread = {"parallel.ep": 2} if layout.plain == SPREAD else {}
        made.append(
            Run(plainly(name), 2 if spread else 1, base | spread | {"run.steps": layout.steps + 1}, name, layout.steps)
        )
    spread = {"parallel.vision_gpus": 1, "parallel.ep": 2}
    made.append(Run("spread from one process", 3, experts | spread, EXPERTS))
    made.append(Run("one process from spread", 1, experts, "1 + 2, EP 2", 3))
    four = dense | evaluation | {"run.steps": 1, "data.global_batch": 4}
    made.append(Run(FOUR, 1, four))
    made.append(Run("1 + 1, ahead 2", 2, four | {"parallel.vision_gpus": 1, "parallel.vision_ahead": 2}))
    for name, parts in {"tower": ["vision", "merger"], "language": ["language"]}.items():
        frozen = dense | {"model.freeze": parts, "run.steps": 2}
        sides = {"parallel.vision_gpus": 2}
        made.append(Run(FROZEN.format(name), 1, frozen))
        made.append(Run(f"frozen {name}", 3, frozen | sides | {"run.steps": 1}))
        sides["parallel.vision_tp"] = 2
        made.append(Run(f"frozen {name}, resumed", 3, frozen | sides, f"frozen {name}"))
    texts = dense | {"data.paths": [str(without_images(folder))], "run.steps": 2}
    made.append(Run(TEXTS, 1, texts))
    made.append(Run("texts", 2, texts | {"parallel.vision_gpus": 1}))
    wild = {"optimizer.lr": 1e30, "optimizer.min_lr": 0.0, "optimizer.warmup_steps": 0}
    made.append(Run("wild", 2, dense | wild | {"parallel.vision_gpus": 1, "run.steps": 2}))
    return Runs(folder, run_in_all(train_all, folder, chats, made, world=4))


def without_images(folder: Path) -> Path:
    """A dataset of chats without images."""
    texts = [row for row in short_rows(80) if not any(_images(message) for message in row["messages"])]
    source = write_jsonl(folder / "texts.jsonl", texts)
    return build_chats(source, folder / "texts only", rows_per_shard=12, pad_multiple=16)


def _images(message: dict[str, Any]) -> bool:
    return any(item["type"] == "image" for item in message["content"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_equal_one_process_from_and_to_a_run_without_sides(runs: Runs, name: str) -> None:
    layout = LAYOUTS[name]
    reference = REFERENCES[layout.plain]
    runs.assert_same(name, reference, list(range(2, layout.steps + 1)), [2, 4] if layout.evaluated else [])
    runs.assert_same(plainly(name), reference, [layout.steps + 1])


def test_a_new_run_whose_tower_is_three_micro_batches_ahead(runs: Runs) -> None:
    """In evaluations, and a step between them, of up to four."""
    runs.assert_same("1 + 1, ahead 2", FOUR, [1], [0, 1])


def test_experts_are_spread_or_not_for_a_whole_run(runs: Runs) -> None:
    runs.assert_same(SPREAD, EXPERTS, [1])
    for name, change in {"spread from one process": "1 -> 2", "one process from spread": "2 -> 1"}.items():
        (said,) = {said[name] for said in runs.said if name in said}
        assert f"its optimizer state does not fit: parallel.ep: {change}. Resume with the old settings" in said


def test_exports_are_the_same(one_process: None, runs: Runs, tmp_path: Path) -> None:
    exported = [weights_of(runs.folder / name, tmp_path / f"hf, {name}") for name in (ONE, "1 + 2, PP 2")]
    assert exported[0].keys() == exported[1].keys()
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, rtol=2e-5, atol=1e-5, msg=name)


def weights_of(out: Path, to: Path) -> dict[str, torch.Tensor]:
    """The weights of a run after four steps in Hugging Face's form."""
    from safetensors.torch import load_file

    from vlmdata.model.weights.convert import to_hf

    to_hf(out / "checkpoints" / "step-00000004", to)
    return load_file(to / "model.safetensors")


@pytest.mark.parametrize("part", ["tower", "language"])
def test_frozen_parts(runs: Runs, part: str) -> None:
    """One side trains nothing, and its checkpoint is complete all the same: with vision TP 2, too."""
    runs.assert_same(f"frozen {part}", FROZEN.format(part), [1])
    runs.assert_same(f"frozen {part}, resumed", FROZEN.format(part), [2])


def test_data_without_images(runs: Runs) -> None:
    runs.assert_same("texts", TEXTS, [1, 2])
    assert {"vision_wait", "language_wait"} <= steps_of(runs.folder / "texts")[0].keys()


def test_a_step_that_is_not_finite_ends_all_ranks_with_the_same_error(runs: Runs) -> None:
    said = [each["wild"] for each in runs.said if "wild" in each]
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].startswith(("step 2 gave loss nan", "step 2 gave loss inf"))
    packs = json.loads((runs.folder / "wild" / "not-finite-step-00000002.json").read_text())["packs"]
    assert [(pack["data_parallel_rank"], pack["micro_batch"]) for pack in packs] == [(0, 0), (0, 1)]
    assert not all(pack["finite"] for pack in packs)
