"""Preprocessing by two versions of vlmdata and its floor, in turn: CPU time per image, memory, and the bytes of shards.

    git worktree add /tmp/before SOME_COMMIT
    python benchmarks/preprocess_pairs.py /tmp/before .

The floor is what cannot be left out: decoding with the fastest exact decoder (torchvision's for JPEG, Pillow's for PNG)
and resizing, in one thread, with memory kept between images. A worker does all of its job and writes real shards. The
images are receipts: the demo's, or the rows of --receipts. Scans are enlarged to 5.7
megapixels. Each way has a process of its own, which does a round whenever it is told the rows, so the ways take turns
within seconds. Numbers are medians over the rounds, ratios medians of the ratios within a round. Times are of the CPU,
as the machine may be shared. Shards of both versions must be equal.
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

#: Each program prints JSON for each line of rows: CPU seconds per image; a worker also its peak memory in MiB and the
#: checksum of the shard.
WORKER = """
import json, resource, sys, time
from hashlib import sha256
from pathlib import Path
import torch
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.shards.job import ShardContext, ShardJob, run_shard
from vlmdata.preprocess.sources.open import open_source
from vlmdata.format.schema import PROGRESS_DIR
from vlmdata.storage.folder import Folder
try:
    from vlmdata.media.c_library import keep_memory
except ImportError:  # the version before
    pass
else:
    keep_memory()
torch.set_num_threads(1)
contexts, number = {}, 0
for line in sys.stdin:
    rows = Path(line.strip())
    if rows not in contexts:
        out = Path(sys.argv[1], rows.stem)
        (out / PROGRESS_DIR).mkdir(parents=True)
        source, config = open_source(str(rows)), PreprocessConfig()
        contexts[rows] = ShardContext.build(source, config, Folder(out), load_tokenizer(config.tokenizer, None).info)
    images, number = contexts[rows].source.num_rows, number + 1
    begun = time.process_time()
    run_shard(ShardJob(number, 0, images), contexts[rows])
    seconds = (time.process_time() - begun) / images
    shard = next(Path(sys.argv[1], rows.stem).glob("*.tar"))
    made = sha256(shard.read_bytes()).hexdigest()
    shard.unlink()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"seconds": seconds, "peak_mib": peak, "sha256": made}), flush=True)
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
def decoded(file):
    if file.startswith(b"\\xff\\xd8"):
        return decode_jpeg(torch.frombuffer(file, dtype=torch.uint8), ImageReadMode.RGB)
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(file)))).permute(2, 0, 1)
for line in sys.stdin:
    files = [row["bytes"] for row in pq.read_table(line.strip()).column("image").to_pylist()]
    begun = time.process_time()
    for file in files:
        image = decoded(file)
        size = FAMILY.image_size(*image.shape[1:], FAMILY.min_pixels, FAMILY.max_pixels)
        functional.resize(image, size, interpolation=functional.InterpolationMode.BICUBIC, antialias=True)
    print(json.dumps({"seconds": (time.process_time() - begun) / len(files)}), flush=True)
"""
WAYS = ("floor", "before", "after")


def make_rows(work: Path, receipts: str, images: int) -> dict[str, Path]:
    """The same receipts as enlarged scans, as photographs and as PNG files."""
    import datasets
    from PIL import Image

    datasets.disable_progress_bars()
    from vlmdata.preprocess.sources.open import open_source

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


class Way:
    """A process that does a round for each line of rows."""

    def __init__(self, program: str, version: Path, work: Path):
        environment = {**os.environ, "PYTHONPATH": str(version), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program, str(work)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        work.mkdir()
        self.process = subprocess.Popen(command, text=True, cwd=work, env=environment, **pipes)

    def round(self, rows: Path) -> dict[str, Any]:
        """What a round took."""
        self.process.stdin.write(f"{rows}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with exit code {self.process.wait()}")
        return json.loads(line)


def measure(ways: dict[str, Way], rows: Path, rounds: int) -> dict[str, Any]:
    """Numbers of one kind of files."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took = way.round(rows)
            if number:  # the first one warms the process
                found[name].append(took)
    seconds = {way: [each["seconds"] for each in found[way]] for way in ways}
    numbers = zip(*(found[way] for way in ("before", "after")), strict=True)
    return {
        "milliseconds": {way: 1e3 * median(seconds[way]) for way in ways},
        "before_over_after": median(b / a for b, a in zip(seconds["before"], seconds["after"], strict=True)),
        "floor_over_after": median(f / a for f, a in zip(seconds["floor"], seconds["after"], strict=True)),
        "peak_mib": {way: found[way][-1]["peak_mib"] for way in ("before", "after")},
        "equal_shards": all(before["sha256"] == after["sha256"] for before, after in numbers),
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
        f"Pillow {machine['pillow']}. CPU time per image, medians over {results['rounds']} rounds, "
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--receipts", default="demo", help="A source with the columns of CORD-V2.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    versions = {"before": given.before.resolve(), "after": given.after.resolve()}
    with tempfile.TemporaryDirectory() as work:
        rows = make_rows(Path(work), given.receipts, given.images)
        machine = hardware("torch", "torchvision", "pillow")
        ways = {"floor": Way(FLOOR, versions["after"], Path(work, "floor"))}
        ways |= {name: Way(WORKER, version, Path(work, name)) for name, version in versions.items()}
        kinds = {kind: measure(ways, path, given.rounds) for kind, path in rows.items()}
        for way in ways.values():
            way.process.communicate()
    results = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/preprocess_pairs.py BEFORE AFTER --rounds {given.rounds} --images {given.images}"
        + (" --receipts REAL" if given.receipts != "demo" else ""),
        "hardware": machine,
        "images": given.images,
        "rounds": given.rounds,
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
