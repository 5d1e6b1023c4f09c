"""Preprocessing by two versions of vlmdata and its floor, in turn: CPU time per image, memory, and the bytes of shards.

    git worktree add /tmp/before SOME_COMMIT
    python benchmarks/preprocess_pairs.py /tmp/before .

The floor is what cannot be left out: decoding with the fastest exact decoder (torchvision's for JPEG, Pillow's for PNG)
and resizing, in one thread, with memory kept between images. A worker does all of its job and writes real shards. The
images are receipts: the demo's, or the rows of --receipts. Scans are enlarged to 5.7
megapixels. Each way runs in a process of its own, in turn in each repeat. Numbers are medians over the repeats, ratios
medians of ratios within a repeat. Times are of the CPU, as the machine may be shared. Shards of both versions must be
equal.
Writes benchmarks/results/preprocess-pairs-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware

sys.path.pop(0)  # one of the files here has the name of a package

RESULTS = Path(__file__).resolve().parent / "results"
_SCAN_PIXELS = 5_700_000

#: Each program prints JSON: CPU seconds per image, and of a worker the peak memory in MiB and the checksum of a shard.
WORKER = """
import json, resource, sys, time
from hashlib import sha256
from pathlib import Path
import torch
from preprocess.chat.tokenizer import load_tokenizer
from preprocess.config import PreprocessConfig
from preprocess.shards.job import ShardContext, ShardJob, run_shard
from preprocess.sources.open import open_source
from vlmdata.format.schema import PROGRESS_DIR
from vlmdata.storage.folder import Folder
try:
    from vlmdata.media.c_library import keep_memory
except ImportError:  # the version before
    pass
else:
    keep_memory()
torch.set_num_threads(1)
rows, out, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
(out / PROGRESS_DIR).mkdir(parents=True)
source, config = open_source(rows), PreprocessConfig()
context = ShardContext.build(source, config, Folder(out), load_tokenizer(config.tokenizer, None).info)
best = float("inf")
for number in range(rounds + 1):
    begun = time.process_time()
    run_shard(ShardJob(number, 0, source.num_rows), context)
    if number:  # the first one warms the process
        best = min(best, time.process_time() - begun)
    shard = next(out.glob("*.tar"))
    made = sha256(shard.read_bytes()).hexdigest()
    shard.unlink()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({"seconds": best / source.num_rows, "peak_mib": peak, "sha256": made}))
"""
FLOOR = """
import ctypes, io, json, sys, time, warnings
import numpy as np, pyarrow.parquet as pq, torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional
from vlmdata.families.qwen3_5 import FAMILY
for setting in (-1, -3):
    ctypes.CDLL(None).mallopt(setting, 2**30)
Image.core.set_block_size(2**28)
torch.set_num_threads(1)
warnings.simplefilter("ignore")
files = [row["bytes"] for row in pq.read_table(sys.argv[1]).column("image").to_pylist()]
def decoded(file):
    if file.startswith(b"\\xff\\xd8"):
        return decode_jpeg(torch.frombuffer(file, dtype=torch.uint8), ImageReadMode.RGB)
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(file)))).permute(2, 0, 1)
best = float("inf")
for number in range(int(sys.argv[3]) + 1):
    begun = time.process_time()
    for file in files:
        image = decoded(file)
        size = FAMILY.image_size(*image.shape[1:], FAMILY.min_pixels, FAMILY.max_pixels)
        functional.resize(image, size, interpolation=functional.InterpolationMode.BICUBIC, antialias=True)
    if number:
        best = min(best, time.process_time() - begun)
