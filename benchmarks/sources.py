"""Sources: time to the first shard of a source in a bucket, and rows per second from a bucket against local disk.

    python benchmarks/sources.py              # a few minutes
    python benchmarks/sources.py --quick      # fewer files and rows, to see that it runs

The bucket is moto's S3 server in a process of its own on this machine. It is one Python process, so it bounds what is
measured. The first shard is timed from the start of the command, with nothing counted before, and again when the row
counts were kept. Opening is compared with the way before: hash all bytes, and copy all rows to the Arrow cache of
``datasets``. Rows per second are of one worker over drawn receipts as JPEG and PNG in Parquet; bucket and disk take
turns within each repeat, and the ratio is the median of ratios. Writes benchmarks/results/sources-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware

sys.path[0] = str(Path(__file__).resolve().parents[1])

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from tests.object_store import ObjectStore, forget_file_systems, serving
from vlmdata.format.schema import PROGRESS_DIR
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.demo import ensure_demo_dataset
from vlmdata.preprocess.shards.job import ShardContext, ShardJob, run_shard
from vlmdata.preprocess.sources.identity import file_digest
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage.folder import Folder

RESULTS = Path(__file__).resolve().parent / "results"
COMMAND = str(Path(sys.executable).parent / "vlmdata")
_ROWS_PER_GROUP = 250
_ROWS_PER_SHARD = 32
#: Files in the bucket, rows whose speed is measured, and rounds; with --quick.
SIZES = ((1000, 192, 5), (50, 64, 2))
ROWS_PER_FILE = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    options = parser.parse_args()
    files, rows, repeats = SIZES[options.quick]
    began = hardware("pyarrow", "s3fs", "moto", "datasets")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder / "moto.log") as server, _environment(server, folder / "cache"):
            found = {
                "hardware": began,
                "first_shard": _first_shard(server, folder, files, ROWS_PER_FILE),
                "rows": _rows_per_second(server, folder, rows, repeats),
            }
    day = datetime.date.today().isoformat()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"sources-{day}.json").write_text(json.dumps(found, indent=2) + "\n")
    (options.out / f"sources-{day}.md").write_text(_report(found, day))
    print(_report(found, day))


@contextlib.contextmanager
def _environment(server: ObjectStore, cache: Path) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(server.environment, VLMDATA_CACHE=str(cache), HF_HUB_OFFLINE="1")
    forget_file_systems()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _first_shard(server: ObjectStore, folder: Path, files: int, rows: int) -> dict[str, Any]:
    here = folder / "many"
    here.mkdir()
    for n in range(files):
        numbers = range(n * rows, (n + 1) * rows)
        messages = [
            [{"role": "user", "content": f"What is {k}?"}, {"role": "assistant", "content": f"It is {k}. " * 8}]
            for k in numbers
        ]
        path = here / f"train-{n:05d}.parquet"
        pq.write_table(pa.table({"messages": messages}), path, row_group_size=_ROWS_PER_GROUP)
    store = ObjectStore(server.endpoint, "many")
    store.file_system().mkdir("many")
    url = store.put(here)
    return {
        "files": files,
        "rows": files * rows,
        "bytes": sum(path.stat().st_size for path in here.iterdir()),
        "first_shard_s": _until_first_shard(url, folder / "cold"),
        "first_shard_counted_s": _until_first_shard(url, folder / "warm"),
        "open_local_s": _seconds(lambda: open_source(str(here))),
        "open_local_before_s": _seconds(lambda: _open_as_before(here, folder / "arrow")),
    }


def _until_first_shard(url: str, out: Path) -> float:
    """Seconds from the start of the command to its first shard."""
    command = [COMMAND, "preprocess", url, "--recipe", "chat", "--tokenizer", "embedded", "--out", str(out), "-j", "2"]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        while not list((out / PROGRESS_DIR).glob("shard-*.json")):
            if run.poll() is not None:
                raise SystemExit(run.stderr.read().decode() if run.stderr else "the command failed")
            time.sleep(0.02)
        took = time.perf_counter() - begun
        run.kill()
    return took


def _open_as_before(folder: Path, cache: Path) -> None:
    files = sorted(folder.iterdir())
    for file in files:
        file_digest(file)
    datasets.disable_progress_bars()
    datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train", cache_dir=str(cache))


def _rows_per_second(server: ObjectStore, folder: Path, rows: int, repeats: int) -> dict[str, Any]:
    here = ensure_demo_dataset("cord_v2", rows)
    store = ObjectStore(server.endpoint, "receipts")
    store.file_system().mkdir("receipts")
    places = {"disk": str(here), "bucket": store.put(here)}
    seconds: dict[str, list[float]] = {place: [] for place in places}
    for repeat in range(repeats + 1):
        for place in sorted(places, reverse=repeat % 2 == 0):
            took = _make_all(places[place], folder / f"{place}-{repeat}")
            if repeat:  # the first round warms up
                seconds[place].append(took)
    ratios = [disk / bucket for disk, bucket in zip(seconds["disk"], seconds["bucket"], strict=True)]
    size = sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
    return {
        "rows": rows,
        "bytes": size,
        **{f"{place}_rows_s": rows / median(times) for place, times in seconds.items()},
        "ratio": median(ratios),
        "ratios": ratios,
    }


def _make_all(place: str, out: Path) -> float:
    """Seconds to make all shards with one worker; the source is open and the tokenizer loaded."""
    source, config = open_source(place), PreprocessConfig(rows_per_shard=_ROWS_PER_SHARD)
    (out / PROGRESS_DIR).mkdir(parents=True)
    context = ShardContext.build(source, config, Folder(out), load_tokenizer().info)
    starts = range(0, source.num_rows, _ROWS_PER_SHARD)
    jobs = [ShardJob(n, start, min(start + _ROWS_PER_SHARD, source.num_rows)) for n, start in enumerate(starts)]
    return _seconds(lambda: [run_shard(job, context) for job in jobs])


def _seconds(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def _report(found: dict[str, Any], day: str) -> str:
    machine, first, rows = found["hardware"], found["first_shard"], found["rows"]
    return f"""# Sources, {day}

`python benchmarks/sources.py` on {machine["cpu"]}, {machine["cores"]} cores, {machine["memory_gib"]} GiB; load \
{machine["load_average"]} at the start; pyarrow {machine["pyarrow"]}, s3fs {machine["s3fs"]}. The bucket is moto \
{machine["moto"]}, one Python process on the same machine.

## Time to the first shard

{first["rows"]:,} rows in {first["files"]:,} Parquet files in a bucket ({first["bytes"] / 2**20:.0f} MiB), two \
workers, from the start of the command:

| rows counted before | first shard |
|---|---|
| no | {first["first_shard_s"]:.1f} s (aim 30 s) |
| yes | {first["first_shard_counted_s"]:.1f} s |

Opening the same files on disk took {first["open_local_s"]:.1f} s, the way before (hashing all bytes, an Arrow copy) \
{first["open_local_before_s"]:.1f} s: {first["open_local_before_s"] / first["open_local_s"]:.0f} times.

## Rows per second

{rows["rows"]} drawn receipts ({rows["bytes"] / 2**20:.0f} MiB of Parquet), one worker, bucket and disk in turn:

| disk | bucket | bucket / disk |
|---|---|---|
| {rows["disk_rows_s"]:.1f} /s | {rows["bucket_rows_s"]:.1f} /s | {rows["ratio"]:.2f} (aim 0.9) |

Ratios of the repeats: {", ".join(f"{ratio:.2f}" for ratio in rows["ratios"])}.
"""


if __name__ == "__main__":
    main()
