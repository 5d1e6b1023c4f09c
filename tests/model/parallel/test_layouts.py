"""Every parallel layout gives the loss and the gradients of one process, on packs of a real dataset.

Packs hold no image, one or several; in each context-parallel case some rank encodes none.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import batched
from pathlib import Path
from typing import Any

import pytest
import torch

from preprocess.config import ImageConfig
from tests.chat_rows import write_jsonl
from tests.loader.rows import chat_rows
from tests.model.helpers import relative
from tests.model.layouts import (
    Case,
    StepOutcome,
    fresh_tower,
    load_checkpoint,
    refusal_of_split_experts,
    run_cases,
    save_checkpoint,
    train_step,
    travel,
    whole_gradients,
    write_videos,
)
from tests.model.small_vocabulary import build_chats
from tests.model.workers import run_in_all

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5

SEQUENCE = {"sequence_parallel": True}
MOE = {"moe": True, "mtp": 1}
#: Tensor-parallel ranks encode different images each.
SPREAD = {**SEQUENCE, "vision_tensor_parallel": 1}

CASES = [
    Case("tensor 2, no sequence parallelism", {"tensor": 2}, {}, {"mtp": 1}),
    Case("tensor 2, images spread", {"tensor": 2}, SPREAD, {"mtp": 1}),
    Case("tensor 2, images spread, no sequence parallelism", {"tensor": 2}, {"vision_tensor_parallel": 1}, {"mtp": 1}),
    Case("tensor 4, images spread", {"tensor": 4}, SPREAD, {"mtp": 1}),
    Case("tensor 2 x context 2, images spread", {"tensor": 2, "context": 2}, SPREAD, {"mtp": 1}),
    Case("tensor 2 x pipeline 2, images spread", {"tensor": 2, "pipeline": 2}, SPREAD, {"mtp": 1}),
    Case("experts 2 x tensor 2, images spread", {"expert": 2, "tensor": 2}, SPREAD, MOE),
    Case("context 4", {"context": 4}, {}, {"mtp": 1}),
    Case("pipeline 2, no mtp", {"pipeline": 2}, {}, {"mtp": 0}),
    Case("pipeline 2, mtp, tied", {"pipeline": 2}, {}, {"mtp": 1, "tied": True}),
    Case("pipeline 4, mtp", {"pipeline": 4}, {}, {"mtp": 1}),
    Case("context 2 x pipeline 2", {"context": 2, "pipeline": 2}, {}, {"mtp": 1}),
    Case("experts 4", {"expert": 4}, {}, MOE),
    Case("experts 2 x tensor 2", {"expert": 2, "tensor": 2}, SEQUENCE, MOE),
    Case("experts 2 x context 2", {"expert": 2, "context": 2}, {}, MOE),
    Case("experts 2 x pipeline 2, recomputed", {"expert": 2, "pipeline": 2}, {"recompute": "full"}, MOE),
    Case(
        "tensor 2, all recomputed",
        {"tensor": 2},
        {**SEQUENCE, "recompute": "full", "vision_recompute": True},
        {"mtp": 1},
    ),
    Case("context 2, mlp recomputed", {"context": 2}, {"recompute": "selective"}, {"mtp": 1}),
    Case("tensor 4, rows beyond the vocabulary", {"tensor": 4}, SEQUENCE, {"mtp": 1}, vocab_size=518),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with no, one or two images; most have none, so that some packs do."""
    folder = tmp_path_factory.mktemp("layouts")
    rows = [row for number, row in enumerate(chat_rows(160)) if number < 20 or number % 4 == 2]
    rows = [
        row for row in rows if sum(len(message["content"][-1]["text"].split()) for message in row["messages"]) < 200
    ]
    source = write_jsonl(folder / "chat.jsonl", rows)
    made = build_chats(source, folder / "chat", image=ImageConfig(1024, 16384), rows_per_shard=12, pad_multiple=16)
    write_videos(made)
    return made


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats without images."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [
        row
        for row in chat_rows(80)
        if not any(item["type"] == "image" for message in row["messages"] for item in message["content"])
        and sum(len(message["content"][-1]["text"].split()) for message in row["messages"]) < 200
    ]
    source = write_jsonl(folder / "chat.jsonl", rows)
    return build_chats(source, folder / "chat", rows_per_shard=12, pad_multiple=16)


VL, VL_TIED, VL_MOE = ({"family": "qwen3_vl", **more} for more in ({}, {"tied": True}, {"moe": True}))

#: Qwen3-VL, whose first three of four layers add image features: the rows of an image fall on several ranks, and with
#: four stages features travel over two borders.
VL_CASES = [
    Case("qwen3_vl context 4", {"context": 4}, {}, VL),
    Case("qwen3_vl pipeline 4, tied", {"pipeline": 4}, {}, VL_TIED),
    Case("qwen3_vl tensor 2 x context 2", {"tensor": 2, "context": 2}, SEQUENCE, VL_TIED),
    Case("qwen3_vl tensor 2 x pipeline 2, images spread", {"tensor": 2, "pipeline": 2}, SPREAD, VL),
    Case("qwen3_vl context 2 x pipeline 2, recomputed", {"context": 2, "pipeline": 2}, {"recompute": "full"}, VL),
    Case("qwen3_vl experts 2 x tensor 2", {"expert": 2, "tensor": 2}, SEQUENCE, VL_MOE),
    Case("qwen3_vl experts 2 x pipeline 2, recomputed", {"expert": 2, "pipeline": 2}, {"recompute": "full"}, VL_MOE),
]


