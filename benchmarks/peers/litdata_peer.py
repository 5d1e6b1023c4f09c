"""Lightning's LitData: the finished arrays in its chunks."""

from __future__ import annotations

from pathlib import Path

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter
from shared import PREFETCH, batch_size, join, main, measure, samples


def prepare(data: Path, own: Path) -> None:
    own.mkdir(parents=True, exist_ok=True)
    writer = BinaryWriter(str(own), chunk_bytes=64 << 20)
    for number, sample in enumerate(samples(data)):
        writer[number] = sample
    writer.done()
    writer.merge(1)


def run(data: Path, own: Path, seconds: float) -> None:
    dataset = StreamingDataset(str(own), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(
        dataset,
        batch_size=batch_size(data),
        num_workers=1,
        prefetch_factor=PREFETCH,
        persistent_workers=True,
        drop_last=True,
        collate_fn=join,
    )
    measure(lambda: loader, lambda batch: batch, seconds)


if __name__ == "__main__":
    main(prepare, run)
