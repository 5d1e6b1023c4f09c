"""Preprocessing by the clock on many cores: decoding and resizing alone, and `vlmdata preprocess`, in rows per second.

    python benchmarks/preprocess_workers.py RECEIPTS --processes 1 4 8 16 --rounds 3

RECEIPTS is a source of rows with images, such as a Parquet file. The floor decodes (torchvision's decoder for JPEG) and
resizes the same images in as many processes, each with kept memory, and stores nothing. Both ways take turns within a
round. Their rate is that between the first batches of rows and the last ones, when all processes are at work.
One shard is also made in this process under a profiler, once by the clock and once by CPU time: the difference is
waiting. Numbers are medians over the rounds. Writes benchmarks/results/preprocess-workers-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import io
import json
import multiprocessing
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
#: Parts of a worker's time: the functions that end in these names, with all that they call.
PARTS = {
    "decoding": "(decode_image)",
    "resizing and patches": "(resize_to_patches)",
    "text, tokens and masks": "(encode_turns)",
    "SHA-256": "'update' of '_hashlib.HASH'",
    "writing": "'write' of '_io.FileIO'",
    "flushing": "(finish)",
    "reading rows": "(candidates)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="rows with images")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--shards", type=int, default=8, help="shards per process, at least 4")
    parser.add_argument("--rows-per-shard", type=int, default=64, help="also the rows of a piece of the floor's work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder for the shards; a temporary one if not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-", dir=options.work) as work:
        results = measured(options, Path(work))
    text = report(results)
    print(text)
    stem = options.out / f"preprocess-workers-{results['date']}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    stem.with_suffix(".md").write_text(text)


def measured(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    from hardware import hardware

    from vlmdata.preprocess.sources.open import open_source

    found = open_source(options.source)
    rows = [found.row(number).values for number in range(min(found.num_rows, 256))]
    shard_rows = options.rows_per_shard
    rates: dict[str, dict[str, list[float]]] = {}
    cores: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for processes in options.processes:
            source = work / f"{processes}.parquet"
            if not source.exists():
                write_rows(rows, source, options.shards * shard_rows * processes, shard_rows)
            of = rates.setdefault(str(processes), {"floor": [], "preprocess": []})
            of["floor"].append(
                floor_rate([row["image"]["bytes"] for row in rows], processes, options.shards, shard_rows)
            )
            rate, busy = command_rate(source, work / "out", processes, shard_rows)
            of["preprocess"].append(rate)
            cores.setdefault(str(processes), []).append(busy)
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python benchmarks/preprocess_workers.py", *sys.argv[1:]]),
        "hardware": hardware("torch", "torchvision", "pillow", "transformers", "vlmdata"),
        "rates": rates,
        "cores_busy": {processes: median(values) for processes, values in cores.items()},
        "parts": {name: parts_of(rows, work, shard_rows, clock) for name, clock in CLOCKS.items()},
    }


CLOCKS: dict[str, Callable[[], float]] = {"clock": time.perf_counter, "cpu": time.process_time}


def write_rows(rows: list[dict[str, Any]], path: Path, number: int, shard_rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [rows[n % len(rows)][name] for n in range(number)] for name in ("image", "ground_truth")}
    pq.write_table(pa.table(columns), path, row_group_size=shard_rows)


def floor_rate(files: list[bytes], processes: int, shards: int, shard_rows: int) -> float:
    """Rows per second of decoding and resizing, all processes at work."""
    starts = range(0, shards * processes * shard_rows, shard_rows)
    if processes == 1:
        begin(files)
        return steady([piece(start, shard_rows) for start in starts], 1, shard_rows)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, begin, (files,)) as pool:
        ends = sorted(pool.map(piece, starts, [shard_rows] * len(starts)))
    return steady(ends, processes, shard_rows)


def begin(files: list[bytes]) -> None:
    import torch

    from vlmdata.media.c_library import keep_memory

    global FILES
    FILES = files
    torch.set_num_threads(1)
    keep_memory()


FILES: list[bytes] = []


def piece(start: int, rows: int) -> float:
    """Decodes and resizes as many images as a shard has; returns the time of the end."""
    import numpy as np
    import torch
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_jpeg

    from vlmdata.families.qwen3_5 import FAMILY
    from vlmdata.media.resize import resize_image

    for row in range(start, start + rows):
        data = FILES[row % len(FILES)]
        if data[:2] == b"\xff\xd8":
            pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
            array = pixels.permute(1, 2, 0).numpy()
        else:
            array = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        resize_image(array, *FAMILY.image_size(*array.shape[:2], FAMILY.min_pixels, FAMILY.max_pixels))
    return time.time()


def command_rate(source: Path, out: Path, processes: int, shard_rows: int) -> tuple[float, float]:
    """Rows per second of the whole command while all of its workers are at work, and the machine's mean busy cores."""
    shutil.rmtree(out, ignore_errors=True)
    command = ["preprocess", str(source), "--out", str(out), "--tokenizer", "embedded"]
    before = busy_seconds()
    begun = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "from vlmdata.cli.main import main; main()",
            *command,
            "-j",
            str(processes),
            "--rows-per-shard",
            str(shard_rows),
        ],
        check=True,
        capture_output=True,
    )
    seconds = time.perf_counter() - begun
    cpu = busy_seconds() - before
    rate = steady(sorted(shard.stat().st_mtime for shard in out.rglob("*.tar")), processes, shard_rows)
    shutil.rmtree(out)
    return rate, cpu / seconds


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def steady(ends: list[float], processes: int, shard_rows: int) -> float:
    """Rows per second between the first piece of each process and the last one."""
    edge = min(processes, (len(ends) - 2) // 2)
    return (len(ends) - 2 * edge) * shard_rows / (ends[-1 - edge] - ends[edge - 1])


def parts_of(rows: list[dict[str, Any]], work: Path, shard_rows: int, clock: Callable[[], float]) -> dict[str, float]:
    """Milliseconds per row of each part of a worker's job, in this process."""
    import torch

    from vlmdata.format.schema import PROGRESS_DIR
    from vlmdata.media.c_library import keep_memory
    from vlmdata.preprocess.chat.tokenizer import load_tokenizer
    from vlmdata.preprocess.config import PreprocessConfig
    from vlmdata.preprocess.shards.job import ShardContext, ShardJob, run_shard
    from vlmdata.preprocess.sources.open import open_source
    from vlmdata.storage.folder import Folder

    torch.set_num_threads(1)
    keep_memory()
    source, out = work / "parts.parquet", work / "parts"
    write_rows(rows, source, 2 * shard_rows, shard_rows)
    (out / PROGRESS_DIR).mkdir(parents=True, exist_ok=True)
    config = PreprocessConfig()
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision).info
    context = ShardContext.build(open_source(str(source)), config, Folder(out), tokenizer)
    run_shard(ShardJob(0, 0, shard_rows), context)
    profile = cProfile.Profile(clock)
    begun = clock()
    profile.enable()
    run_shard(ShardJob(1, 0, 2 * shard_rows), context)
    profile.disable()
    total = clock() - begun
    times = {
        pstats.func_std_string(function): entry[3]  # type: ignore[attr-defined]
        for function, entry in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    }
    parts = {part: sum(seconds for name, seconds in times.items() if end in name) for part, end in PARTS.items()}
    shutil.rmtree(out)
    parts["everything"] = total
    return {part: 1000 * seconds / (2 * shard_rows) for part, seconds in parts.items()}


def report(results: dict[str, Any]) -> str:
    machine = results["hardware"]
    lines = [
        f"# Preprocessing by the clock, {results['date']}",
        "",
        f"`{results['command']}` on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; load "
        f"{machine['load_average']} at the end; torch {machine['torch']}, torchvision {machine['torchvision']}.",
        "",
        "| processes | decoding and resizing, rows/s | preprocess, rows/s | ratio | busy cores |",
        "|---|---|---|---|---|",
    ]
    for processes, ways in results["rates"].items():
        ratio = median(p / f for f, p in zip(ways["floor"], ways["preprocess"], strict=True))
        lines.append(
            f"| {processes} | {median(ways['floor']):.0f} | {median(ways['preprocess']):.0f} | {ratio:.2f} | "
            f"{results['cores_busy'][processes]:.1f} |"
        )
    lines += ["", "| part of one worker's job | by the clock, ms per row | CPU time, ms per row |", "|---|---|---|"]
    for part, milliseconds in results["parts"]["clock"].items():
        lines.append(f"| {part} | {milliseconds:.2f} | {results['parts']['cpu'][part]:.2f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
