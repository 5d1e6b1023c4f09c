"""vlmdata's loader over its dataset, with stored patches or, like transformers' processor, float32 pixel values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from shared import PREFETCH, facts, main, measure

from vlmdata import PackedBatch, StreamingLoader


def prepare(data: Path, own: Path) -> None:
    """Nothing: its dataset is there."""


def run(data: Path, own: Path, seconds: float) -> None:
    loader = StreamingLoader(
        data / "dataset",
        capacity=facts(data)["capacity"],
        global_batch=1,
        num_workers=1,
        prefetch_factor=PREFETCH,
        pixels=sys.argv[5],
    )

    def epoch() -> Iterator[PackedBatch]:
        yield from loader
        loader.close()  # its workers run on into the next epoch, which peers' do not

    measure(epoch, lambda batch: batch.tensors(), seconds)


if __name__ == "__main__":
    main(prepare, run)
