"""Every parallel layout gives the loss and the gradients of one process, on packs of a real dataset.

Packs hold no image, one or several, and their targets weigh differently in the loss; context-parallel ranks share the
images of a pack unevenly. Each pair of ways to divide a model, and each way with each kind of model that it treats
differently, is in one case at least. All cases of the file share four processes, whose start is what costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.model.small_vocabulary import build_chats, small_tokenizer
from tests.model.workers import meet_again, run_in_all
from tests.weighted import build_weighted, with_weights
from vlmdata.preprocess.config import ImageConfig

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5

SEQUENCE = {"sequence_parallel": True}
#: Tensor-parallel ranks encode different images each.
SPREAD = {**SEQUENCE, "vision_tensor_parallel": 1}
RECOMPUTED = {"recompute": "full", "vision_recompute": True}

#: Each has a layer of each kind; those for four stages have as many layers.
DENSE: dict[str, Any] = {"mtp": 1}
TIED, DEEP, MOE = ({**DENSE, **more} for more in ({"tied": True}, {"layers": 4}, {"moe": True}))
#: Qwen3-VL, whose first three of four layers add image features: the rows of an image fall on several ranks, and with
#: four stages features travel over two borders. (One that the last layer adds would reach no target.)
VL: dict[str, Any] = {"family": "qwen3_vl"}
VL_TIED, VL_MOE = {**VL, "tied": True}, {**VL, "moe": True}

CASES = [
    Case("tensor 2, no sequence parallelism", {"tensor": 2}, {}, DENSE, packs=2),
    Case("tensor 2, spread, no sequence parallelism", {"tensor": 2}, {"vision_tensor_parallel": 1}, DENSE, packs=2),
    Case("tensor 4, images spread, rows beyond the vocabulary", {"tensor": 4}, SPREAD, DENSE, vocab_size=518, packs=2),
    Case("tensor 2 x pipeline 2, images spread", {"tensor": 2, "pipeline": 2}, SPREAD, DENSE, packs=2),
    Case("experts 2 x tensor 2, images spread", {"expert": 2, "tensor": 2}, SPREAD, MOE, packs=2),
    Case("context 4", {"context": 4}, {}, DENSE, packs=2),
    Case("pipeline 2, tied", {"pipeline": 2}, {}, TIED),
    Case("pipeline 4", {"pipeline": 4}, {}, DEEP),
    Case("experts 4", {"expert": 4}, {}, MOE),
    Case("experts 2 x context 2", {"expert": 2, "context": 2}, {}, MOE),
    Case("experts 2 x pipeline 2, recomputed", {"expert": 2, "pipeline": 2}, {"recompute": "full"}, MOE),
    Case("tensor 2, all recomputed", {"tensor": 2}, SEQUENCE | RECOMPUTED, DENSE, packs=2),
    Case("context 2, mlp recomputed", {"context": 2}, {"recompute": "selective"}, DENSE, packs=2),
    Case("qwen3_vl pipeline 4, tied", {"pipeline": 4}, {}, VL_TIED),
    Case("qwen3_vl context 2 x pipeline 2", {"context": 2, "pipeline": 2}, {"recompute": "full"}, VL),
    Case("qwen3_vl experts 2 x tensor 2", {"expert": 2, "tensor": 2}, SEQUENCE, VL_MOE, packs=2),
]
#: Parameters fully sharded: over four ranks, the pairs of context parallelism, and experts over ranks of their own.
SHARDED_CASES = [
    Case("sharded, tied, all recomputed", {}, RECOMPUTED, VL_TIED, sharded=True),
    Case("sharded, tensor 2 x context 2, spread", {"tensor": 2, "context": 2}, SPREAD, DENSE, sharded=True, packs=2),
    Case("sharded, experts 2 x context 2", {"expert": 2, "context": 2}, {}, MOE, sharded=True, packs=2),
]
#: Packs of images and videos, in each layout that spreads, cuts or exchanges what the tower makes.
VIDEO_CASES = [
    Case("videos, tensor 2 x context 2, spread", {"tensor": 2, "context": 2}, SPREAD, DENSE, videos=True, packs=2),
    Case("videos, qwen3_vl tensor 2 x context 2", {"tensor": 2, "context": 2}, SEQUENCE, VL, videos=True, packs=2),
    Case("videos, context 2 x pipeline 2", {"context": 2, "pipeline": 2}, {}, DENSE, videos=True, packs=2),
    Case("videos, qwen3_vl tensor 2 x pipeline 2", {"tensor": 2, "pipeline": 2}, SPREAD, VL, videos=True, packs=2),
    Case("videos, qwen3_vl sharded, recomputed", {"context": 2}, RECOMPUTED, VL, sharded=True, videos=True, packs=2),
]
ALL_CASES = [*CASES, *SHARDED_CASES, *VIDEO_CASES]

LANGUAGE = {"language_only": True}
#: The language model alone, in layouts where its embedding must be scattered once.
ALONE_CASES = [
    Case("alone, tensor 2 x pipeline 2", {"tensor": 2, "pipeline": 2}, SEQUENCE | LANGUAGE, VL_TIED, packs=2),
    Case("alone, tensor 2 x context 2", {"tensor": 2, "context": 2}, SEQUENCE | LANGUAGE, DENSE, packs=2),
    Case("alone, experts 2 x tensor 2", {"expert": 2, "tensor": 2}, SEQUENCE | LANGUAGE, VL_MOE, packs=2),
]
#: Where ranks share images, and each has drawn other weights.
FRESH = Case("tensor 4, images spread", {"tensor": 4}, SPREAD, DENSE)


def travellers(model: dict[str, Any], *layouts: tuple[dict[str, int], dict[str, Any]]) -> list[Case]:
    return [Case(str(groups), groups, settings, model) for groups, settings in layouts]


#: Layouts between which checkpoints travel, by model.
TRAVELS: dict[str, list[Case]] = {
    "dense": travellers(DENSE, ({"tensor": 2, "pipeline": 2}, SEQUENCE), ({"context": 4}, {}), ({"tensor": 2}, SPREAD)),
    "tied": travellers({**TIED, "layers": 4}, ({"pipeline": 4}, {}), ({"tensor": 2, "pipeline": 2}, SEQUENCE)),
    "moe": travellers(MOE, ({"expert": 2, "tensor": 2}, SEQUENCE), ({"expert": 2, "pipeline": 2}, {})),
    "qwen3_vl tied": travellers(VL_TIED, ({"tensor": 2, "pipeline": 2}, SPREAD)),
    "qwen3_vl moe": travellers(VL_MOE, ({"expert": 2, "tensor": 2}, SEQUENCE)),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with no, one or two images, with weights; most have no images, so that some packs have none."""
    folder = tmp_path_factory.mktemp("layouts")
    rows = [row for number, row in enumerate(chat_rows(160)) if number < 20 or number % 4 == 2]
    rows = [
        row for row in rows if sum(len(message["content"][-1]["text"].split()) for message in row["messages"]) < 200
    ]
    options = {"image": ImageConfig(1024, 16384), "rows_per_shard": 12, "pad_multiple": 16}
    made = build_weighted(folder, with_weights(rows), tokenizer=small_tokenizer(folder), **options)
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


