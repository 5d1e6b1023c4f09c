"""A packed batch in a transformers model gives what its samples give one by one: positions, masks, labels, images.

The code under test is that of ``docs/loading-with-transformers.md``, word for word.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.loader.helpers import epoch_of, stream
from vlmdata.batch import PackedBatch
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.schema import Sample

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "loading-with-transformers.md"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def guide() -> dict[str, Callable[..., Any]]:
    """The functions that the guide defines."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def model(chats: VlmDataset) -> Iterator[Any]:
    """A tiny Qwen3.5-VL with two linear and two full attention layers, and weights large enough to matter."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen3_5Config(
        text_config={
            "vocab_size": 6144,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "initializer_range": 0.1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "initializer_range": 0.1,
        },
        image_token_id=chats.manifest.tokenizer.image,
        video_token_id=6131,
        vision_start_token_id=6127,
        vision_end_token_id=6128,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Qwen3_5ForConditionalGeneration(config).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def packed_model(model: Any, guide: dict[str, Callable[..., Any]]) -> Any:
    """The same weights, prepared as the guide says."""
    prepared = copy.deepcopy(model)
    guide["keep_samples_apart"](prepared)
    return prepared


def losses_of_sample(model: Any, sample: Sample) -> torch.Tensor:
    """The loss at every token but the last, (length - 1,), 0 off target: as from the processor, positions included."""
    ids = torch.from_numpy(sample.input_ids[: sample.length].astype(np.int64))
    inputs: dict[str, torch.Tensor] = {"input_ids": ids[None]}
    if len(sample.image_grid_thw):
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()[None]
        inputs["image_grid_thw"] = torch.from_numpy(sample.image_grid_thw.astype(np.int64))
        inputs["pixel_values"] = FAMILY.pixel_values(torch.from_numpy(sample.patches.copy()))
    model.model.rope_deltas = None
    logits = model(**inputs, attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0]
    target = torch.from_numpy(sample.loss_mask[1 : sample.length].astype(bool))
    losses = cross_entropy(logits[:-1], ids[1:], reduction="none")
    return torch.where(target, losses, torch.zeros(()))


@pytest.fixture(scope="module")
def references(model: Any, chats: VlmDataset) -> list[torch.Tensor]:
    """The losses of every sample by itself."""
    with torch.no_grad():
        return [losses_of_sample(model, sample) for sample in chats]


def largest_difference(losses: torch.Tensor, batch: PackedBatch, references: list[torch.Tensor]) -> float:
    """Between the losses of a pack and those of its samples, padding included."""
    expected = torch.zeros(batch.total_tokens)
    for origin, begin in zip(batch.origins, batch.cu_seqlens_padded.tolist(), strict=False):
        alone = references[origin.index]
        expected[begin : begin + len(alone)] = alone
    return float((losses - expected).abs().max())


@pytest.mark.parametrize("options", [{}, {"context_parallel": 2, "pad_multiple": 16, "pad_to_capacity": True}])
def test_losses_of_a_packed_batch_are_those_of_its_samples(
    chat: Path,
    guide: dict[str, Callable[..., Any]],
    packed_model: Any,
    references: list[torch.Tensor],
    options: dict[str, Any],
) -> None:
    batches = epoch_of(chat, **options)
    assert max(batch.num_samples for batch in batches) > 4
    with torch.no_grad():
        differences = [
            largest_difference(guide["token_losses"](packed_model, batch), batch, references) for batch in batches
        ]
    assert all(each < TOLERANCE for each in differences), differences
    assert max(float(losses.max()) for losses in references) > 5  # there is something to compare


class TestItWouldShow:
    """Each thing that the guide asks for, left out: the losses are others. So the proof above is one."""

    @pytest.fixture
    def batch(self, chat: Path) -> PackedBatch:
        return next(batch for batch in epoch_of(chat) if batch.num_samples > 4 and len(batch.image_grid_thw) > 2)

    @pytest.fixture
    def difference(
        self, guide: dict[str, Callable[..., Any]], packed_model: Any, references: list[torch.Tensor]
    ) -> Callable[[PackedBatch], float]:
        @torch.no_grad()
        def of(batch: PackedBatch) -> float:
            return largest_difference(guide["token_losses"](packed_model, batch), batch, references)

        return of

    def test_as_it_should_be(self, batch: PackedBatch, difference: Callable[[PackedBatch], float]) -> None:
        assert difference(batch) < TOLERANCE

    def test_linear_attention_across_samples(
        self, batch: PackedBatch, guide: dict[str, Any], model: Any, references: list[torch.Tensor]
    ) -> None:
        unprepared = copy.deepcopy(model)
        with torch.no_grad():
            assert largest_difference(guide["token_losses"](unprepared, batch), batch, references) > 100 * TOLERANCE

    def test_attention_across_samples(
        self, batch: PackedBatch, packed_model: Any, references: list[torch.Tensor]
    ) -> None:
        assert batch.labels is not None
        packed_model.segment_lengths = batch.cu_seqlens_padded.diff().tolist()
        with torch.no_grad():
            logits = packed_model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,  # three rows: nothing says where samples begin
                pixel_values=batch.pixel_values(),
                image_grid_thw=batch.image_grid_thw,
                use_cache=False,
            ).logits
        losses = cross_entropy(logits[0], batch.labels[0], reduction="none")
        assert largest_difference(losses, batch, references) > 100 * TOLERANCE

    @pytest.mark.parametrize("field", ["position_ids", "input_ids", "labels", "patches", "image_grid_thw"])
    def test_a_wrong_field(self, batch: PackedBatch, difference: Callable[[PackedBatch], float], field: str) -> None:
        wrong = batch.clone()
        values = getattr(wrong, field)
        if field == "position_ids":
            values[1:] = values[:1]  # no rows and columns
        elif field == "image_grid_thw":
            unequal = (values[:, 1] != values[:, 2]).nonzero().flatten()
            assert len(unequal)
            values[unequal] = values[unequal][:, [0, 2, 1]]
        elif field == "patches":
            values[: len(values) // 2] = values[: len(values) // 2].flip(0)
        else:
            at = int((wrong.labels[0] != -100).nonzero()[3]) if wrong.labels is not None else 0
            values[0, at] += 1
        assert difference(wrong) > 100 * TOLERANCE


def test_gradients_of_a_packed_batch_are_those_of_its_samples(
    chat: Path, chats: VlmDataset, guide: dict[str, Callable[..., Any]], model: Any, packed_model: Any
) -> None:
    batch = min(epoch_of(chat, pad_multiple=4), key=lambda batch: abs(batch.num_samples - 4))
    assert len(batch.image_grid_thw)
    guide["token_losses"](packed_model, batch).sum().backward()
    sum(losses_of_sample(model, chats[origin.index]).sum() for origin in batch.origins).backward()
    compared = 0
    for (name, packed), alone in zip(packed_model.named_parameters(), model.parameters(), strict=True):
        assert (packed.grad is None) == (alone.grad is None), name
        if alone.grad is not None:
            scale = float(alone.grad.abs().max())
            assert float((packed.grad - alone.grad).abs().max()) <= 1e-4 * scale + 1e-6, name
            compared += scale > 0
    model.zero_grad(set_to_none=True)
    packed_model.zero_grad(set_to_none=True)
    assert compared > 40


def test_the_loop_of_the_guide_learns(receipts: Path, guide: dict[str, Callable[..., Any]], model: Any) -> None:
    learner = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    with stream(receipts, global_batch=2, capacity=600, last="keep") as loader:
        start = loader.state_dict()
        first = next(iter(loader)).clone()
        loader.load_state_dict(start)
        guide["train"](learner, optimizer, loader, 1)
        assert loader.position.epoch == 1
    with torch.no_grad():
        after = guide["token_losses"](learner, first).sum()
        guide["keep_samples_apart"](before := copy.deepcopy(model))
        assert float(after) < 0.9 * float(guide["token_losses"](before, first).sum())


def test_the_loop_of_the_guide_takes_the_steps_of_the_plan(
    chat: Path, guide: dict[str, Callable[..., Any]], model: Any
) -> None:
    """Also if a run continues within a step, whose remaining packs are then fewer."""
    learner = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.0)
    with stream(chat, global_batch=3, capacity=1024) as loader:
        next(iter(loader))
        at = loader.position
        assert at.micro_batch == 1
        stepped = []
        optimizer.register_step_post_hook(lambda *_: stepped.append(loader.position))
        guide["train"](learner, optimizer, loader, 1)
        assert {each.micro_batch for each in stepped} == {0}
        assert len(stepped) == loader.steps(0) > 1
