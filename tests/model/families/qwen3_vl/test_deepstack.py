"""Deepstack features go where they are added and nowhere else. Faults of other trainers, and where they would show:

- Positions in three axes that do not survive packing, context parallelism or pipeline stages; rows of a pre-sharded
  pack that are not this rank's; tied embeddings with pipeline stages: the cases of Qwen3-VL in
  ``test_layout_equals_one_process`` of ``tests/model/parallel/test_layouts.py``, whose later stages load labels and
  boundaries only.
- A collective that a rank without images skips: the same, with packs of which some or all ranks have no image.
- An embedding that is scattered twice when the language model runs alone under sequence parallelism:
  ``test_the_language_model_alone_equals_the_whole_one`` there.
- ``Function.apply`` with keyword arguments in the exchange of rows: below.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.model.helpers import mixed_samples, pack, relative, small_architecture, transformers_model, weights_of
from vlmdata.batch import IGNORE_INDEX

pytest.importorskip("megatron.core")

from vlmdata.model.families.qwen3_vl.build import build_model
from vlmdata.model.families.qwen3_vl.names import parameter_maps
from vlmdata.model.network.settings import ModelSettings
from vlmdata.model.parallel.exchange import exchange_rows
from vlmdata.model.weight_names.table import load_from_hf

pytestmark = pytest.mark.usefixtures("one_process")


def test_a_stage_sends_hidden_states_only_once_all_features_are_added() -> None:
    batch = pack(mixed_samples())
    model: Any = build_model(small_architecture("qwen3_vl"), ModelSettings(), post_process=False)
    assert model(batch).shape == (batch.total_tokens, 1, 64)
    rows = sum(h * w // 4 for _, h, w in batch.image_grid_thw.tolist())
    model._added = 1  # as if two of the three features were for layers of later stages
    assert model(batch).shape == (batch.total_tokens + 2 * rows, 1, 64)


def test_features_need_no_place_where_no_layer_adds_any() -> None:
    """A model without deepstack, as transformers allows it, is another model: its losses are transformers'."""
    architecture = small_architecture("qwen3_vl", deepstack=())
    weights, samples = weights_of(architecture), mixed_samples()
    ours = build_model(architecture, ModelSettings())
    load_from_hf(ours, parameter_maps(architecture), lambda source: source.take(weights[source.name]))
    theirs = transformers_model(architecture, weights)
    with torch.no_grad():
        losses = ours(pack(samples)).sum()
        logits = [theirs(**sample.transformers_inputs(), use_cache=False).logits[0] for sample in samples]
    wanted = sum(
        F.cross_entropy(each, sample.labels, ignore_index=IGNORE_INDEX, reduction="sum")
        for each, sample in zip(logits, samples, strict=True)
    )
    assert relative(losses, torch.as_tensor(wanted)) < 1e-5


@pytest.mark.parametrize("order", [[], [2, 0], [0, 1, 2, 2]])
def test_exchanged_rows_have_gradients(order: list[int]) -> None:
    rows = torch.randn(3, 5, requires_grad=True)
    outgoing = torch.tensor(order, dtype=torch.int64)
    arrived = exchange_rows(rows, outgoing, [len(order)], [len(order)], dist.group.WORLD)
    assert torch.equal(arrived, rows[outgoing])
    (gradient,) = torch.autograd.grad((arrived * 2).sum(), rows)
    assert gradient[:, 0].tolist() == [2.0 * order.count(row) for row in range(3)]
