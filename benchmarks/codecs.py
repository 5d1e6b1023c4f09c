"""Codecs of pixels: bytes against the source, speed of preprocessing, loading, checking and recoding, memory.

    pip install 'vlmdata[bench]'
    python benchmarks/codecs.py              # some minutes
    python benchmarks/codecs.py --quick      # one round, to see that it runs
    python benchmarks/codecs.py --only loading,workers    # the other sections are kept from the day's result

Data: the real receipts (../shared/data/receipts_real; the drawn demo where they are absent), and the colour photographs
that scikit-image ships, each whole and cropped, brought to about a million pixels and saved as JPEG of quality 90. The
floor of preprocessing is decoding the same files with Pillow and resizing them with torchvision in one thread. On the
fly is what a training step without preprocessing does: decode, transformers' processor and tokenizer, one thread.

Ways that are compared run in turn, in every round; numbers are medians over rounds, ratios medians of the ratios within
a round. CPU time, that of workers included, stands beside the clock: on a busy machine it is the fairer measure.
PyTorch runs with one thread. Shards are in the page cache.
Writes benchmarks/results/codecs-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from codecs_report import report
from hardware import hardware
from loader import Clock, on_the_fly, samples_per_s
from loader_data import preprocess, source_named

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np
import psutil
import torch
from PIL import Image

from vlmdata import StreamingLoader, open_dataset
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.media.codecs import REGISTRY
from vlmdata.media.resize import resize_image
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.preprocess.shards.job import PROGRESS_DIR, ShardContext, ShardJob, run_shard
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage.folder import Folder

RESULTS = Path(__file__).resolve().parent / "results"
COMMAND = str(Path(sys.executable).parent / "vlmdata")
CODECS = tuple(REGISTRY)
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "retina", "rocket")
#: Of a photograph.
PIXELS = 1_000_000
#: Packs of 8 receipts that are timed: enough for a second or so.
BATCHES = {"raw": 120, "zstd": 60, "jxl": 10, "source": 8}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--work", type=Path, help="where data is made, and found again; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    only = ", ".join(SECTIONS)
    parser.add_argument("--only", help=f"sections to measure ({only}); the others are kept from the day's result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    date = datetime.date.today().isoformat()
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"codecs-{date}"
    sections = options.only.split(",") if options.only else list(SECTIONS)
    results: Row = json.loads(stem.with_suffix(".json").read_text()) if options.only else {"conditions": {}}
    results |= {"date": date, "codecs": list(CODECS)}
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        measure(results, sections, work, 1 if options.quick else 3)
    text = report(results)
    print(text)
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)


def measure(results: Row, sections: list[str], work: Path, rounds: int) -> None:
    """Measures some sections, and replaces them in the results."""
    sources = {"receipts": source_named("receipts_real") or "demo", "photographs": str(photographs(work))}
    data = {name: datasets_of(source, work / name) for name, source in sources.items()}
    results["hardware"] = hardware("torch", "torchvision", "pillow", "pyarrow", "numpy", "transformers", "scikit-image")
    results["hardware"].pop("load_average")
    for section in sections:
        load = os.getloadavg()[0]
        results[section] = SECTIONS[section](sources, data, work, rounds)
        loads = [round(load, 1), round(os.getloadavg()[0], 1)]
        results["conditions"][section] = {"rounds": rounds, "load_average": loads}


def note(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# --- data ------------------------------------------------------------------------------------------------------


def photographs(work: Path) -> Path:
    """Rows of the CORD-V2 layout with photographs."""
    path = work / "photographs.parquet"
    if path.exists():
        return path
    import datasets
    import skimage.data

    rows = []
    for name in PHOTOGRAPHS:
        picture = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
        width, height = picture.size
        for box in ((0, 0, width, height), (width // 8, height // 8, width * 5 // 8, height * 5 // 8)):
            cut = picture.crop(box)
            scale = (PIXELS / (cut.width * cut.height)) ** 0.5
            enlarged = cut.resize((round(cut.width * scale), round(cut.height * scale)), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            enlarged.save(buffer, format="JPEG", quality=90)
            truth = json.dumps({"gt_parse": {"name": name, "box": list(box)}})
            rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "ground_truth": truth})
    features = datasets.Features({"image": datasets.Image(decode=False), "ground_truth": datasets.Value("string")})
    columns = {name: [row[name] for row in rows] for name in features}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path))
    return path


def datasets_of(source: str, work: Path) -> dict[str, Path]:
    """The source preprocessed under every codec."""
    work.mkdir(parents=True, exist_ok=True)
    limit = ("--limit", "53") if source == "demo" else ()
    made = {}
    for name in CODECS:
        note(f"{work.name} as {name}")
        made[name] = work / name
        if not (made[name] / "manifest.json").exists():
            preprocess(source, made[name], "--recipe", "cord_v2", "--pixels", name, *limit)
    return made


def files_of(source: Source) -> list[bytes]:
    return [source.row(n).values["image"]["bytes"] for n in range(source.num_rows)]


def sizes(source: str, data: dict[str, Path]) -> Row:
    """Bytes of image files, and of the items that they are stored as."""
    files = files_of(open_source(source, limit=53))
    stored = {name: int(open_dataset(path).index.item_bytes.sum()) for name, path in data.items()}
    return {"images": len(files), "files": sum(map(len, files)), "stored": stored}


# --- preprocessing ---------------------------------------------------------------------------------------------


def preprocessing(spec: str, work: Path, rounds: int) -> Row:
    """Images per second of the floor and of one worker under each codec, in turn."""
    source = open_source(spec, limit=53)
    ways = {"floor": floor_of(source)} | {name: worker_of(source, work / f"shards-{name}", name) for name in CODECS}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        note(f"preprocessing {work.name} {number}/{rounds}")
        for name, way in ways.items():
            clock = Clock()
            way()
            if number:  # the first round warms caches
                found[name].append(clock.rates(source.num_rows))
            for shard in work.glob("shards-*/*.tar"):
                shard.unlink()  # outside the clock; see worker_of in benchmarks/preprocess.py
    return compared(found, "floor")


def compared(found: dict[str, list[tuple[float, float]]], base: str) -> Row:
    """Medians of rates by the clock and by CPU time, and of their ratios to a way of the same round."""
    return {
        name: {
            "per_s": median(wall for wall, _ in rates),
            "per_cpu_s": median(cpu for _, cpu in rates),
            "ratio": median(a / b for (a, _), (b, _) in zip(rates, found[base], strict=True)),
            "cpu_ratio": median(a / b for (_, a), (_, b) in zip(rates, found[base], strict=True)),
        }
        for name, rates in found.items()
    }


def floor_of(source: Source) -> Callable[[], None]:
    files = files_of(source)

    def run() -> None:
        for data in files:
            pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
            resize_image(pixels, *FAMILY.image_size(*pixels.shape[:2], FAMILY.min_pixels, FAMILY.max_pixels))

    return run


def worker_of(source: Source, directory: Path, pixels: str) -> Callable[[], None]:
    (directory / PROGRESS_DIR).mkdir(parents=True, exist_ok=True)
    config = PreprocessConfig(pixels=pixels)
    expected = load_tokenizer(config.tokenizer, config.tokenizer_revision).info
    context = ShardContext.build(source, config, Folder(directory), expected)
    numbers = itertools.count()

    def run() -> None:
        run_shard(ShardJob(next(numbers), 0, source.num_rows), context)

    return run


# --- loading ---------------------------------------------------------------------------------------------------


def open_loader(path: Path, **options: Any) -> StreamingLoader:
    return StreamingLoader(path, **{"capacity": 8192, "global_batch": 1, **options})


def loading(source: str, data: dict[str, Path], rounds: int) -> Row:
    """Samples per second of the loader in this process under each codec, and of the processor on the fly."""
    prepare, formats = on_the_fly(source, data["raw"])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("on_the_fly", *CODECS)}
    for number in range(rounds):
        note(f"loading {Path(source).stem} {number + 1}/{rounds}")
        clock = Clock()
        found["on_the_fly"].append(clock.rates(sum(1 for _ in prepare())))
        for name, path in data.items():
            with open_loader(path) as loader:
                found[name].append(samples_per_s(loader, BATCHES[name]))
    index = open_dataset(data["raw"]).index
    rows: Row = {"formats": formats, "tokens_per_sample": float(index.lengths.mean())}
    rows["of_on_the_fly"], rows["of_raw"] = compared(found, "on_the_fly"), compared(found, "raw")
    return rows


def workers(data: dict[str, Path], rounds: int) -> Row:
    """Samples per second with one and two worker processes."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {name: {1: [], 2: []} for name in CODECS}
    for number in range(rounds):
        note(f"workers {number + 1}/{rounds}")
        for name, path in data.items():
            for count, rates in found[name].items():
                with open_loader(path, num_workers=count) as loader:
                    rates.append(samples_per_s(loader, count * BATCHES[name]))
    return {
        name: {
            "one_per_s": median(wall for wall, _ in rates[1]),
            "two_per_s": median(wall for wall, _ in rates[2]),
            "two_over_one": median(two / one for (one, _), (two, _) in zip(rates[1], rates[2], strict=True)),
        }
        for name, rates in found.items()
    }


