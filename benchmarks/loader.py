"""The loader: bytes per second, against what else one could do; time to the first batch; bytes a rank reads.

    python benchmarks/loader.py                 # everything; some minutes
    python benchmarks/loader.py --quick         # few repeats, to see that it runs

Data: the real receipts (../shared/data/receipts_real; the drawn demo where they are absent) through the real
`vlmdata preprocess`: four copies of the shard, more than any cache holds, each listed eight times; and short chats,
listed over and over to a million samples. All shards are in the page cache: storage is not measured.

Ways that are compared run in turn, in every repeat; numbers are medians over repeats, ratios medians of the ratios
within a repeat, so that a machine that is busy with something else slows both sides. Beside the clock stands CPU time,
of workers too: on a busy machine it is the fairer measure, since several processes get a greater share of the cores
than one. PyTorch runs with one thread.
Writes benchmarks/results/loader-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware
from loader_data import copies, preprocess, repeated, short_chats, source_named
from loader_report import report

sys.path.pop(0)  # benchmarks/preprocess.py has the name of a package

import numpy as np
import psutil
import torch

from vlmdata import StreamingLoader
from vlmdata.batch import PackedBatch

RESULTS = Path(__file__).resolve().parent / "results"
COPIES = 4
#: Times that every copy is listed, so that an epoch is long enough to time, and its plan does not count much.
LISTED = 8
SOURCE_BYTES = 600_000_000
CAPACITY = 8192
GLOBAL_BATCH = 4
BUFFERS = 4
#: Batches that are timed; of short samples with --quick and without.
BATCHES = {"webdataset": 100, "on the fly": 20, "short": (50, 300)}
#: Rows of short chats, and times that they are listed with --quick and without.
CHATS, CHATS_LISTED = 2000, (25, 500)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repeats and a small index")
    parser.add_argument("--work", type=Path, help="where data is made, and found again; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        results = measure(work, options.quick)
    text = report(results)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"loader-{datetime.date.today().isoformat()}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)


def measure(work: Path, quick: bool) -> Row:
    note("making data")
    name = source_named("receipts_real") or "demo"
    receipts = preprocess(name, work / "receipts", *(("--limit", "53") if name == "demo" else ()))
    shards = copies(receipts, COPIES)
    data = [repeated(receipts, COPIES * (1 if quick else LISTED), work / "listed", shards)]
    chats = short_chats(work, CHATS)
    million = repeated(chats, CHATS_LISTED[not quick], work / "million")
    versions = ("torch", "torchvision", "numpy", "transformers", "webdataset", "xxhash")
    results: Row = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(*versions),
        "source": Path(name).name,
    }
    repeats = 2 if quick else 5
    results["throughput"] = throughput(data, repeats)
    results["webdataset"] = against_webdataset(data, shards, 2 if quick else 5)
    results["on_the_fly"] = [against_on_the_fly(name, data, 1 if quick else 3)]
    if cord := source_named("cord_v2_real"):
        results["on_the_fly"].append(against_on_the_fly(cord, [preprocess(cord, work / "cord")], 2 if quick else 7))
    results["short_samples"] = short_samples(million, 1 if quick else 5, BATCHES["short"][not quick])
    results["first_batch"] = first_batch({"receipts": data, "chats": [million]}, 2 if quick else 7)
    results["bytes_read"] = bytes_read(data)
    results["load_average_at_end"] = round(os.getloadavg()[0], 2)
    return results


# --- 1: bytes per second ---------------------------------------------------------------------------------------


def throughput(data: list[Path], repeats: int) -> Row:
    """Assembled bytes per second, and those of a copy of equally many bytes in equally large pieces."""
    with open_loader(data) as loader:
        sizes = [batch_bytes(batch) for batch in loader]
    source = np.ones(SOURCE_BYTES, np.uint8)  # memory to memory: more than the cache on both sides
    buffers = [np.ones(max(sizes), np.uint8) for _ in range(BUFFERS)]

    def copy() -> tuple[float, float]:
        clock = Clock()
        at = 0
        for number, size in enumerate(sizes):
            at = at if at + size <= SOURCE_BYTES else 0
            np.copyto(buffers[number % BUFFERS][:size], source[at : at + size])
            at += size
        return clock.rates(sum(sizes))

    cases = [(workers, verify) for workers in (0, 1, 2) for verify in (True, False)]
    loaders = {case: open_loader(data, num_workers=case[0], verify=case[1]) for case in cases}
    found: dict[Any, list[tuple[float, float]]] = {case: [] for case in [*cases, "copy"]}
    for repeat in range(repeats):
        note(f"throughput {repeat + 1}/{repeats}")
        found["copy"].append(copy())
        for case in cases:
            found[case].append(stream_epoch(loaders[case]))
            loaders[case].close()  # its workers must not run on while others are timed
    copied = found.pop("copy")
    rows = []
    for (workers, verify), speeds in found.items():
        ratios = [wall / base for (wall, _), (base, _) in zip(speeds, copied, strict=True)]
        row = {"num_workers": workers, "verify": verify, "bytes_per_s": median(wall for wall, _ in speeds)}
        row |= {"ratio": median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios)}
        row["cpu_ratio"] = median(cpu / base for (_, cpu), (_, base) in zip(speeds, copied, strict=True))
        rows.append(row)
    return {
        "epoch_bytes": sum(sizes),
        "packs": len(sizes),
        "copy_bytes_per_s": median(wall for wall, _ in copied),
        "copy_bytes_per_cpu_s": median(cpu for _, cpu in copied),
        "rows": rows,
    }


def stream_epoch(loader: StreamingLoader) -> tuple[float, float]:
    """Bytes of batches per second, and per second of CPU time, over the epoch after the current one.

    The clock starts without a pause after the first: workers are then exactly as far ahead as at the end.
    """
    for _ in loader:
        pass
    total, clock = 0, Clock()
    for batch in loader:
        total += batch_bytes(batch)
    return clock.rates(total)


class Clock:
    """Time passed, and CPU time of this process and its workers (which are alive throughout)."""

    def __init__(self) -> None:
        self._begun, self._cpu = time.perf_counter(), self._cpu_seconds()

    @staticmethod
    def _cpu_seconds() -> float:
        workers = [worker.cpu_times() for worker in psutil.Process().children(recursive=True)]
        return time.process_time() + sum(times.user + times.system for times in workers)

    def rates(self, count: float) -> tuple[float, float]:
        """So many things per second, and per second of CPU time."""
        return count / (time.perf_counter() - self._begun), count / (self._cpu_seconds() - self._cpu)


def batch_bytes(batch: PackedBatch) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors().values())


def open_loader(data: list[Path], **options: Any) -> StreamingLoader:
    return StreamingLoader(data, **{"capacity": CAPACITY, "global_batch": GLOBAL_BATCH, **options})


# --- 2: plain webdataset ---------------------------------------------------------------------------------------


def against_webdataset(data: list[Path], files: list[Path], repeats: int) -> Row:
    """Samples per second of the loader and of `WebDataset(shards).decode()`, one process each."""
    import webdataset

    shards = [str(file) for file in files]
    ours, theirs = [], []
    for repeat in range(repeats):
        note(f"webdataset {repeat + 1}/{repeats}")
        clock, count = Clock(), 0
        for _ in webdataset.WebDataset(shards, shardshuffle=False).decode():
            count += 1
        theirs.append(clock.rates(count))
        with open_loader(data) as loader:
            ours.append(samples_per_s(loader, BATCHES["webdataset"]))
    return {
        "samples": count,
        "webdataset_samples_per_s": median(wall for wall, _ in theirs),
        "loader_samples_per_s": median(wall for wall, _ in ours),
        "ratio": median(a / b for (a, _), (b, _) in zip(ours, theirs, strict=True)),
        "cpu_ratio": median(a / b for (_, a), (_, b) in zip(ours, theirs, strict=True)),
    }


def samples_per_s(
    loader: StreamingLoader, batches: int, use: Callable[[PackedBatch], Any] = lambda batch: None
) -> tuple[float, float]:
    """Samples per second, and per second of CPU time, over some batches after a few first ones."""
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(endless, 4):
        use(batch)
    clock, count = Clock(), 0
    for batch in itertools.islice(endless, batches):
        count += batch.num_samples
        use(batch)
    return clock.rates(count)


# --- 3: work on the fly ----------------------------------------------------------------------------------------


def against_on_the_fly(source: str, data: list[Path], repeats: int) -> Row:
    """Samples per second of the loader and of decode + transformers' processor per sample, one thread each."""
    prepare, formats = on_the_fly(source, data[0])
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "loader": lambda: load_rate(data),
        # What a training step needs is float pixels: here expanded on the CPU, though a GPU does it in no time.
        "loader_and_pixel_values": lambda: load_rate(data, lambda batch: batch.pixel_values(torch.bfloat16)),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in [*ways, "on_the_fly"]}
    for repeat in range(repeats):
        note(f"on the fly, {Path(source).name} {repeat + 1}/{repeats}")
        clock = Clock()
        count = sum(1 for _ in prepare())
        found["on_the_fly"].append(clock.rates(count))
        for name, way in ways.items():
            found[name].append(way())
    row: Row = {"source": Path(source).name, "rows": count, "formats": formats}
    row |= {f"{name}_samples_per_s": median(wall for wall, _ in rates) for name, rates in found.items()}
    for name in ways:
        pairs = list(zip(found[name], found["on_the_fly"], strict=True))
        row[f"{name}_ratio"] = median(a / b for (a, _), (b, _) in pairs)
        row[f"{name}_cpu_ratio"] = median(a / b for (_, a), (_, b) in pairs)
    return row


