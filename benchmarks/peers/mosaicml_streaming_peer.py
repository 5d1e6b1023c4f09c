"""MosaicML streaming: the finished arrays in its MDS format."""

from __future__ import annotations

from pathlib import Path

from shared import MEMBERS, PREFETCH, batch_size, join, main, measure, samples
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader


def prepare(data: Path, own: Path) -> None:
    with MDSWriter(out=str(own), columns=dict.fromkeys(MEMBERS, "ndarray")) as writer:
        for sample in samples(data):
            writer.write(sample)


def run(data: Path, own: Path, seconds: float) -> None:
    size = batch_size(data)
    dataset = StreamingDataset(local=str(own), batch_size=size, shuffle=True, num_canonical_nodes=1)
    loader = DataLoader(
        dataset,
        batch_size=size,
        num_workers=1,
        prefetch_factor=PREFETCH,
        persistent_workers=True,
        drop_last=True,
        collate_fn=join,
    )
    measure(lambda: loader, lambda batch: batch, seconds)


if __name__ == "__main__":
    main(prepare, run)
