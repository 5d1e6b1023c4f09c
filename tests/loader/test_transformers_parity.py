"""Chats as the loader packs them, in a transformers model: what its samples give one by one.

The code under test is that of ``docs/loading-with-transformers.md``, word for word.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import losses_of_sample, tiny_model
from tests.loader.helpers import epoch_of, stream
from vlmdata.batch import PackedBatch
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations.transformers import is_packed

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "loading-with-transformers.md"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def guide() -> dict[str, Callable[..., Any]]:
    """The functions that the guide defines or imports."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def model(chats: VlmDataset) -> Iterator[Any]:
    """A tiny Qwen3.5-VL with two linear and two full attention layers, and weights large enough to matter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_model("qwen3_5", vocab_size=6144, image_token=chats.manifest.tokenizer.image)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def packed_model(model: Any, guide: dict[str, Callable[..., Any]]) -> Any:
    """The same weights, prepared as the guide says."""
    return guide["packed"](copy.deepcopy(model)).model


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

    @pytest.mark.parametrize("field", ["position_ids", "input_ids", "labels", "patches", "image_grid_thw"])
    def test_a_wrong_field(self, batch: PackedBatch, difference: Callable[[PackedBatch], float], field: str) -> None:
        wrong = batch.clone()
        values = getattr(wrong, field)
        if field == "position_ids":
            values[1:] = values[:1]  # no rows and columns
        elif field == "image_grid_thw":
            assert (values[:, 1] != values[:, 2]).any()
            turned = values[:, [0, 2, 1]]
            host = dataclasses.replace(wrong.host, image_grid_thw=turned.numpy())
            wrong = dataclasses.replace(wrong, image_grid_thw=turned, host=host)
        elif field == "patches":
            values[: len(values) // 2] = values[: len(values) // 2].flip(0)
        else:
            at = int((wrong.labels[0] != -100).nonzero()[3]) if wrong.labels is not None else 0
            values[0, at] += 1
        assert difference(wrong) > 100 * TOLERANCE


def test_the_loop_of_the_guide_learns(receipts: Path, guide: dict[str, Callable[..., Any]], model: Any) -> None:
    learner = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    with stream(receipts, global_batch=2, capacity=600, last="keep") as loader:
        start = loader.state_dict()
        first = next(iter(loader)).clone()
        loader.load_state_dict(start)
        guide["train"](learner, optimizer, loader, loader.steps(0))
    assert not is_packed(learner)
    losses = []
    for each in (model, learner):
        with guide["packed"](each), torch.no_grad():
            losses.append(float(guide["token_losses"](each, first).sum()))
    assert losses[1] < 0.9 * losses[0]


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
        guide["train"](learner, optimizer, loader, steps := loader.steps(0) + 1)
        assert {each.micro_batch for each in stepped} == {0}
        assert len(stepped) == steps
