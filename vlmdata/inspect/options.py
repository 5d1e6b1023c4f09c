"""The loader's options that decide what a pack or step is, in one place for command line, page and server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

from vlmdata.errors import DatasetFormatError
from vlmdata.format.dataset import VlmDataset

if TYPE_CHECKING:
    from vlmdata.loader.loader import StreamingLoader

#: Capacity where none is given; a dataset with a longer sample gets that sample's length, rounded up to 1,024.
DEFAULT_CAPACITY = 8192


@dataclass(frozen=True)
class PackOptions:
    """As the arguments of the same names of :class:`vlmdata.StreamingLoader`.

    Attributes:
        capacity: Most tokens in a pack; None is :func:`default_capacity`.
        global_batch: Packs per optimizer step.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel ranks.
        context_parallel: Context-parallel size.
        tensor_parallel: Tensor-parallel size.
        sequence_parallel: Whether tensor-parallel ranks scatter the sequence.
        pad_multiple: Any further multiple for sample lengths.
        max_patches: Most vision patches in a pack.
        pad_to_capacity: Whether packs have exactly the capacity.
        last: The incomplete last step: "pad", "keep" or "drop".
        shuffle_window: Shards packed and shuffled together.
        seed: Of packing and order.
        balance: Whether packs are spread over ranks by cost.
        cost: Preset of the cost model.
        weights: One weight a dataset.
        weights_by: What they mean: "epochs", "tokens" or "samples".
    """

    capacity: int | None = None
    global_batch: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = True
    pad_multiple: int = 1
    max_patches: int | None = None
    pad_to_capacity: bool = False
    last: str = "pad"
    shuffle_window: int | None = None
    seed: int = 0
    balance: bool = True
    cost: str = "4b"
    weights: tuple[float, ...] | None = None
    weights_by: str = "tokens"

    def loader(self, data: Sequence[str | PathLike[str]], capacity: int) -> StreamingLoader:
        """A loader with these options that reads no pixels.

        Raises:
            ValueError: If options do not fit together, or a sample fits no pack.
            VlmdataError: If a dataset cannot be opened.
        """
        from vlmdata.loader.loader import StreamingLoader
        from vlmdata.packing.config import Blend

        return StreamingLoader(
            data,
            capacity=capacity,
            global_batch=self.global_batch,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            seed=self.seed,
            context_parallel=self.context_parallel,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            pad_multiple=self.pad_multiple,
            max_patches=self.max_patches,
            pad_to_capacity=self.pad_to_capacity,
            last=self.last,
            shuffle_window=self.shuffle_window,
            blend=Blend(self.weights_by, self.weights) if self.weights else None,  # type: ignore[arg-type]
            balance=self.balance,
            cost=self.cost,
            parts=("tokens", "labels"),
        )


def default_capacity(datasets: Sequence[VlmDataset]) -> int:
    """A capacity for those who gave none: 8,192 tokens, or room for the longest sample in whole thousands (1,024).

    Raises:
        DatasetFormatError: If there is no sample.
    """
    longest = max((int(np.max(dataset.index.lengths, initial=0)) for dataset in datasets), default=0)
    if longest == 0:
        raise DatasetFormatError(f"{datasets[0].name}: has no samples (all rows were rejected?)")
    return max(DEFAULT_CAPACITY, -(-longest // 1024) * 1024)
