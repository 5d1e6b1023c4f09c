"""Preprocessing: images per second against its floor and against transformers' processor; memory over size.

    python benchmarks/preprocess.py              # a few minutes
    python benchmarks/preprocess.py --quick      # fewer images and repeats, to see that it runs

The floor is what cannot be left out: decoding the same files with Pillow and resizing them with torchvision, in one
thread. The worker does all of the job on real rows and writes real shards to disk, flushed. The processor is
Qwen3VLProcessor (torchvision back end) called row by row on decoded images, with chat template and tokenizer, and keeps
nothing. Ways run in turn within every repeat; numbers are medians over repeats, ratios medians of ratios within a
repeat. One and two workers are compared by the whole command, in its middle: its first and last shards are not timed.
Writes benchmarks/results/preprocess-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware

sys.path.pop(0)  # this file has the name of the package it measures

import datasets
import torch
from PIL import Image

from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, TextPart
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.schema import PROGRESS_DIR
from vlmdata.media.resize import resize_image
from vlmdata.storage.folder import Folder
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.shards.job import ShardContext, ShardJob, run_shard
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source

RESULTS = Path(__file__).resolve().parent / "results"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
COMMAND = str(Path(sys.executable).parent / "vlmdata")
#: Times the rows are repeated where one and two workers are compared.
_MANY = 20
_ROWS_PER_SHARD = 16
#: Shards at either end of a run that are not timed.
_EDGE = 4
#: Repeats and images; with --quick.
SIZES = ((5, 32), (2, 12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer images and repeats")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    repeats, images = SIZES[options.quick]
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as temporary:
        work = Path(temporary)
        sources = make_sources(work, images)
        results = {
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/preprocess.py" + (" --quick" if options.quick else ""),
            "hardware": hardware("torch", "torchvision", "pillow", "transformers", "tokenizers", "vlmdata"),
            "bounds": [FAMILY.min_pixels, FAMILY.max_pixels],
            "repeats": repeats,
            "one_worker": {name: one_worker(source, work, repeats) for name, source in sources.items()},
            "workers": scaling(work, sources, repeats=1 if options.quick else 2),
            "memory": memory(work, sources, options.quick),
        }
    text = report(results)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"preprocess-{results['date']}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    stem.with_suffix(".md").write_text(text)


def make_sources(work: Path, images: int) -> dict[str, Path]:
    """The same receipts as PNG and as JPEG files in CORD-V2 rows; real ones where there are some."""
    real = SHARED / "receipts_real"
    drawn = open_source(str(real)) if real.exists() else open_source("demo", limit=images)
    files = [drawn.row(n).values for n in range(min(images, drawn.num_rows))]
    made = {}
    for name, options in {"JPEG": {"quality": 90}, "PNG": {"compress_level": 6}}.items():
        rows = []
        for row in files:
            buffer = io.BytesIO()
            Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB").save(buffer, format=name, **options)
            image = {"bytes": buffer.getvalue(), "path": None}
            rows.append({"image": image, "ground_truth": row["ground_truth"]})
        made[name] = work / f"{name}.parquet"
        write_rows(rows, made[name])
    return made


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    features = datasets.Features({"image": datasets.Image(decode=False), "ground_truth": datasets.Value("string")})
    columns = {name: [row[name] for row in rows] for name in features}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path))


def one_worker(path: Path, work: Path, repeats: int) -> dict[str, Any]:
    """Seconds per image of the floor, the processor and the worker, each on all rows, in turn."""
    source = open_source(str(path))
    floor, processor, worker = floor_of(source), processor_of(source), worker_of(source, work / path.stem)
    ways: dict[str, Callable[[], None]] = {"floor": floor, "processor": processor, "worker": worker}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if repeat:  # the first round warms caches
                times[name].append(time.perf_counter() - begun)
            for shard in work.rglob("*.tar"):
                shard.unlink()  # see worker_of
    rows = source.num_rows
    return {
        "images": rows,
        "images_per_second": {name: rows / median(seconds) for name, seconds in times.items()},
        "worker_over_floor": median(f / w for f, w in zip(times["floor"], times["worker"], strict=True)),
        "worker_over_processor": median(p / w for p, w in zip(times["processor"], times["worker"], strict=True)),
    }


def floor_of(source: Source) -> Callable[[], None]:
    files = [source.row(n).values["image"]["bytes"] for n in range(source.num_rows)]

    def run() -> None:
        import numpy as np

        for data in files:
            pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
            resize_image(pixels, *FAMILY.image_size(*pixels.shape[:2], FAMILY.min_pixels, FAMILY.max_pixels))

    return run


def processor_of(source: Source) -> Callable[[], None]:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = load_tokenizer().hf
    pixels = {"shortest_edge": FAMILY.min_pixels, "longest_edge": FAMILY.max_pixels}
    images = Qwen2VLImageProcessor(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=pixels)
    processor = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=tokenizer.chat_template)
    recipe = load_recipe("cord_v2")

    def messages(conversation: Conversation) -> list[dict[str, Any]]:
        return [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part.text}
                    if isinstance(part, TextPart)
                    else {"type": "image", "image": Image.open(io.BytesIO(part.data)).convert("RGB")}
                    for part in message.parts
                ],
            }
            for message in conversation.messages
        ]

    def run() -> None:
        for number in range(source.num_rows):
            chat = messages(recipe(source.row(number)))
            processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")

    return run


def worker_of(source: Source, directory: Path) -> Callable[[], None]:
    (directory / PROGRESS_DIR).mkdir(parents=True)
    config = PreprocessConfig()
    expected = load_tokenizer(config.tokenizer, config.tokenizer_revision).info
    context = ShardContext.build(source, config, Folder(directory), expected)
    # A new file every time: to give up the bytes of an old one is not part of the job. The old ones are deleted between
    # rounds, outside the clock, so that their memory can be used again: a virtual machine gets new memory from its
    # host, which can take longer than the write.
    numbers = itertools.count()
    return lambda: void(run_shard(ShardJob(next(numbers), 0, source.num_rows), context))


def void(_: object) -> None:
    """Drops a result."""


def scaling(work: Path, sources: dict[str, Path], repeats: int) -> dict[str, Any]:
    """The whole command on many copies of the JPEG rows, with one and two workers, in turn."""
    rows = [row.values for row in all_rows(open_source(str(sources["JPEG"])))]
    many = work / "many.parquet"
    write_rows([dict(rows[n % len(rows)]) for n in range(_MANY * len(rows))], many)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for workers in (1, 2):
            timed_command(many, work / "out", workers)
            rates[workers].append(steady_rate(work / "out"))
    return {
        "rows": _MANY * len(rows),
        "images_per_second": {str(workers): median(values) for workers, values in rates.items()},
        "two_over_one": median(two / one for one, two in zip(rates[1], rates[2], strict=True)),
    }


def steady_rate(directory: Path) -> float:
    """Rows per second between the first shards and the last ones, when all workers were at work.

    A shard's time is that of its last write, so start-up and the end, which may take turns waiting, are left out.
    """
    times = sorted(path.stat().st_mtime for path in directory.rglob("*.tar"))
    return (len(times) - 2 * _EDGE) * _ROWS_PER_SHARD / (times[-1 - _EDGE] - times[_EDGE - 1])


def all_rows(source: Source) -> list[Any]:
    return [source.row(number) for number in range(source.num_rows)]


def timed_command(source: Path, out: Path, workers: int) -> tuple[float, int]:
    """Seconds and peak resident KiB (of the largest process) of a run of the command."""
    shutil.rmtree(out, ignore_errors=True)
    arguments = [
        "preprocess",
        str(source),
        "--out",
        str(out),
        "--tokenizer",
        "embedded",
        "-j",
        str(workers),
        "--rows-per-shard",
        str(_ROWS_PER_SHARD),
    ]
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, COMMAND, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begun, int(done.stdout)


def memory(work: Path, sources: dict[str, Path], quick: bool) -> dict[str, Any]:
    """Peak resident memory of a one-worker run over ever more rows."""
    rows = [row.values for row in all_rows(open_source(str(sources["JPEG"])))]
    peaks = {}
    for times in (1, 3) if quick else (1, 4, 10):
        path = work / f"times{times}.parquet"
        write_rows([dict(rows[n % len(rows)]) for n in range(times * len(rows))], path)
        peaks[str(times * len(rows))] = round(timed_command(path, work / "out", 1)[1] / 1024)
    return {"peak_mib_by_rows": peaks, "this_process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def report(results: dict[str, Any]) -> str:
    machine = results["hardware"]
    lines = [
        f"# Preprocessing, {results['date']}",
        "",
        f"`{results['command']}` on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"load {machine['load_average']} at the start; torch {machine['torch']}, Pillow {machine['pillow']}, "
        f"transformers {machine['transformers']}. Bounds {results['bounds'][0]:,} to {results['bounds'][1]:,} pixels. "
        f"Medians over {results['repeats']} repeats.",
        "",
        "| files | floor | one worker | processor | worker / floor | worker / processor |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results["one_worker"].items():
        rate = found["images_per_second"]
        rates = " | ".join(f"{rate[way]:.1f} /s" for way in ("floor", "worker", "processor"))
        ratios = f"{found['worker_over_floor']:.2f} (aim 0.8) | {found['worker_over_processor']:.2f} (aim 2)"
        lines.append(f"| {found['images']} {name} | {rates} | {ratios} |")
    workers, peaks = results["workers"], results["memory"]["peak_mib_by_rows"]
    scaled = workers["images_per_second"]
    lines += [
        "",
        f"Whole command over {workers['rows']} JPEG rows, first and last shards not timed: "
        f"{scaled['1']:.1f} images/s with one worker, {scaled['2']:.1f} with two: "
        f"{workers['two_over_one']:.2f} times (aim 1.8).",
        "",
        "Peak resident memory of the command, one worker: "
        + ", ".join(f"{mib} MiB for {rows} rows" for rows, mib in peaks.items())
        + ".",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