def checking(data: dict[str, Path], rounds: int) -> Row:
    """CPU milliseconds per sample under each codec and each check."""
    checks = ("off", "stored", "pixels")
    found: dict[str, dict[str, list[float]]] = {name: {check: [] for check in checks} for name in CODECS}
    for number in range(rounds):
        note(f"checking {number + 1}/{rounds}")
        for name, path in data.items():
            for check in checks:
                with open_loader(path, verify=check) as loader:
                    found[name][check].append(1000 / samples_per_s(loader, BATCHES[name])[1])
    return {name: {check: median(times) for check, times in each.items()} for name, each in found.items()}


# --- recoding, memory ------------------------------------------------------------------------------------------


def recoding(data: dict[str, Path], work: Path, rounds: int) -> Row:
    """Images per second of recoding from raw and to raw, one worker."""
    pairs = [("raw", name) for name in CODECS if name not in ("raw", "source")]
    pairs += [(name, "raw") for name in CODECS if name != "raw"]
    images = len(open_dataset(data["raw"]).index.grids)
    found: dict[str, list[tuple[float, float]]] = {f"{was} to {new}": [] for was, new in pairs}
    for number in range(rounds):
        note(f"recoding {number + 1}/{rounds}")
        for was, new in pairs:
            clock = Clock()
            recode_dataset(data[was], work / "recoded", new, overwrite=True)
            found[f"{was} to {new}"].append(clock.rates(images))
    return {
        name: {"per_s": median(wall for wall, _ in rates), "per_cpu_s": median(cpu for _, cpu in rates)}
        for name, rates in found.items()
    }


