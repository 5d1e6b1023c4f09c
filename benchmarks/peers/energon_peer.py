"""NVIDIA Megatron-Energon over the tars of a vlmdata dataset, as they are."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless
from shared import MEMBERS, PREFETCH, Batch, array_of, batch_size, facts, join, main, measure


def prepare(data: Path, own: Path) -> None:
    own.mkdir(parents=True, exist_ok=True)
    for tar in (data / "dataset").glob("*.tar"):
        os.link(tar, own / tar.name)
    tool = Path(sys.executable).parent / "energon"
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1"]
    subprocess.run([tool, "prepare", *options, own], check=True, stdout=sys.stderr)


@stateless
def cook(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"]} | {name: array_of(sample[f"{name}.npy"]) for name in MEMBERS}


class Encoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers = [Cooker(cook)]  # noqa: RUF012
    decoder = None

    def encode_sample(self, sample: Any) -> Any:
        return sample

    def batch(self, samples: list[Any]) -> Batch:
        return join(samples)

    def encode_batch(self, batch: Any) -> Any:
        return batch


def run(data: Path, own: Path, seconds: float) -> None:
    size = batch_size(data)
    dataset = get_train_dataset(
        own,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=1),
        batch_size=size,
        batch_drop_last=True,
        shuffle_buffer_size=None,
        max_samples_per_sequence=100,
        task_encoder=Encoder(),
    )
    endless = iter(get_loader(dataset, prefetch_factor=PREFETCH))
    batches = facts(data)["samples"] // size
    measure(lambda: itertools.islice(endless, batches), lambda batch: batch, seconds)


if __name__ == "__main__":
    main(prepare, run)