def load_rate(data: list[Path], use: Callable[[PackedBatch], Any] = lambda batch: None) -> tuple[float, float]:
    with open_loader(data, global_batch=1) as loader:
        return samples_per_s(loader, BATCHES["on the fly"], use)


def on_the_fly(source: str, dataset: Path) -> tuple[Callable[[], Iterator[Any]], str]:
    """What a training script without preprocessing does to each row; rows are in memory, as stored bytes."""
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    from vlmdata.families.qwen3_5 import FAMILY
    from vlmdata.preprocess.conversation import ImagePart
    from vlmdata.preprocess.recipes.base import load_recipe
    from vlmdata.preprocess.sources.open import open_source

    images = Qwen2VLImageProcessor(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": FAMILY.min_pixels, "longest_edge": FAMILY.max_pixels},
    )
    assert images.backend == "torchvision"
    tokenizer = AutoTokenizer.from_pretrained(dataset / "tokenizer")
    processor = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=tokenizer.chat_template)
    opened, recipe = open_source(source, limit=53), load_recipe("cord_v2")
    conversations = [recipe(opened.row(i)) for i in range(opened.num_rows)]
    files = [part.data for talk in conversations for part in talk.images]
    formats = sorted({str(Image.open(io.BytesIO(data)).format) for data in files})

    def content(part: Any) -> Row:
        if isinstance(part, ImagePart):
            return {"type": "image", "image": Image.open(io.BytesIO(part.data)).convert("RGB")}
        return {"type": "text", "text": part.text}

    def prepare() -> Iterator[Any]:
        for talk in conversations:
            messages = [{"role": m.role, "content": [content(part) for part in m.parts]} for m in talk.messages]
            yield processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")

    next(prepare())
    return prepare, ", ".join(formats)