@pytest.fixture(scope="module")
def references(one_process: None, data: Path) -> dict[str, tuple[StepOutcome, dict[str, torch.Tensor]]]:
    """One process, by model."""
    made: dict[str, Any] = {}
    for case in ALL_CASES:
        alone = Case("one process", {}, {}, case.model, case.vocab_size, videos=case.videos, packs=case.packs)
        key = key_of(case)
        if key not in made:
            outcome = train_step(alone, data)
            made[key] = (outcome, whole_gradients(alone, data, [outcome]))
    return made


def key_of(case: Case) -> str:
    return repr((case.model, case.vocab_size, case.videos, case.packs))


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())


@dataclass(frozen=True)
class Done:
    """What a rank has done.

    Attributes:
        steps: Outcomes of :data:`ALL_CASES`.
        alone: The same of :data:`ALONE_CASES`, on texts.
        tower: See :func:`fresh_tower`.
        refusal: See :func:`refusal_of_split_experts`.
        travels: See :func:`travel`, for each of :data:`TRAVELS`.
    """

    steps: list[StepOutcome]
    alone: list[StepOutcome]
    tower: dict[str, torch.Tensor]
    refusal: str
    travels: dict[str, tuple[list[str], list[dict[str, tuple[int, ...]]]]]


def do_all(data: Path, texts: Path, saved: Path) -> Done:
    """Does, in each of four processes, what tests look at."""
    steps, alone = run_cases(ALL_CASES, data), run_cases(ALONE_CASES, texts)
    tower = fresh_tower(FRESH, data)
    meet_again()
    refusal = refusal_of_split_experts()
    meet_again()
    return Done(steps, alone, tower, refusal, {kind: travel(TRAVELS[kind], data, saved / kind) for kind in TRAVELS})


