"""Finished prompts by key, for rollouts: ids and pixels of a dataset or of a collation service."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.errors import UsageError
from vlmdata.families.blocks import are_placeholders
from vlmdata.families.chat import IMAGE
from vlmdata.loader.loader import StreamingLoader


@dataclass(frozen=True, eq=False)
class Prompt:
    """A sample up to its first target, which begins the answer.

    Attributes:
        key: Of the sample.
        ids: Token ids, image placeholders expanded.
        engine_ids: The same with one placeholder per image, as texts have it: inference engines expand it.
        position_ids: int64 (axes, tokens), such as t, h, w.
        images: The N images at their final size, uint8 (H, W, 3): for an inference engine. Its processor does not
            resize them again.
        pixel_values: float32 (P, values per patch), of all images, as the processor of transformers makes them.
        image_grid_thw: int64 (N, 3), patches per image along t, h, w.
    """

    key: str
    ids: list[int]
    engine_ids: list[int]
    position_ids: torch.Tensor
    images: tuple[npt.NDArray[np.uint8], ...]
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor

    @property
    def model_inputs(self) -> dict[str, torch.Tensor]:
        """What a model of transformers takes besides ids: empty without images."""
        if not self.images:
            return {}
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}

    @classmethod
    def of(cls, batch: PackedBatch) -> Self:
        """Takes the prompt from a batch of a single sample.

        Raises:
            UsageError: If it has a video.
        """
        assert batch.input_ids is not None
        assert batch.labels is not None
        assert batch.patches is not None
        targets = (batch.labels[0] != IGNORE_INDEX).nonzero().flatten()
        length = int(targets[0]) + 1 if len(targets) else batch.true_tokens  # labels are shifted by one
        grids = batch.host.image_grid_thw[batch.host.image_starts < length]
        kept = np.ones(length, np.bool_)
        for start, grid in zip(batch.host.image_starts, grids, strict=False):
            t, h, w = grid.tolist()
            own = are_placeholders(batch.family, IMAGE, (t, h, w))
            kept[start : start + len(own)] = np.arange(len(own)) == own.argmax()  # the first one
        if (batch.host.video_starts < length).any():
            raise UsageError(f"sample {batch.sample_keys[0]} has a video, and prompts have images alone")
        bounds = [0, *np.cumsum(grids.prod(axis=1)).tolist()]
        patches = batch.patches[: bounds[-1]].clone()
        images = [patches[start:stop].numpy() for start, stop in pairwise(bounds)]
        return cls(
            key=batch.sample_keys[0],
            ids=batch.input_ids[0, :length].tolist(),
            engine_ids=batch.input_ids[0, :length][torch.from_numpy(kept)].tolist(),
            position_ids=batch.position_ids[:, 0, :length].clone(),
            images=tuple(
                np.ascontiguousarray(batch.family.unpatchify(image, int(h), int(w)).transpose(1, 2, 0))
                for image, (_, h, w) in zip(images, grids, strict=True)
            ),
            pixel_values=batch.family.pixel_values(patches),
            image_grid_thw=torch.from_numpy(grids.copy()),
        )


class Prompts:
    """The prompts of a dataset, by key (:meth:`get`) or by number. Safe to use from several threads.

    A pack of a single sample is fetched for each: samples are padded to ``longest`` tokens, so two never fit into one.
    Those used last are remembered, so that several rollouts of a prompt share one fetch. Do not write to them.

    Args:
        data: A dataset directory, an fsspec URL, or a collation service with one dataset (``grpc://host:8815/name``).
        longest: Tokens of the longest sample, or more.
        remembered: Number of prompts that are kept in memory.
        **options: Further options of the loader, such as ``service_token_file``.

    Raises:
        UsageError: If a sample is longer, naming the length that is needed, or there are several datasets.
    """

    def __init__(self, data: str | PathLike[str], *, longest: int, remembered: int = 64, **options: Any) -> None:
        alone: dict[str, Any] = {
            "capacity": longest,
            "pad_multiple": longest,
            "global_batch": 1,
            "dp_rank": 0,
            "dp_size": 1,
        }
        self._loader = StreamingLoader(data, **alone | options)
        self._lock = threading.Lock()
        self._remembered, self._limit = OrderedDict[int, Prompt](), remembered
        if len(self._loader.datasets) > 1:
            names = ", ".join(dataset.name for dataset in self._loader.datasets)
            raise UsageError(f"prompts are those of one dataset, and {data} has several: name one of {names}")
        self._dataset = self._loader.datasets[0]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys, in the dataset's order."""
        return tuple(self._dataset.index.keys.to_pylist())

    def get(self, key: str) -> Prompt:
        """Returns the prompt of a key. Raises NotFoundError if there is none."""
        return self[self._dataset.index.position_of(key)]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Prompt:
        """Returns a prompt by number in the dataset, or raises IndexError."""
        number = range(len(self))[number]
        with self._lock:
            prompt = self._remembered.pop(number, None) or self._fetch(number)
            self._remembered[number] = prompt
            while len(self._remembered) > self._limit:
                self._remembered.popitem(last=False)
            return prompt

    def _fetch(self, number: int) -> Prompt:
        state = self._loader.state_dict() | {"epoch": 0, "step": int(self._steps[number]), "micro_batch": 0}
        self._loader.load_state_dict(state)
        return Prompt.of(next(iter(self._loader)))

    def close(self) -> None:
        """Closes connections and files."""
        self._loader.close()

    @cached_property
    def _steps(self) -> npt.NDArray[np.int64]:
        """The step of the first epoch in which each sample is."""
        return np.argsort(self._loader.plan(0).samples)
