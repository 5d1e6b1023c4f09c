"""Prompts by key against the stored samples. ``examples/rollouts.py`` gets them from a service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.loader.conftest import receipts  # noqa: F401
from vlmdata.errors import NotFoundError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations.prompts import Prompts


def test_a_prompt_is_the_sample_up_to_its_first_target(receipts: Path) -> None:  # noqa: F811
    stored, prompts = VlmDataset(receipts), Prompts(receipts, longest=2048)
    assert len(prompts) == len(stored)
    found = 0
    for key in reversed(prompts.keys):
        sample, prompt = stored.sample(key), prompts.get(key)
        targets = np.flatnonzero(sample.loss_mask)
        length = int(targets[0]) if len(targets) else sample.length
        assert prompt.key == key
        assert prompt.ids == sample.input_ids[:length].tolist()
        assert prompt.position_ids.tolist() == sample.position_ids[:, :length].tolist()
        images = list(prompt.images)
        count = int((stored.index.item_starts[_items_of(stored, key)] < length).sum())
        assert len(images) == len(prompt.image_grid_thw) == count
        assert prompt.image_grid_thw.tolist() == sample.image_grid_thw[:count].tolist()
        patches = sample.patches[: int(sample.image_grid_thw[:count].prod(axis=1).sum())]
        assert torch.equal(prompt.pixel_values, stored.family.pixel_values(torch.from_numpy(patches.copy())))
        if images:
            again = [stored.family.patchify(image.transpose(2, 0, 1)) for image in images]
            assert np.array_equal(np.concatenate(again).reshape(patches.shape), patches)
        assert bool(prompt.model_inputs) == bool(images)
        image = stored.manifest.tokenizer.image
        assert prompt.engine_ids.count(image) == len(images)
        assert [each for each in prompt.engine_ids if each != image] == [each for each in prompt.ids if each != image]
        found += len(images)
    assert found
    prompts.close()


def _items_of(stored: VlmDataset, key: str) -> slice:
    number = stored.index.position_of(key)
    return slice(*stored.index.grid_offsets[number : number + 2].tolist())


def test_the_prompts_used_last_are_remembered(receipts: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    fetched: list[int] = []
    fetch = Prompts._fetch
    monkeypatch.setattr(Prompts, "_fetch", lambda self, number: (fetched.append(number), fetch(self, number))[1])
    prompts = Prompts(receipts, longest=2048, remembered=2)
    first = prompts[0]
    assert prompts.get(prompts.keys[0]) is first
    for number in (1, 0, 2, 0, 1):  # 1 was used before 0 when 2 came
        assert prompts[number].key == prompts.keys[number]
    assert fetched == [0, 1, 2, 1]
    prompts.close()


def test_errors_say_what_to_give(receipts: Path) -> None:  # noqa: F811
    prompts = Prompts(receipts, longest=2048)
    with pytest.raises(NotFoundError, match="no sample 'other'"):
        prompts.get("other")
    with pytest.raises(IndexError):
        prompts[len(prompts)]
    with pytest.raises(UsageError, match="raise capacity to at least"):
        Prompts(receipts, longest=16)
    with pytest.raises(UsageError, match="prompts are those of one dataset"):
        Prompts([receipts, receipts], longest=2048)  # type: ignore[arg-type]
