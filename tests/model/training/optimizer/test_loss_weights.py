"""The loss of a step is sum(weight x loss) / sum(weight) over all its targets, with its gradients.

``tests/model/parallel/test_layouts.py`` trains on targets of different weights, too: every layout gives the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.loader.rows import chat_rows
from tests.model.helpers import random_weights, relative, transformers_model
from tests.model.layouts import Case, StepOutcome, architecture_of, batches, train_step, whole_gradients
from tests.model.small_vocabulary import small_tokenizer
from tests.model.training.plain import plain_losses
from tests.weighted import build_weighted, with_weights
from vlmdata.format.dataset import VlmDataset
from vlmdata.preprocess.config import ImageConfig

TOLERANCE = 1e-5
MOE = {"moe": True, "mtp": 1}
PLAIN, MTP, EXPERTS = (Case("one process", {}, {}, model, packs=2) for model in ({"mtp": 0}, {"mtp": 1}, MOE))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with no, one or two images; targets of one pack weigh from 0.075 to 6."""
    rows = [row for number, row in enumerate(chat_rows(160)) if number < 20 or number % 4 == 2]
    rows = [
        row for row in rows if sum(len(message["content"][-1]["text"].split()) for message in row["messages"]) < 200
    ]
    folder = tmp_path_factory.mktemp("weighted")
    options = {"image": ImageConfig(1024, 16384), "rows_per_shard": 12, "pad_multiple": 16}
    return build_weighted(folder, with_weights(rows), tokenizer=small_tokenizer(folder), **options)


@pytest.fixture(scope="module")
def references(one_process: None, data: Path) -> dict[str, StepOutcome]:
    """By model."""
    return {repr(case.model): train_step(case, data) for case in (MTP, EXPERTS)}


def test_loss_and_gradients_are_those_of_a_plain_computation(one_process: None, data: Path) -> None:
    """Of transformers' model and a weighted mean, sample by sample."""
    from vlmdata.model.families.qwen3_5.names import parameter_maps
    from vlmdata.model.weight_names.table import hf_names

    outcome = train_step(PLAIN, data)
    found = whole_gradients(PLAIN, data, [outcome])
    architecture, dataset = architecture_of(PLAIN, data), VlmDataset(data)
    maps = parameter_maps(architecture, mtp=False)
    theirs = transformers_model(architecture, random_weights(hf_names(maps)))
    total, weight, seen = torch.tensor(0.0), 0.0, set()
    for batch in batches(PLAIN, data):
        for origin in batch.origins:
            losses, weights = plain_losses(theirs, dataset[origin.index])
            total, weight = total + (losses * weights).sum(), weight + float(weights.sum())
            seen |= set(weights.tolist())
    assert len(seen) > 5
    (total / weight).backward()
    assert outcome.loss == pytest.approx(float(total.detach()) / weight, rel=TOLERANCE)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in found.items():
        wanted = maps[name].to_mcore([source.take(gradients[source.name]) for source in maps[name].sources])
        assert relative(gradient[: len(wanted)], wanted) < 3 * TOLERANCE, name


@pytest.mark.parametrize("case", [MTP, EXPERTS], ids=["dense", "experts"])
def test_only_ratios_of_weights_matter(case: Case, one_process: None, data: Path, references: Any) -> None:
    """A power of two on all weights changes no bit: neither a sum below 1 nor a large one is cut off."""
    reference = references[repr(case.model)]
    for factor in (2.0**-24, 2.0**24):
        outcome = train_step(case, data, weight=factor)
        assert outcome.loss == reference.loss
        assert outcome.metrics == reference.metrics
        for name, gradient in reference.gradients.items():
            assert torch.equal(outcome.gradients[name], gradient), name


def test_weights_of_1_change_no_bit(one_process: None, data: Path, tmp_path: Path) -> None:
    """Megatron-core's own division by the number of targets gives the same gradients to the last bit."""
    rows = [row for number, row in enumerate(chat_rows(40)) if number % 4 == 2]
    options = {"image": ImageConfig(1024, 16384), "pad_multiple": 16}
    plain = build_weighted(tmp_path, rows, tokenizer=small_tokenizer(tmp_path), **options)
    for case in (MTP, EXPERTS):
        ours, theirs = train_step(case, plain), train_step(case, plain, by_count=True)
        assert ours.loss == theirs.loss
        for name, gradient in theirs.gradients.items():
            assert torch.equal(ours.gradients[name], gradient), name
        assert any(gradient.any() for gradient in ours.gradients.values())


def test_without_any_weight_gradients_are_zero(one_process: None, data: Path) -> None:
    outcome = train_step(MTP, data, weight=0.0)
    assert not any(gradient.any() for gradient in outcome.gradients.values())  # and none is not a number