# --- short samples ---------------------------------------------------------------------------------------------


def short_samples(dataset: Path, repeats: int, batches: int) -> list[Row]:
    """Text in short samples: few bytes, so the cost is that of the samples."""
    rows = []
    for workers in (0, 1):
        speeds = []
        with open_loader([dataset], num_workers=workers, global_batch=32) as loader:
            batch_of = iter(loader)
            for repeat in range(repeats):
                note(f"short samples, {workers} workers, {repeat + 1}/{repeats}")
                for _ in range(20):
                    next(batch_of)
                begun, samples, tokens = time.perf_counter(), 0, 0
                for _ in range(batches):
                    batch = next(batch_of)
                    samples, tokens = samples + batch.num_samples, tokens + batch.true_tokens
                seconds = time.perf_counter() - begun
                speeds.append((samples / seconds, tokens / seconds))
        row = {"num_workers": workers, "samples_per_pack": samples / batches}
        row |= {"samples_per_s": median(s for s, _ in speeds), "tokens_per_s": median(t for _, t in speeds)}
        rows.append(row)
    return rows


# --- 4: time to the first batch --------------------------------------------------------------------------------


def first_batch(datasets: dict[str, list[Path]], repeats: int) -> list[Row]:
    """Seconds from nothing to a batch in hand, in a process that has all imports."""
    rows = []
    for name, data in datasets.items():
        for workers in (0, 1):
            times: dict[str, list[float]] = {"open": [], "fresh": [], "resumed": []}
            for repeat in range(repeats):
                note(f"first batch, {name}, {workers} workers, {repeat + 1}/{repeats}")
                gc.collect()
                begun = time.perf_counter()
                with open_loader(data, num_workers=workers) as loader:
                    times["open"].append(time.perf_counter() - begun)
                    next(iter(loader))
                    times["fresh"].append(time.perf_counter() - begun)
                    state = loader.state_dict()
                    state["step"], samples = loader.steps(0) // 2, sum(map(len, loader.datasets))
                gc.collect()
                begun = time.perf_counter()
                with open_loader(data, num_workers=workers) as loader:
                    loader.load_state_dict(state)
                    assert next(iter(loader)).step == state["step"]
                    times["resumed"].append(time.perf_counter() - begun)
            row: Row = {"data": name, "samples": samples, "num_workers": workers}
            rows.append(row | {way: median(seconds) for way, seconds in times.items()})
    return rows


# --- 5: bytes per rank -----------------------------------------------------------------------------------------


def bytes_read(data: list[Path]) -> list[Row]:
    """Bytes read from shards per rank and epoch: exact counts, no timing."""
    note("bytes read")
    everything = ("tokens", "labels", "pixels")
    rows = []
    for parallel in (1, 2, 4):
        for parts in (everything, ("tokens", "labels"), ()):
            read = []
            for rank in range(parallel):
                options = {"context_parallel": parallel, "context_parallel_rank": rank if parallel > 1 else None}
                with open_loader(data, parts=parts, verify=False, **options) as loader:
                    for _ in loader:
                        pass
                    read.append(loader.stats.bytes_read)
            row = {"context_parallel": parallel, "parts": list(parts), "mean": sum(read) / parallel, "most": max(read)}
            rows.append(row)
    for row in rows:
        row["share"] = row["most"] / rows[0]["most"]
    return rows


# --- report ----------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
