"""How much of loading compressed pixels is the library's decompression alone: the speed that no change here can reach.

    pip install 'vlmdata[bench]'
    python benchmarks/decoder_share.py [--rounds 15]

Data: 53 rows each of the real receipts (the drawn demo where they are absent) and of the real CORD-V2, stored raw, with
``zstd`` and with ``jxl``, packs of 8,192 tokens, shards in the page cache. The calls of Arrow's Zstandard and of libjxl
that loading makes are recorded and repeated alone, on the same bytes. All is CPU time per sample in this process with
one thread. Ways take turns; figures are medians over rounds, ratios medians of the ratios within a round.
Writes benchmarks/results/decoder-share-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from hardware import hardware
from loader_data import preprocess, source_named

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np
import torch

from vlmdata import StreamingLoader

RESULTS = Path(__file__).resolve().parent / "results"
ROWS = 53
#: The function of each codec's library that decompresses.
LIBRARY = {"zstd": ("pyarrow", "decompress"), "jxl": ("imagecodecs", "jpegxl_decode")}
#: Epochs that are timed at a time: a tenth of a second or more.
EPOCHS = {"raw": 5, "zstd": 2, "jxl": 1}
Call = tuple[Any, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sources = {"receipts": source_named("receipts_real") or "demo", "CORD-V2": source_named("cord_v2_real")}
    found = {}
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as work:
        for name, source in sources.items():
            if source is not None:
                found[name] = measure(source, Path(work) / name, options.rounds)
    machine = hardware("torch", "pyarrow", "imagecodecs", "numpy")
    stem = options.out / f"decoder-share-{datetime.date.today().isoformat()}"
    text = report(found, machine, options.rounds, stem.name.removeprefix("decoder-share-"))
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps({"hardware": machine, "cpu_ms": found}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)


def measure(source: str, work: Path, rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds per sample of each round, by way: a codec's name, or this and `` alone``."""
    work.mkdir()
    data = {
        name: preprocess(source, work / name, "--recipe", "cord_v2", "--limit", str(ROWS), "--pixels", name)
        for name in EPOCHS
    }
    loaders = {name: StreamingLoader(path, capacity=8192, global_batch=1) for name, path in data.items()}
    ways: dict[str, Callable[[], float]] = {}
    for name, loader in loaders.items():
        ways[name] = lambda name=name, loader=loader: loading(loader, EPOCHS[name])
        if name in LIBRARY:
            module, function = LIBRARY[name]
            calls = recorded(loader, module, function)
            decode = getattr(importlib.import_module(module), function)
            ways[f"{name} alone"] = lambda decode=decode, calls=calls: alone(decode, calls)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken = way()
            if number:  # the first round fills caches
                found[name].append(taken)
    for loader in loaders.values():
        loader.close()
    return found


def loading(loader: StreamingLoader, epochs: int) -> float:
    begun, samples = time.process_time(), 0
    for _ in range(epochs):
        samples += sum(batch.num_samples for batch in loader)
    return 1000 * (time.process_time() - begun) / samples


def recorded(loader: StreamingLoader, module: str, function: str) -> list[Call]:
    """The calls of a function in one epoch, less those that it refuses."""
    decode, calls = getattr(importlib.import_module(module), function), []

    def record(stored: Any, **options: Any) -> Any:
        decoded = decode(stored, **options)
        if "out" in options:
            options["out"] = options["out"].shape
        calls.append((bytes(stored), options))
        return decoded

    with mock.patch(f"{module}.{function}", record):
        samples = sum(batch.num_samples for batch in loader)
    assert len(calls) == samples, "each sample has one image"
    return calls


def alone(decode: Callable[..., Any], calls: list[Call]) -> float:
    begun = time.process_time()
    for stored, options in calls:
        out = {"out": np.empty(options["out"], np.uint8)} if "out" in options else {}
        decode(stored, **options | out)
    return 1000 * (time.process_time() - begun) / len(calls)


def report(found: dict[str, dict[str, list[float]]], machine: dict[str, Any], rounds: int, date: str) -> str:
    lines = [
        f"# The decompressors' share of loading, {date}",
        "",
        f"`python benchmarks/decoder_share.py --rounds {rounds}` on "
        + ", ".join(f"{name} {value}" for name, value in machine.items())
        + ". CPU time, other work shared the cores; medians.",
        "",
        "| source | codec | load, ms per sample | library alone, ms | relative to loading raw | relative to loading it "
        "| speed relative to raw | the same if nothing else took time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for source, times in found.items():
        raw = times["raw"]
        lines.append(f"| {source} | raw | {median(raw):.2f} | – | – | – | 1.00 | – |")
        for name in LIBRARY:
            load, library = times[name], times[f"{name} alone"]
            lines.append(
                f"| {source} | {name} | {median(load):.2f} | {median(library):.2f} | {ratio(library, raw):.2f} | "
                f"{ratio(library, load):.2f} | {ratio(raw, load):.2f} | {ratio(raw, library):.2f} |"
            )
    return "\n".join([*lines, ""])


def ratio(times: list[float], base: list[float]) -> float:
    """Median of the ratios within a round."""
    return median(a / b for a, b in zip(times, base, strict=True))


if __name__ == "__main__":
    main()