@dataclass(frozen=True)
class Ranks:
    """The four processes.

    Attributes:
        done: What each has done.
        saved: Where checkpoints are, in a folder for each of :data:`TRAVELS`.
        keys: By kind, keys and shapes of the checkpoint that one process has saved.
    """

    done: Sequence[Done]
    saved: Path
    keys: dict[str, dict[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def ranks(one_process: None, data: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """One process saves a checkpoint of each model; then four do the rest."""
    saved = tmp_path_factory.mktemp("saved")
    keys = {}
    for kind, cases in TRAVELS.items():
        (saved / kind).mkdir()
        keys[kind] = save_checkpoint(one_process_with(cases[0]), data, saved / kind / "alone")
    return Ranks(run_in_all(do_all, data, texts, saved), saved, keys)


def one_process_with(case: Case) -> Case:
    """The model of a case in one process."""
    return Case("one process", {}, {}, case.model, packs=case.packs)


@pytest.mark.parametrize("number", range(len(ALL_CASES)), ids=[case.name for case in ALL_CASES])
def test_layout_equals_one_process(number: int, data: Path, references: Any, ranks: Ranks) -> None:
    """A pack without images, and ranks without any, take part in every exchange."""
    compare(ALL_CASES[number], data, references, [each.steps[number] for each in ranks.done])


@pytest.mark.parametrize("number", range(len(ALONE_CASES)), ids=[case.name for case in ALONE_CASES])
def test_the_language_model_alone_equals_the_whole_one(number: int, texts: Path, ranks: Ranks) -> None:
    """On texts."""
    case = ALONE_CASES[number]
    whole, outcomes = one_process_with(case), [each.alone[number] for each in ranks.done]
    reference = train_step(whole, texts)
    wanted = whole_gradients(whole, texts, [reference])
    assert all(outcome.loss == pytest.approx(reference.loss, rel=TOLERANCE) for outcome in outcomes)
    found = whole_gradients(case, texts, outcomes)
    assert found.keys() == {name for name in wanted if not name.startswith("vision.")}
    for name, gradient in found.items():
        assert relative(gradient[: len(wanted[name])], wanted[name]) < 2 * TOLERANCE, name


def test_the_language_model_alone_refuses_images(one_process: None, data: Path) -> None:
    with pytest.raises(ValueError, match=r"images, but the model has no vision tower \(language_only\): train on data"):
        train_step(Case("one process", {}, LANGUAGE, VL, packs=2), data)


def compare(case: Case, data: Path, references: Any, outcomes: list[StepOutcome]) -> None:
    """Asserts that the ranks' outcomes are those of one process."""
    reference, wanted = references[key_of(case)]
    if case.videos:  # packs with several of both
        assert min(reference.images_held) > 1
        assert max(reference.videos_held) > 1
    else:
        assert 0 in reference.images_held  # a pack without images, and one with several
        assert max(reference.images_held) > 1
    # Two packs have none or several images; one of four packs has fewer than ranks share it.
    if not case.videos and (case.groups.get("context") == 4 or ("context" in case.groups and case.packs == 4)):
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


def test_ranks_that_share_images_begin_with_the_same_tower(ranks: Ranks) -> None:
    first, *others = (dict(each.tower) for each in ranks.done)
    assert torch.equal(first["drawn"], first["blocks.0.qkv.weight"])
    assert not any(torch.equal(other.pop("drawn"), first["drawn"]) for other in others)
    first.pop("drawn")
    for other in others:
        assert all(torch.equal(other[name], weight) for name, weight in first.items())


def test_groups_in_which_experts_are_cut_are_refused(ranks: Ranks) -> None:
    assert all("experts are tensor parallel over 2 ranks" in each.refusal for each in ranks.done)


@pytest.mark.parametrize("kind", TRAVELS)
def test_checkpoints_travel_between_layouts(kind: str, data: Path, ranks: Ranks) -> None:
    """One process and each layout save once. Each layout loads what another has saved, and one process all of it."""
    cases = TRAVELS[kind]
    assert [each.travels[kind][0] for each in ranks.done] == [[]] * 4
    for number, case in enumerate(cases):
        together: dict[str, tuple[int, ...]] = {}
        for each in ranks.done:
            together |= each.travels[kind][1][number]
        keys = ranks.keys[kind]
        different = {key: (together.get(key), keys.get(key)) for key in together.keys() | keys.keys()}
        different = {key: pair for key, pair in different.items() if pair[0] != pair[1]}
        assert not different, case.name  # the same tensors under the same keys, whatever the layout
    sources = sorted((ranks.saved / kind).iterdir())
    assert len(sources) == 1 + len(cases)
    assert [load_checkpoint(one_process_with(cases[0]), data, source) for source in sources] == [[]] * len(sources)


def test_checkpoint_keys_are_transformer_engines(ranks: Ranks) -> None:
    """Norms stand where Transformer Engine keeps them, in the linear layer behind."""
    keys = ranks.keys["dense"]
    layer = "language.decoder.layers.0."
    assert f"{layer}self_attention.in_proj.layer_norm_weight" in keys
    assert "language.decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in keys
    assert f"{layer}mlp.linear_fc1.layer_norm_weight" in keys
    assert not [key for key in keys if "input_layernorm" in key or "pre_mlp_layernorm" in key]
    assert "language.predictor.layer.self_attention.linear_qkv.layer_norm_weight" in keys