def memory(source: str, data: dict[str, Path], work: Path) -> Row:
    """Peak resident MiB of preprocessing and of recoding (one worker each), and of a loader's worker."""
    found: Row = {}
    for name in CODECS:
        note(f"memory {name}")
        options = [
            "--recipe",
            "cord_v2",
            "--tokenizer",
            "embedded",
            "-j",
            "1",
            "--limit",
            "53",
            "--overwrite",
        ]
        made = peak(COMMAND, "preprocess", source, "--out", str(work / "peak"), "--pixels", name, *options)
        found[name] = {"preprocess": made, "loader_worker": worker_peak(data[name], BATCHES[name])}
        if name not in ("raw", "source"):
            out = ["--out", str(work / "peak"), "-j", "1", "--overwrite"]
            found[name]["recode"] = peak(COMMAND, "recode", str(data["raw"]), "--pixels", name, *out)
    return found


def peak(*command: str) -> int:
    """Peak resident MiB of a command."""
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    return int(done.stdout) // 1024


def worker_peak(path: Path, batches: int) -> int:
    """Largest sum of private and shared memory that a worker of the loader ever had resident, MiB."""
    with open_loader(path, num_workers=1) as loader:
        samples_per_s(loader, batches)
        peaks = []
        for child in psutil.Process().children(recursive=True):
            status = Path(f"/proc/{child.pid}/status").read_text()
            peaks += [int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM")]
        return max(peaks, default=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)


#: What is measured, from (sources, datasets, folder, rounds), by its name in the results.
SECTIONS: dict[str, Callable[[dict[str, str], dict[str, dict[str, Path]], Path, int], Row]] = {
    "bytes": lambda sources, data, work, rounds: {name: sizes(sources[name], found) for name, found in data.items()},
    "preprocessing": lambda sources, data, work, rounds: {
        name: preprocessing(source, work / name, rounds) for name, source in sources.items()
    },
    "loading": lambda sources, data, work, rounds: {
        name: loading(sources[name], found, rounds) for name, found in data.items()
    },
    "workers": lambda sources, data, work, rounds: workers(data["receipts"], rounds),
    "checking": lambda sources, data, work, rounds: checking(data["receipts"], rounds),
    "recoding": lambda sources, data, work, rounds: recoding(data["receipts"], work, rounds),
    "memory": lambda sources, data, work, rounds: memory(sources["receipts"], data["receipts"], work),
}

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
