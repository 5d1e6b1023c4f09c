"""Datasets in object storage: memory of the driver, writing against a disk, reading whole shards against ranges.

    python benchmarks/object_store.py driver --shards 40000 --rows 250
    python benchmarks/object_store.py write --rounds 3
    python benchmarks/object_store.py read --rounds 3

Each prints a table in Markdown. ``write`` and ``read`` start moto's S3 server in a process of its own: one Python
process, so they measure what this side costs, not what a store can do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    driver = commands.add_parser("driver")
    driver.add_argument("--shards", type=int, default=40_000)
    driver.add_argument("--rows", type=int, default=250)
    driver.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    write = commands.add_parser("write")
    write.add_argument("--rounds", type=int, default=3)
    write.add_argument("--rows", type=int, default=48)
    read = commands.add_parser("read")
    read.add_argument("--rounds", type=int, default=3)
    read.add_argument("--rows", type=int, default=96)
    options = parser.parse_args()
    if options.command == "driver":
        close_many(options.inside, options.shards, options.rows) if options.inside else driver_memory(options)
    elif options.command == "write":
        writing(options)
    else:
        reading(options)


# --- the driver ------------------------------------------------------------------------------------------------------


def simulated(rows: int) -> Any:
    """A source of so many rows, none of which is read; their columns are not known either."""
    from types import SimpleNamespace

    from vlmdata.preprocess.sources.rows import Source

    nothing: Any = SimpleNamespace(columns=tuple)
    return Source(nothing, range(rows), {"kind": "simulated"}, None)


def driver_memory(options: argparse.Namespace) -> None:
    """Simulates the records of a run whose shards are all made, and measures the process that closes it."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        out = Path(folder) / "out"
        simulate(out, options.shards, options.rows)
        arguments = ["driver", "--inside", str(out), "--shards", str(options.shards), "--rows", str(options.rows)]
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
        print(done.stdout)


def simulate(out: Path, shards: int, rows: int) -> None:
    from dataclasses import replace

    import pyarrow.parquet as pq

    from vlmdata.format.schema import PROGRESS_DIR, shard_name
    from vlmdata.preprocess.chat.tokenizer import load_tokenizer
    from vlmdata.preprocess.config import PreprocessConfig
    from vlmdata.preprocess.shards.fingerprints import run_identity
    from vlmdata.preprocess.shards.job import RUN_FILE, ShardContext, ShardJob, ShardRecord, progress_name, run_shard
    from vlmdata.preprocess.sources.open import open_source
    from vlmdata.storage import open_store

    config = PreprocessConfig(rows_per_shard=rows)
    tokenizer = load_tokenizer(config.tokenizer, None).info
    small = open_source("demo", limit=4)
    store = open_store(out)
    store.prepare(PROGRESS_DIR)
    first = run_shard(ShardJob(0, 0, 4), ShardContext.build(small, config, store, tokenizer))
    # The index rows of four real samples, over and over: as large as real ones, and as hard to compress.
    table = pq.read_table(out / progress_name(0, "parquet"))
    many = table.take([n % table.num_rows for n in range(rows)])
    content = out.parent / "rows.parquet"
    pq.write_table(many, content)
    nothing = out.parent / "nothing"
    nothing.write_bytes(b"")
    (out / first.info.name).unlink()
    for number in range(shards):
        name = shard_name(number)
        info = replace(
            first.info, name=name, row_start=number * rows, row_stop=(number + 1) * rows, samples=rows, bytes=0
        )
        record = ShardRecord(info, replace(first.totals, rows=rows, samples=rows), {}, first.features)
        os.link(nothing, out / name)
        for suffix, source in (("parquet", content), ("jsonl", nothing)):
            path = out / progress_name(number, suffix)
            path.unlink(missing_ok=True)
            os.link(source, path)
        (out / progress_name(number, "json")).write_bytes(record.to_json())
    source = simulated(shards * rows)
    identity = run_identity(config, tokenizer, source.identity, source.times)
    store.put(RUN_FILE, json.dumps(identity, sort_keys=True).encode())


def close_many(out: Path, shards: int, rows: int) -> None:
    """What a driver does for a run whose shards are made: reads their records and closes the dataset."""
    from vlmdata.preprocess.config import PreprocessConfig
    from vlmdata.preprocess.run.dataset import Watcher, preprocess_dataset

    def resident() -> float:
        """Peak of this process, MiB; ru_maxrss would be its parent's, if that was larger."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    before, began, read = resident(), time.monotonic(), [0.0, 0.0]

    def started(*_: Any) -> None:
        read[:] = [time.monotonic() - began, resident()]

    config = PreprocessConfig(rows_per_shard=rows)
    result = preprocess_dataset(simulated(shards * rows), out, config, watcher=Watcher(started=started))
    assert result.kept == shards
    seconds, peak = time.monotonic() - began, resident()
    sizes = {name: (out / name).stat().st_size / 1e6 for name in ("index.parquet", "manifest.json")}
    print("| shards | rows | imports | records read | peak | seconds (records, all) | index | manifest |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {shards:,} | {shards * rows:,} | {before:,.0f} MiB | {read[1]:,.0f} MiB | {peak:,.0f} MiB "
        f"| {read[0]:.0f}, {seconds:.0f} | {sizes['index.parquet']:,.0f} MB | {sizes['manifest.json']:,.1f} MB |"
    )


def _memory() -> str | None:
    """A folder in memory, so that no disk is measured; None if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# --- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def bucket() -> Iterator[Any]:
    """A server with an empty bucket, which this process finds by its environment."""
    from tests.object_store import ObjectStore, serving

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log.txt") as server:
        os.environ.update(server.environment)
        store = ObjectStore(server.endpoint, "benchmark")
        store.file_system().mkdir(store.bucket)
        yield store