#: Parameters fully sharded: over four ranks, the pairs of context parallelism, and experts over ranks of their own.
SHARDED_CASES = [
    Case("sharded, tied, all recomputed", {}, {"recompute": "full", "vision_recompute": True}, VL_TIED, sharded=True),
    Case("sharded, tensor 2 x context 2, images spread", {"tensor": 2, "context": 2}, SPREAD, {"mtp": 1}, sharded=True),
    Case("sharded, experts 2 x context 2", {"expert": 2, "context": 2}, {}, MOE, sharded=True),
]
#: Packs of images and videos, in each layout that spreads, cuts or exchanges what the tower makes.
VIDEO_CASES = [
    Case("videos, tensor 2 x context 2, spread", {"tensor": 2, "context": 2}, SPREAD, {"mtp": 1}, videos=True),
    Case("videos, qwen3_vl tensor 2 x context 2", {"tensor": 2, "context": 2}, SEQUENCE, VL, videos=True),
    Case("videos, context 2 x pipeline 2", {"context": 2, "pipeline": 2}, {}, {"mtp": 1}, videos=True),
    Case("videos, qwen3_vl tensor 2 x pipeline 2, spread", {"tensor": 2, "pipeline": 2}, SPREAD, VL, videos=True),
    Case(
        "videos, qwen3_vl sharded, context 2, recomputed",
        {"context": 2},
        {"recompute": "full", "vision_recompute": True},
        VL,
        sharded=True,
        videos=True,
    ),
]
ALL_CASES = [*CASES, *VL_CASES, *SHARDED_CASES, *VIDEO_CASES]


@pytest.fixture(scope="module")
def references(one_process: None, data: Path) -> dict[str, tuple[StepOutcome, dict[str, torch.Tensor]]]:
    """One process, by model."""
    made: dict[str, Any] = {}
    for case in ALL_CASES:
        alone = Case("one process", {}, {}, case.model, case.vocab_size, videos=case.videos)
        key = key_of(case)
        if key not in made:
            outcome = train_step(alone, data)
            made[key] = (outcome, whole_gradients(alone, data, [outcome]))
    return made


def key_of(case: Case) -> str:
    return repr((case.model, case.vocab_size, case.videos))


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())


@pytest.fixture(scope="module")
def outcomes(data: Path) -> Callable[[Case], list[StepOutcome]]:
    """Gives the outcomes of a case by rank, once. Several cases share four processes, whose start is what costs."""
    made: dict[str, list[StepOutcome]] = {}

    def of(case: Case) -> list[StepOutcome]:
        if case.name not in made:
            together = next(group for group in batched(ALL_CASES, 9) if case in group)
            for one, ranks in zip(together, zip(*run_in_all(run_cases, together, data), strict=True), strict=True):
                made[one.name] = list(ranks)
        return made.pop(case.name)

    return of


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(
    case: Case, data: Path, references: Any, outcomes: Callable[[Case], list[StepOutcome]]
) -> None:
    """A pack without images, and ranks without any, take part in every exchange."""
    compare(case, data, references, outcomes(case))


def test_the_language_model_alone_equals_the_whole_one(one_process: None, data: Path, texts: Path) -> None:
    """On texts, in layouts where its embedding must be scattered once; and it refuses images."""
    alone = {"language_only": True}
    cases = [
        Case("alone, tensor 2 x pipeline 2", {"tensor": 2, "pipeline": 2}, SEQUENCE | alone, VL_TIED),
        Case("alone, tensor 2 x context 2", {"tensor": 2, "context": 2}, SEQUENCE | alone, {"mtp": 1}),
        Case("alone, experts 2 x tensor 2", {"expert": 2, "tensor": 2}, SEQUENCE | alone, VL_MOE),
    ]
    by_rank = run_in_all(run_cases, cases, texts)
    for number, case in enumerate(cases):
        whole = Case("one process", {}, {}, case.model)
        reference = train_step(whole, texts)
        wanted = whole_gradients(whole, texts, [reference])
        outcomes = [outcomes[number] for outcomes in by_rank]
        assert all(outcome.loss == pytest.approx(reference.loss, rel=TOLERANCE) for outcome in outcomes), case.name
        found = whole_gradients(case, texts, outcomes)
        assert found.keys() == {name for name in wanted if not name.startswith("vision.")}
        for name, gradient in found.items():
            assert relative(gradient[: len(wanted[name])], wanted[name]) < 2 * TOLERANCE, (case.name, name)
    with pytest.raises(ValueError, match=r"images, but the model has no vision tower \(language_only\): train on data"):
        train_step(Case("one process", {}, alone, VL), data)


