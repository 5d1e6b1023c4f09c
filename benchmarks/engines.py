"""What an engine costs: Ray with two workers over local with two, its start, and the driver's memory for many shards.

Usage: ``python benchmarks/engines.py [--rounds 3] [--rows 192] [--rows-per-shard 8]``. Rounds are interleaved. A rate
is that of all shards after the first wave, in which every worker has prepared itself and made a shard.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# benchmarks/preprocess.py has the name of a package; Ray adds the folder of sys.argv[0] to the path of its workers.
sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.argv[0] = str(Path(__file__).resolve().parents[1] / "benchmark")

from benchmarks.hardware import hardware
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.engines.base import load_engine
from vlmdata.preprocess.run.dataset import Watcher, preprocess_dataset
from vlmdata.preprocess.shards.counters import Counters
from vlmdata.preprocess.shards.job import ShardRecord, plan_shards
from vlmdata.preprocess.sources.open import open_source

WORKERS = 2
#: 10 M rows.
MANY_SHARDS, ROWS_OF_MANY = 40_000, 250


def main() -> None:
    """Prints all values as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--rows-per-shard", type=int, default=8)
    options = parser.parse_args()
    open_source("demo", limit=options.rows)  # drawn once
    values: dict[str, list[tuple[float, float]]] = {"local": [], "ray": []}
    records: list[ShardRecord] = []
    for _ in range(options.rounds):
        for name, found in values.items():
            found.append(timed(name, options.rows, options.rows_per_shard, records))
    rates = {name: statistics.median(rate for _, rate in found) for name, found in values.items()}
    ratios = [ray / local for (_, local), (_, ray) in zip(values["local"], values["ray"], strict=True)]
    told = {
        "rounds": {name: [[round(each, 3) for each in pair] for pair in found] for name, found in values.items()},
        "seconds_to_first_wave": {name: statistics.median(s for s, _ in found) for name, found in values.items()},
        "rows_per_second": rates,
        "ray_over_local": statistics.median(ratios),
        "ray_over_local_rounds": ratios,
        "driver": memory_of_many(records[-1]),
        "hardware": hardware("ray", "torch"),
    }
    print(json.dumps(told, indent=2))


def timed(name: str, rows: int, rows_per_shard: int, records: list[ShardRecord]) -> tuple[float, float]:
    """Seconds until the first wave of shards is made, and rows per second after it."""
    ends: list[float] = []

    def done(record: ShardRecord) -> None:
        ends.append(time.monotonic())
        records.append(record)

    source, config = open_source("demo", limit=rows), PreprocessConfig(rows_per_shard=rows_per_shard)
    with tempfile.TemporaryDirectory() as folder:
        begun, watcher = time.monotonic(), Watcher(shard_done=done)
        out = Path(folder) / "out"
        preprocess_dataset(source, out, config, workers=WORKERS, engine=load_engine(name), watcher=watcher)
    if name == "ray":
        import ray

        ray.shutdown()
    return ends[WORKERS - 1] - begun, (rows - WORKERS * rows_per_shard) / (ends[-1] - ends[WORKERS - 1])


def memory_of_many(record: ShardRecord) -> dict[str, Any]:
    """What the driver keeps of 40,000 shards, and how long reading their records takes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text, begun = record.to_json(), time.monotonic()
    jobs, counters = plan_shards(MANY_SHARDS * ROWS_OF_MANY, ROWS_OF_MANY), Counters(MANY_SHARDS)
    kept = [ShardRecord.from_json(text) for _ in jobs]
    for job, each in zip(jobs, kept, strict=True):
        counters.finish(job.number, each)
    seconds = time.monotonic() - begun
    manifest = json.dumps([dataclasses.asdict(each.info) for each in kept], indent=2)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "shards": len(kept),
        "rows": counters.sum().rows,
        "bytes_of_a_record": len(text),
        "mb": (after - before) / 1024,
        "seconds": seconds,
        "manifest_mb": len(manifest) / 1e6,
    }


if __name__ == "__main__":
    main()
