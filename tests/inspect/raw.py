"""Datasets read by other means: tarfile, numpy and pyarrow. Nothing here imports vlmdata."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq


@dataclass(frozen=True)
class RawSample:
    """A sample as its tar members have it."""

    key: str
    shard: str
    metadata: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def length(self) -> int:
        return int(self.metadata["length"])

    @property
    def ids(self) -> np.ndarray:
        return self.arrays["input_ids"][: self.length]

    @property
    def mask(self) -> np.ndarray:
        return self.arrays["loss_mask"][: self.length]

    @property
    def positions(self) -> np.ndarray:
        return self.arrays["position_ids"][:, : self.length]

    @property
    def grids(self) -> np.ndarray:
        return self.arrays["image_grid_thw"]

    def picture(self, number: int) -> np.ndarray:
        """An image rebuilt patch by patch: uint8 (H, W, 3)."""
        counts = self.grids.prod(axis=1)
        start = int(counts[:number].sum())
        _, high, wide = self.grids[number].tolist()
        image = np.zeros((16 * high, 16 * wide, 3), np.uint8)
        patch = start
        for block_y in range(0, high, 2):
            for block_x in range(0, wide, 2):
                for y in (block_y, block_y + 1):
                    for x in (block_x, block_x + 1):
                        pixels = self.arrays["patches"][patch].reshape(3, 16, 16)
                        image[16 * y : 16 * y + 16, 16 * x : 16 * x + 16] = pixels.transpose(1, 2, 0)
                        patch += 1
        return image


def read_samples(directory: Path) -> list[RawSample]:
    """All samples in storage order."""
    samples = []
    for path in sorted(directory.glob("shard-*.tar")):
        found: dict[str, dict[str, Any]] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                data = file.read()
                value = json.loads(data) if name == "json" else np.load(io.BytesIO(data))
                found.setdefault(key, {})[name.removesuffix(".npy")] = value
        for key, members in found.items():
            samples.append(RawSample(key, path.name, members.pop("json"), members))
    return samples


def read_index(directory: Path) -> list[dict[str, Any]]:
    """The index's rows."""
    rows: list[dict[str, Any]] = pq.read_table(directory / "index.parquet").to_pylist()
    return rows


def read_rejects(directory: Path) -> list[dict[str, Any]]:
    """The ledger's lines."""
    return [json.loads(line) for line in (directory / "rejected.jsonl").read_text().splitlines()]
