"""Batches for Megatron-Bridge against the rows that its own collator packs, and the loop that reads and resumes them.

Its model needs Transformer Engine and a GPU, and is not run here. With Megatron-Bridge installed (``make adapters``),
its own functions make the batch that ours must equal and the parameters of the attention; else those tests are skipped.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.loader.helpers import stream
from vlmdata.batch import PackedBatch
from vlmdata.integrations.megatron_bridge import BridgePacks, bridge_batch

Packs = Callable[[str], list[PackedBatch]]
SETTINGS = {"capacity": 1024, "max_patches": None, "global_batch": 2, "parts": ("tokens", "labels")}


def rows_of(batch: PackedBatch) -> list[dict[str, torch.Tensor]]:
    """The samples of a pack as a collator of Megatron-Bridge has them, without padding."""
    starts, lengths = batch.cu_seqlens_padded.tolist(), batch.cu_seqlens.diff().tolist()
    whole = {"input_ids": batch.input_ids, "labels": batch.labels, "loss_mask": batch.loss_weights}
    return [
        {name: tensor[0, start : start + length] for name, tensor in whole.items() if tensor is not None}
        | {"position_ids": torch.arange(length)}
        for start, length in zip(starts, lengths, strict=False)
    ]


@pytest.fixture
def data(random_data: Callable[[str], Path]) -> Path:
    return random_data("qwen3_vl")


@pytest.fixture
def _bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes single modules of Megatron-Bridge importable. Its packages import Transformer Engine, which needs CUDA."""
    found = importlib.util.find_spec("megatron")
    roots = [Path(each, "bridge") for each in (found and found.submodule_search_locations) or ()]
    root = next((each for each in roots if each.is_dir()), None)
    if root is None:
        pytest.skip("Megatron-Bridge is not installed: make adapters")
    for name in ("", ".data", ".data.packing", ".data.datasets", ".training", ".training.utils"):
        package = ModuleType(f"megatron.bridge{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, package.__name__, package)


@pytest.mark.usefixtures("_bridge")
def test_a_batch_equals_what_its_own_collator_packs(packs: Packs) -> None:
    from megatron.bridge.data.packing.in_batch import build_mcore_thd_sequence_batch_from_rows
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    for batch in packs("qwen3_vl"):
        if not batch.num_samples:
            continue
        pad = int(batch.input_ids[0, batch.padding_mask[0]][0]) if batch.padding_mask.any() else 0
        wanted = build_mcore_thd_sequence_batch_from_rows(rows_of(batch), pad_token_id=pad, pad_to_multiple_of=4)
        found = bridge_batch(batch)
        for name, value in wanted.items():
            if name == "position_ids":  # there, the order of tokens: the model makes MRoPE of it, and we give it
                assert found[name].shape == (3, 1, batch.total_tokens)
            elif isinstance(value, torch.Tensor) and "max_seqlen" not in name:
                assert torch.equal(found[name], value), name
            else:
                assert found[name] == value, name
        params = get_packed_seq_params(found)
        assert params.qkv_format == "thd"
        assert torch.equal(params.cu_seqlens_q_padded, batch.cu_seqlens_padded)
        if len(batch.host.image_grid_thw):
            assert isinstance(found["visual_inputs"], GenericVisualInputs)
            assert torch.equal(found["visual_inputs"].normalized_for_model()["pixel_values"], batch.pixel_values())


def test_segments_and_weights_are_those_of_the_pack(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    container = SimpleNamespace(GenericVisualInputs=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "megatron.bridge.training.utils.visual_inputs", container)
    for batch in packs("qwen3_vl"):
        if not batch.num_samples:
            continue
        found = bridge_batch(batch)
        for (start, stop), row in zip(pairwise(found["cu_seqlens_q_padded"].tolist()), rows_of(batch), strict=True):
            length = len(row["input_ids"])
            assert torch.equal(found["input_ids"][0, start : start + length], row["input_ids"])
            assert torch.equal(found["loss_mask"][0, start:stop] > 0, found["labels"][0, start:stop] != -100)
        assert int(found["max_seqlen_q"]) == max(batch.cu_seqlens_padded.diff())


def test_packs_go_from_epoch_to_epoch_and_continue_from_a_saved_state(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdata.integrations.megatron_bridge.bridge_batch", lambda batch: batch)

    def keys(packs: Any, count: int) -> list[tuple[int, int, tuple[str, ...]]]:
        return [(each.epoch, each.step, each.sample_keys) for each in islice(packs, count)]

    with stream(data, **SETTINGS) as loader:
        total = 2 * len(loader) + 1
        whole = keys(BridgePacks(loader), total)
    assert whole[-1][0] == 2
    with stream(data, **SETTINGS) as loader:
        packs = BridgePacks(loader)
        assert keys(packs, 3) == whole[:3]
        state = packs.save_state()
    with stream(data, **SETTINGS) as loader:
        packs = BridgePacks(loader)
        packs.restore_state(state)
        assert keys(packs, total - 3) == whole[3:]