def writing(options: argparse.Namespace) -> None:
    """Rows per second of one worker into folders and into the server, in turns: between the first and last shard."""
    from tests.conftest import cord_row, write_cord_parquet
    from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
    from vlmdata.preprocess.run.dataset import Watcher, preprocess_dataset
    from vlmdata.preprocess.sources.open import open_source

    config = PreprocessConfig(image=ImageConfig(1024, 2_000_000), rows_per_shard=8)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder, bucket() as store:
        rows = [cord_row(n, width=1024, height=1024) for n in range(options.rows)]
        source = open_source(str(write_cord_parquet(Path(folder) / "source" / "train.parquet", rows)))
        rates: dict[str, list[float]] = {"disk": [], "memory": [], "s3": []}
        cpu: dict[str, list[float]] = {name: [] for name in rates}
        whole: dict[str, list[float]] = {name: [] for name in rates}
        with tempfile.TemporaryDirectory() as disk:
            places = {"disk": f"{disk}/out", "memory": f"{folder}/out", "s3": f"{store.url}/out"}
            for _ in range(options.rounds + 1):  # the first warms up
                for name, place in places.items():
                    times: list[tuple[float, float]] = []

                    def note(_: Any, times: list[tuple[float, float]] = times) -> None:
                        times.append((time.monotonic(), time.process_time()))

                    began = time.monotonic()
                    preprocess_dataset(source, place, config, overwrite=True, watcher=Watcher(shard_done=note))
                    whole[name].append(time.monotonic() - began)
                    made = (len(times) - 1) * config.rows_per_shard
                    rates[name].append(made / (times[-1][0] - times[0][0]))
                    cpu[name].append((times[-1][1] - times[0][1]) / made * 1000)
        print("| place | rows/s, first to last shard | of memory | CPU ms per row, this process | whole run, s |")
        print("|---|---|---|---|---|")
        best = median(rates["memory"][1:])
        for name, found in rates.items():
            print(
                f"| {name} | {median(found[1:]):.1f} | {median(found[1:]) / best:.2f} | {median(cpu[name][1:]):.0f} "
                f"| {median(whole[name][1:]):.1f} |"
            )


# --- reading ---------------------------------------------------------------------------------------------------------

#: Ranges asked for at the same time.
_AT_ONCE = 16


def reading(options: argparse.Namespace) -> None:
    """What one data-parallel rank fetches in an epoch: whole shards, or the ranges of its samples."""
    from tests.conftest import cord_row, write_cord_parquet
    from vlmdata import open_dataset
    from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
    from vlmdata.preprocess.run.dataset import preprocess_dataset
    from vlmdata.preprocess.sources.open import open_source

    config = PreprocessConfig(image=ImageConfig(1024, 2_000_000), rows_per_shard=8)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder, bucket() as store:
        rows = [cord_row(n, width=640 + 64 * (n % 7), height=1024) for n in range(options.rows)]
        source = open_source(str(write_cord_parquet(Path(folder) / "source" / "train.parquet", rows)))
        place = f"{folder}/out"
        preprocess_dataset(source, place, config)
        url = store.put(Path(place), "out")
        total = open_dataset(place).manifest.totals
        print(f"{total.samples} samples, {total.tokens} tokens, {total.bytes / 1e6:.0f} MB\n")
        print("| ranks | context-parallel | read as | requests | MB | of the rank's share | tokens/s |")
        print("|---|---|---|---|---|---|---|")
        for ranks, parallel in ((1, 1), (4, 1), (16, 1), (4, 4)):
            for row in _compared(place, url, Path(folder), ranks, parallel, options.rounds):
                print(row)


def _compared(place: str, url: str, folder: Path, ranks: int, parallel: int, rounds: int) -> Iterator[str]:
    from vlmdata import StreamingLoader

    layout: dict[str, Any] = {"capacity": 4096, "global_batch": ranks, "dp_rank": 0, "dp_size": ranks}
    if parallel > 1:
        layout |= {"context_parallel": parallel, "context_parallel_rank": 0}
    ways = {"folder": (place, "shards"), "whole shards": (url, "shards"), "ranges": (url, "ranges")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    facts: dict[str, tuple[int, int]] = {}
    tokens = needed = 0
    for _, (name, (where, fetch)) in itertools.product(range(rounds), ways.items()):
        cache = folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        with _counted() as fetched:
            began = time.monotonic()
            with StreamingLoader(where, cache_dir=cache, fetch=fetch, **layout) as loader:
                batches = list(loader)
            seconds[name].append(time.monotonic() - began)
        tokens = sum(int(batch.cu_seqlens[-1]) for batch in batches)
        needed = loader.stats.bytes_read
        fetched += [path.stat().st_size for path in cache.glob("*.tar")]
        facts[name] = len(fetched), sum(fetched)
    for name, found in seconds.items():
        requests, size = facts[name]
        share = f"{size / needed:.1f}" if size else ""
        yield (
            f"| {ranks} | {parallel} | {name} | {requests or ''} | {size / 1e6:.1f} | {share} "
            f"| {tokens / median(found):,.0f} |"
        )


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Notes the bytes of each range that a loader in this process fetches."""
    from vlmdata.storage import download

    sizes: list[int] = []
    read = download.read_ranges

    def noting(*arguments: Any) -> list[bytes]:
        found = read(*arguments)
        sizes.extend(map(len, found))
        return found

    download.read_ranges = noting  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        download.read_ranges = read


if __name__ == "__main__":
    main()
