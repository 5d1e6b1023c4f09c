"""Runs with LoRA in several processes: as one process, from and to it, with all that a layout divides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from tests.model.training.conftest import chats, steps_of  # noqa: F401
from tests.model.training.many_runs import Run, train_all
from tests.model.training.plain import write_hf_folder
from tests.model.workers import run_in_all

pytestmark = pytest.mark.slow

DENSE, EXPERTS, SPREAD = "dense", "experts", "experts, EP 2"
#: Layouts of dense models and of models with experts: processes, settings, the run that they continue after a step.
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "TP 2 without SP, CP 2": (4, {"tp": 2, "cp": 2}, DENSE),
    "TP 2 and SP, PP 2, whole towers": (4, {"tp": 2, "sp": True, "pp": 2, "vision_tp": 1}, DENSE),
    "fully sharded over 2, TP 2 and SP": (4, {"fsdp": True, "tp": 2, "sp": True}, DENSE),
    "vision on 1, TP 2 and SP": (3, {"vision_gpus": 1, "tp": 2, "sp": True}, DENSE),
    "EP 2, TP 2 and SP, DP 2": (4, {"ep": 2, "tp": 2, "sp": True}, SPREAD),
    "fully sharded, EP 2": (2, {"fsdp": True, "ep": 2}, SPREAD),
}


@dataclass(frozen=True)
class Runs:
    """All runs: their folders, and what processes said of each."""

    folder: Path
    said: list[dict[str, str]]

    def assert_same(self, name: str, reference: str, steps: list[int]) -> None:
        """Asserts that a run has made these steps, with the results of another one."""
        assert {said[name] for said in self.said if name in said} == {""}
        ours, theirs = ({each["step"]: each for each in steps_of(self.folder / run)} for run in (name, reference))
        assert list(ours) == steps
        for step, mine in ours.items():
            for value in {"loss", "mtp_loss", "moe_aux_loss", "grad_norm"} & mine.keys():
                assert mine[value] == pytest.approx(theirs[step][value], rel=2e-4), (step, value)


@pytest.fixture(scope="module")
def runs(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:  # noqa: F811
    """Makes all runs in four processes. Adapters do not begin at zero, so each factor has gradients."""
    folder = tmp_path_factory.mktemp("layouts")
    common: dict[str, Any] = {"lora.rank": 3, "optimizer.lr": 2e-2, "optimizer.warmup_steps": 0, "run.keep": 0}
    dense, experts = (
        common | {"model.preset": preset, "model.weights": str(folder / preset), **parts}
        for preset, parts in (
            ("tiny", {"lora.vision": "lora", "lora.merger": "full"}),
            ("tiny-moe", {"lora.merger": "lora", "model.recompute": "full"}),
        )
    )
    for preset in ("tiny", "tiny-moe"):
        write_hf_folder(folder / preset, chats, preset)
    made = [
        Run(DENSE, 1, dense | {"run.steps": 3, "run.save_every": 1}),
        Run(EXPERTS, 1, experts | {"run.steps": 2}),
        Run(SPREAD, 2, experts | {"run.steps": 1, "parallel.ep": 2}),
    ]
    for name, (world, layout, source) in LAYOUTS.items():
        base = dense if source == DENSE else experts
        settings = {f"parallel.{setting}": value for setting, value in layout.items()}
        made.append(Run(name, world, base | settings | {"run.steps": 2}, source))
    made.append(Run("back", 1, dense | {"run.steps": 3}, "fully sharded over 2, TP 2 and SP", 2))
    return Runs(folder, run_in_all(train_all, folder, chats, made, world=4))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_equals_that_of_one_process(runs: Runs, name: str) -> None:
    source = LAYOUTS[name][2]
    runs.assert_same(name, EXPERTS if source == SPREAD else source, [2])


def test_one_process_continues_a_sharded_run(runs: Runs) -> None:
    runs.assert_same(SPREAD, EXPERTS, [1])
    runs.assert_same("back", DENSE, [3])