print(json.dumps({"seconds": best / len(files)}))
"""
WAYS = ("floor", "before", "after")


def make_rows(work: Path, receipts: str, images: int) -> dict[str, Path]:
    """The same receipts as enlarged scans, as photographs and as PNG files."""
    import datasets
    from PIL import Image

    datasets.disable_progress_bars()
    from preprocess.sources.open import open_source

    drawn = open_source(receipts, limit=images)
    kinds: dict[str, dict[str, Any]] = {
        "large scans": {"format": "JPEG", "quality": 88},
        "photographs": {"format": "JPEG", "quality": 90},
        "PNG": {"format": "PNG", "compress_level": 6},
    }
    made = {}
    for kind, options in kinds.items():
        rows = []
        for number in range(min(images, drawn.num_rows)):
            row, buffer = drawn.row(number).values, io.BytesIO()
            image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
            if kind == "large scans":
                scale = (_SCAN_PIXELS / (image.width * image.height)) ** 0.5
                image = image.resize((round(image.width * scale), round(image.height * scale)))
            image.save(buffer, **options)
            rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "ground_truth": row["ground_truth"]})
        made[kind] = work / f"{kind.replace(' ', '-')}.parquet"
        features = datasets.Features({"image": datasets.Image(decode=False), "ground_truth": datasets.Value("string")})
        columns = {name: [row[name] for row in rows] for name in features}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(str(made[kind]))
    return made


def run(way: str, version: Path, rows: Path, rounds: int) -> dict[str, Any]:
    """What one way takes, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        program = FLOOR if way == "floor" else WORKER
        command = [sys.executable, "-c", program, str(rows), out, str(rounds)]
        environment = {**os.environ, "PYTHONPATH": str(version), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=out, env=environment)
    if done.returncode:
        raise SystemExit(f"{way}, {version}: exit code {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rows: Path, versions: dict[str, Path], repeats: int, rounds: int) -> dict[str, Any]:
    """Numbers of one kind of files."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            found[way].append(run(way, versions.get(way, versions["after"]), rows, rounds))
    seconds = {way: [each["seconds"] for each in found[way]] for way in WAYS}
    shards = {each["sha256"] for way in ("before", "after") for each in found[way]}
    return {
        "milliseconds": {way: 1e3 * median(seconds[way]) for way in WAYS},
        "before_over_after": median(b / a for b, a in zip(seconds["before"], seconds["after"], strict=True)),
        "floor_over_after": median(f / a for f, a in zip(seconds["floor"], seconds["after"], strict=True)),
        "peak_mib": {way: max(each["peak_mib"] for each in found[way]) for way in ("before", "after")},
        "equal_shards": len(shards) == 1,
        "all_seconds": seconds,
    }


def report(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    machine = results["hardware"]
    lines = [
        f"# Preprocessing before and after, {results['date']}",
        "",
        f"`{results['command']}` on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; load "
        f"{machine['load_average']} at the start; torch {machine['torch']}, torchvision {machine['torchvision']}, "
        f"Pillow {machine['pillow']}. CPU time per image, medians over {results['repeats']} repeats, "
        f"{results['images']} receipts of each kind, codec raw. Peak memory of a worker before and after.",
        "",
        "| files | floor, ms | before, ms | after, ms | before / after | floor / after | peak MiB | shards |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, found in results["kinds"].items():
        times = " | ".join(f"{found['milliseconds'][way]:.1f}" for way in WAYS)
        peaks = f"{found['peak_mib']['before']}, {found['peak_mib']['after']}"
        same = "equal" if found["equal_shards"] else "**different**"
        lines.append(
            f"| {kind} | {times} | **{found['before_over_after']:.2f}** | {found['floor_over_after']:.2f} (aim 0.75) "
            f"| {peaks} | {same} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="Checkout of the first version.")
    parser.add_argument("after", type=Path, help="Checkout of the second version.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a process, of which the best counts")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--receipts", default="demo", help="A source with the columns of CORD-V2.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    versions = {"before": given.before.resolve(), "after": given.after.resolve()}
    with tempfile.TemporaryDirectory() as work:
        rows = make_rows(Path(work), given.receipts, given.images)
        machine = hardware("torch", "torchvision", "pillow")
        kinds = {kind: measure(path, versions, given.repeats, given.rounds) for kind, path in rows.items()}
    results = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/preprocess_pairs.py BEFORE AFTER --repeats {given.repeats} "
        f"--rounds {given.rounds} --images {given.images}" + (" --receipts REAL" if given.receipts != "demo" else ""),
        "hardware": machine,
        "images": given.images,
        "repeats": given.repeats,
        "kinds": kinds,
    }
    text = report(results)
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    stem = given.out / f"preprocess-pairs-{results['date']}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
