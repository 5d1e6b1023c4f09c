"""What every peer does alike: read finished samples, join a batch, count what reaches the step. Needs numpy and torch.

A peer's script is run as ``python PEER.py prepare|measure DATA OWN``, where DATA is the folder that ``run.py`` made and
OWN a folder for the peer's own format.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Arrays of a sample that every array loader stores and delivers.
MEMBERS = ("input_ids", "loss_mask", "position_ids", "patches")
#: Batches of an epoch that are not timed: worker processes start meanwhile.
WARM_UP = 3
PREFETCH = 2

Sample = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]


def samples(data: Path) -> Iterator[Sample]:
    """The finished samples of the dataset, from its tars."""
    for tar in sorted((data / "dataset").glob("*.tar")):
        found: dict[str, Sample] = {}
        with tarfile.open(tar) as file:
            for entry in file:
                key, _, name = entry.name.partition(".")
                member = name.removesuffix(".npy")
                if member in MEMBERS:
                    sample = found.setdefault(key, {})
                    sample[member] = array_of(file.extractfile(entry).read())  # type: ignore[union-attr]
                    if len(sample) == len(MEMBERS):
                        yield found.pop(key)


def array_of(stored: bytes) -> np.ndarray:
    """The array of an npy file, without a copy."""
    file = io.BytesIO(stored)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return np.frombuffer(stored, dtype, offset=file.tell()).reshape(shape)


def join(batch: list[Sample]) -> Batch:
    """One sequence of all samples, as a packed step needs it."""
    axis = {"position_ids": 1}
    return {
        name: torch.from_numpy(np.concatenate([each[name] for each in batch], axis=axis.get(name, 0)))
        for name in MEMBERS
    }


def facts(data: Path) -> dict[str, int]:
    """Sizes and limits of the data."""
    return dict(json.loads((data / "data.json").read_text()))


def batch_size(data: Path) -> int:
    """Samples per batch: as many mean ones as fill the packs of vlmdata."""
    return facts(data)["samples_per_batch"]


def measure(
    epoch: Callable[[], Iterable[Any]], tensors: Callable[[Any], dict[str, torch.Tensor]], seconds: float
) -> None:
    """Takes batches for some seconds of steady epochs, and prints the result as JSON.

    Args:
        epoch: Starts an epoch.
        tensors: The tensors of a batch. ``input_ids`` or, for padded batches, ``attention_mask`` has its tokens.
        seconds: Of steady epochs; at most six times as long in all.
    """
    tokens = batches = 0
    spent = 0.0
    first = time.perf_counter()
    # Epochs of few rows are short, and some loaders take seconds to start one.
    while spent < seconds and time.perf_counter() - first < 6 * seconds:
        begun = ended = 0.0
        for number, batch in enumerate(epoch()):
            held = tensors(batch)
            for each in held.values():  # a step reads all of it: touch every page
                each.reshape(-1)[:: max(1, 4096 // each.element_size())].sum()
            ended = time.perf_counter()
            if number < WARM_UP:
                begun = ended
                continue
            mask = held.get("attention_mask")
            tokens += held["input_ids"].numel() if mask is None else int(mask.sum())
            batches += 1
        if ended == begun:
            raise SystemExit("the epoch is too short to time: more --rows")
        spent += ended - begun
    print(json.dumps({"tokens": tokens, "batches": batches, "seconds": spent}))


def main(prepare: Callable[[Path, Path], None], run: Callable[[Path, Path, float], None]) -> None:
    """Command line of a peer."""
    torch.set_num_threads(1)
    command, data, own = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if command == "prepare":
        prepare(data, own)
    else:
        run(data, own, float(sys.argv[4]))
