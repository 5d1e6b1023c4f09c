"""Rollouts with verl: the finished prompts of a dataset or of a collation service, by key, without its processor.

verl's workers render a prompt, decode and resize its images and compute its patches for every rollout, twice. With
these classes they fetch it instead, once for all rollouts of it in a process. A row of :class:`KeyedPrompts` has the
key alone. :class:`KeyedLoop` and :class:`KeyedWorker` come before verl's own classes::

    class Loop(KeyedLoop, SingleTurnAgentLoop): ...
    class Worker(KeyedWorker, AgentLoopWorker): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

from vlmdata.errors import UsageError
from vlmdata.integrations.prompts import Prompt, Prompts

#: Tokens of the longest sample, if the configuration does not say ``longest``.
_LONGEST = 8192
#: What a message has in the place of text and images.
_TYPE = "vlmdata"


@cache
def prompts_of(data: str, longest: int) -> Prompts:
    """The prompts of a dataset or service: one connection per process, which remembers the prompts it has fetched."""
    return Prompts(data, longest=longest)


class KeyedPrompts(Dataset[dict[str, Any]]):
    """A row for each prompt: set ``data.custom_cls`` to it, and ``data.train_files`` to a dataset or a service.

    Derive a class from it for what the reward needs (:meth:`fields`).

    Args:
        data_files: One dataset directory, URL of one, or collation service with one dataset.
        tokenizer: Not used.
        config: verl's configuration of data; ``longest`` is the number of tokens of the longest sample.
        processor: Not used.
        **_: What else verl gives, such as ``max_samples``: not used.

    Raises:
        UsageError: If there are several.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        **_: Any,
    ) -> None:
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        if len(files) != 1:
            raise UsageError(f"KeyedPrompts: data_files has {len(files)} entries. Name one dataset or service.")
        self._data = str(files[0])
        self._longest = int((config or {}).get("longest", _LONGEST))
        self._keys = prompts_of(self._data, self._longest).keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> dict[str, Any]:
        key = self._keys[number]
        place = {"type": _TYPE, "data": self._data, "longest": self._longest, "key": key}
        return {
            "raw_prompt": [{"role": "user", "content": [place]}],
            "index": key,
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
            "data_source": self._data,
            "extra_info": {"index": key},
            "reward_model": {},
            "tools_kwargs": {},
            "interaction_kwargs": {},
        } | self.fields(key)

    def fields(self, key: str) -> dict[str, Any]:
        """More fields of a row, such as ``reward_model`` with the right answer; none here."""
        return {}


def prompt_of(messages: Any) -> Prompt:
    """The prompt that the messages of a row stand for. Waits until it has come."""
    (place,) = messages[0]["content"]
    return prompts_of(place["data"], place["longest"]).get(place["key"])


class KeyedLoop:
    """Before ``SingleTurnAgentLoop``: ids and images of the prompt are those fetched."""

    async def process_multi_modal_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The images at their final size, for the inference engine; nothing if there are none."""
        prompt = await asyncio.to_thread(prompt_of, messages)
        return {"images": [Image.fromarray(image) for image in prompt.images]} if prompt.images else {}

    async def ct_build_initial_tokens(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        """The ids of the prompt."""
        prompt = await asyncio.to_thread(prompt_of, messages)
        limit = self.rollout_config.prompt_length  # type: ignore[attr-defined]
        if len(prompt.ids) > limit:
            raise UsageError(
                f"prompt {prompt.key} has {len(prompt.ids)} tokens, and verl's rollout.prompt_length is {limit}. "
                "Raise it, or leave the prompt out with `vlmdata select`."
            )
        return list(prompt.ids)


class KeyedWorker:
    """Before ``AgentLoopWorker``: the inputs of the training step are those fetched."""

    def _compute_multi_modal_inputs(self, output: Any, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        prompt = prompt_of(output.extra_fields["raw_prompt"])
        found = dict(prompt.model_inputs)
        if found:
            grids = found["image_grid_thw"]
            found["images_seqlens"] = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
        image = getattr(self.processor, "image_token_id", None)  # type: ignore[attr-defined]
        if image is not None:  # verl takes it out when it has made the positions
            found["mm_token_type_ids"] = (input_ids == image).long()
        return found
