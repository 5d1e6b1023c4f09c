"""The vision tower on processes of its own gives the loss and the gradients of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import write_jsonl
from tests.loader.rows import chat_rows
from tests.model.helpers import relative
from tests.model.layouts import Case, StepOutcome, train_step, whole_gradients, write_videos
from tests.model.sides import SideCase, gradients_of_sides, run_sides
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import short
from tests.model.workers import run_in_all
from vlmdata.preprocess.config import ImageConfig

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
SEQUENCE = {"sequence_parallel": True}
DENSE, TIED, MOE = {"mtp": 1}, {"mtp": 1, "tied": True}, {"moe": True, "mtp": 1}
VL: dict[str, Any] = {"family": "qwen3_vl"}

CASES = [
    SideCase(1, 1, {}, {}, DENSE),
    SideCase(1, 1, {}, {}, MOE, ahead=0),
    SideCase(2, 1, {}, {}, DENSE, ahead=3),
    SideCase(2, 1, {"vision_tensor": 2}, {}, {**VL, "moe": True}),
    SideCase(1, 2, {"pipeline": 2}, {}, TIED),
    SideCase(1, 2, {"pipeline": 2}, {}, MOE),
    SideCase(1, 2, {"pipeline": 2}, {"recompute": "full"}, VL),
    SideCase(2, 2, {}, {}, DENSE),
    SideCase(2, 2, {"vision_tensor": 2, "tensor": 2, "expert": 2}, SEQUENCE, MOE),
    SideCase(2, 2, {"tensor": 2}, SEQUENCE, VL),
    SideCase(2, 2, {"context": 2}, {}, DENSE, videos=True),
    SideCase(2, 2, {"vision_tensor": 2, "context": 2}, {}, VL, videos=True),
    SideCase(1, 2, {"tensor": 2}, SEQUENCE, VL, videos=True),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with no, one or two images; most have none, so that some packs do."""
    folder = tmp_path_factory.mktemp("sides")
    few = [row for number, row in enumerate(chat_rows(160)) if number < 20 or number % 4 == 2]
    source = write_jsonl(folder / "chat.jsonl", short(few))
    made = build_chats(source, folder / "chat", image=ImageConfig(1024, 16384), rows_per_shard=12, pad_multiple=16)
    write_videos(made)
    return made


@pytest.fixture(scope="module")
def references(one_process: None, data: Path) -> dict[str, Any]:
    """One process, by model."""
    made: dict[str, Any] = {}
    for case in CASES:
        if key_of(case) not in made:
            alone = Case("one process", {}, {}, case.model, videos=case.videos)
            outcome = train_step(alone, data)
            made[key_of(case)] = (outcome, whole_gradients(alone, data, [outcome]))
    return made


def key_of(case: SideCase) -> str:
    return repr((case.model, case.videos))


@pytest.fixture(scope="module")
def by_rank(data: Path) -> list[list[StepOutcome | None]]:
    """Outcomes of all cases, by rank: they share four processes, whose start is what costs."""
    return run_in_all(run_sides, CASES, data, world=4)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_sides_equal_one_process(
    number: int, data: Path, by_rank: list[list[StepOutcome | None]], references: dict[str, Any]
) -> None:
    case = CASES[number]
    outcomes = [each for ranks in by_rank if (each := ranks[number]) is not None]
    assert len(outcomes) == case.world
    reference, wanted = references[key_of(case)]
    assert case.videos or 0 in reference.images_held  # a micro-batch without images, and one with several
    assert max(reference.images_held) > 1
    for name in ("images_held", "videos_held"):
        encoded = [sum(getattr(each, name)) for each in outcomes if each.place["tower"]]
        replicas = encoded[:: case.groups.get("vision_tensor", 1)]
        assert sum(replicas) == sum(getattr(reference, name)), "each image and temporal patch is encoded once"
        assert not sum(sum(getattr(each, name)) for each in outcomes if not each.place["tower"])
    assert case.videos == (max(reference.videos_held) > 1)
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(reference.loss, rel=TOLERANCE)
        assert outcome.metrics == pytest.approx(reference.metrics, rel=TOLERANCE)
    found = gradients_of_sides(case, data, outcomes)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        rows = gradient.shape[0]
        assert not found[name][rows:].any(), name
        assert relative(found[name][:rows], gradient) < 2 * TOLERANCE, name
