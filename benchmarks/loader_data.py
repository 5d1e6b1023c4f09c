"""Data for benchmarks/loader.py: real shards made by the real command, and a dataset of a million samples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index_row import INDEX_SCHEMA
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME, TOKENIZER_DIR, sample_key, shard_name

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def source_named(name: str) -> str | None:
    """A real source's folder; None where it is absent."""
    return str(SHARED / name) if (SHARED / name).is_dir() else None


def preprocess(source: str, out: Path, *options: str) -> Path:
    """Runs ``vlmdata preprocess`` with the embedded tokenizer; does nothing if the dataset is there.

    A few hundred rows are one shard, which :func:`copies` and :func:`repeated` need.
    """
    tokenizer = ("--tokenizer", "embedded")
    if "--rows-per-shard" not in options:
        options = (*options, "--rows-per-shard", "256")
    command = [str(Path(sys.executable).parent / "vlmdata"), "preprocess", source, "--out", str(out), "-j", "1"]
    done = subprocess.run([*command, *tokenizer, *options], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join([*command, *tokenizer, *options])}: exit code {done.returncode}\n{done.stderr}")
    return out


def copies(dataset: Path, count: int) -> list[Path]:
    """Copies of a dataset's only shard: bytes of their own in the page cache."""
    made = []
    for i in range(count):
        made.append(dataset.with_name(f"{dataset.name}-{i}.tar"))
        shutil.copyfile(dataset / shard_name(0), made[-1])
    return made


def short_chats(work: Path, rows: int = 2000) -> Path:
    """A text-only dataset of short chats, in one shard."""
    drawn = random.Random(0)
    words = [f"word{i}" for i in range(20)]

    def text(typical: float) -> str:
        return " ".join(drawn.choices(words, k=min(int(drawn.lognormvariate(typical, 0.8)) + 1, 300)))

    lines = []
    for _ in range(rows):
        messages = [{"role": "user", "content": text(2.6)}, {"role": "assistant", "content": text(3.0)}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    source = work / "chats.jsonl"
    source.write_text("".join(lines))
    return preprocess(str(source), work / "chats", "--recipe", "chat", "--rows-per-shard", str(rows))


def repeated(dataset: Path, times: int, out: Path, files: Sequence[Path] = ()) -> Path:
    """A dataset that lists another's only shard many times under many names, with all the index rows.

    The names are links to that shard, or to copies of it in turn.
    """
    if (out / MANIFEST_NAME).exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    manifest, n = VlmDataset(dataset).manifest, len(VlmDataset(dataset))
    assert len(manifest.shards) == 1
    table = pq.read_table(dataset / INDEX_NAME).select(INDEX_SCHEMA.names).combine_chunks()
    rows = np.arange(n * times)
    columns = {name: pa.concat_arrays([table.column(name).chunk(0)] * times) for name in table.column_names}
    columns["key"] = pa.array([sample_key(row) for row in rows.tolist()])
    columns["source_row"] = pa.array(rows)
    columns["shard"] = pa.array((rows // n).astype(np.int32))
    pq.write_table(pa.table(columns, schema=INDEX_SCHEMA), out / INDEX_NAME)
    shards = []
    for i in range(times):
        one = manifest.shards[0]
        shards.append(dataclasses.replace(one, name=shard_name(i), row_start=i * n, row_stop=(i + 1) * n))
        (out / shard_name(i)).unlink(missing_ok=True)
        (out / shard_name(i)).symlink_to((files[i % len(files)] if files else dataset / one.name).resolve())
    totals = {field.name: getattr(manifest.totals, field.name) * times for field in dataclasses.fields(manifest.totals)}
    shutil.copytree(dataset / TOKENIZER_DIR, out / TOKENIZER_DIR, dirs_exist_ok=True)
    manifest = dataclasses.replace(
        manifest,
        shards=tuple(shards),
        totals=dataclasses.replace(manifest.totals, **totals),
        index_sha256=hashlib.sha256((out / INDEX_NAME).read_bytes()).hexdigest(),
    )
    (out / MANIFEST_NAME).write_bytes(manifest.to_json())
    return out