def compare(case: Case, data: Path, references: Any, outcomes: list[StepOutcome]) -> None:
    """Asserts that the ranks' outcomes are those of one process."""
    reference, wanted = references[key_of(case)]
    if case.videos:  # packs with several of both
        assert min(reference.images_held) > 1
        assert max(reference.videos_held) > 1
    else:
        assert 0 in reference.images_held  # a pack without images, and one with several
        assert max(reference.images_held) > 1
    if not case.videos and case.groups.get("context", 1) > 1:
        shares: dict[tuple[int, int], list[int]] = {}
        for outcome in outcomes:
            for number, count in enumerate(outcome.images_held):
                shares.setdefault((outcome.place["data"], number), []).append(count)
        assert any(0 in counts and max(counts) > 0 for counts in shares.values())  # shares are uneven
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(reference.loss, rel=TOLERANCE), case.name
        assert outcome.metrics == pytest.approx(reference.metrics, rel=TOLERANCE), case.name
    found = whole_gradients(case, data, outcomes)
    assert norm(found) == pytest.approx(norm(wanted), rel=TOLERANCE)
    for name, gradient in wanted.items():
        rows = gradient.shape[0]
        assert not found[name][rows:].any(), name  # rows that only fill up the table
        assert relative(found[name][:rows], gradient) < 2 * TOLERANCE, (case.name, name)


def test_ranks_that_share_images_begin_with_the_same_tower(data: Path) -> None:
    case = Case("tensor 4, images spread", {"tensor": 4}, SPREAD, {"mtp": 1})
    first, *others = run_in_all(fresh_tower, case, data)
    assert torch.equal(first["drawn"], first["blocks.0.qkv.weight"])
    assert not any(torch.equal(other.pop("drawn"), first["drawn"]) for other in others)
    first.pop("drawn")
    for other in others:
        assert all(torch.equal(other[name], weight) for name, weight in first.items())


def test_groups_in_which_experts_are_cut_are_refused() -> None:
    assert all("experts are tensor parallel over 2 ranks" in said for said in run_in_all(refusal_of_split_experts))


#: Layouts between which checkpoints travel, by model.
TRAVELS: dict[str, tuple[dict[str, Any], list[tuple[dict[str, int], dict[str, Any]]]]] = {
    "dense": (
        {"mtp": 1},
        [({"tensor": 2, "pipeline": 2}, SEQUENCE), ({"context": 4}, {}), ({"tensor": 2}, SPREAD)],
    ),
    "tied": ({"mtp": 1, "tied": True}, [({"pipeline": 4}, {}), ({"tensor": 2, "pipeline": 2}, SEQUENCE)]),
    "moe": (MOE, [({"expert": 2, "tensor": 2}, SEQUENCE), ({"expert": 2, "pipeline": 2}, {})]),
    "qwen3_vl tied": (VL_TIED, [({"pipeline": 4}, {}), ({"tensor": 2, "pipeline": 2}, SPREAD)]),
    "qwen3_vl moe": (VL_MOE, [({"expert": 2, "tensor": 2}, SEQUENCE)]),
}


@pytest.mark.parametrize("kind", TRAVELS)
def test_checkpoints_travel_between_layouts(kind: str, data: Path, one_process: None, tmp_path: Path) -> None:
    """One process and each layout save once; all load what all have saved. The layouts share four processes."""
    model, layouts = TRAVELS[kind]
    alone = Case("one process", {}, {}, model)
    cases = [Case(str(groups), groups, settings, model) for groups, settings in layouts]
    keys = save_checkpoint(alone, data, tmp_path / "alone")
    ranks = run_in_all(travel, cases, data, tmp_path)
    assert [wrong for wrong, _ in ranks] == [[]] * 4
    for number, case in enumerate(cases):
        together: dict[str, tuple[int, ...]] = {}
        for _, saved in ranks:
            together |= saved[number]
        different = {key: (together.get(key), keys.get(key)) for key in together.keys() | keys.keys()}
        different = {key: pair for key, pair in different.items() if pair[0] != pair[1]}
        assert not different, case.name  # the same tensors under the same keys, whatever the layout
    sources = sorted(tmp_path.iterdir())
    assert [load_checkpoint(alone, data, source) for source in sources] == [[]] * (1 + len(cases))


def test_checkpoint_keys_are_transformer_engines(one_process: None, data: Path, tmp_path: Path) -> None:
    """Norms stand where Transformer Engine keeps them, in the linear layer behind."""
    keys = save_checkpoint(Case("one process", {}, {}, {"mtp": 1}), data, tmp_path / "saved")
    layer = "language.decoder.layers.0."
    assert f"{layer}self_attention.in_proj.layer_norm_weight" in keys
    assert "language.decoder.layers.3.self_attention.linear_qkv.layer_norm_weight" in keys
    assert f"{layer}mlp.linear_fc1.layer_norm_weight" in keys
    assert not [key for key in keys if "input_layernorm" in key or "pre_mlp_layernorm" in key]
    assert "language.predictor.layer.self_attention.linear_qkv.layer_norm_weight" in keys
