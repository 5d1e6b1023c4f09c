"""How much faster `vlmdata retokenize` makes shards than `vlmdata preprocess`, in one run.

    python benchmarks/retokenize.py --rows 64

Of two sources: drawn receipts, whose answers are long lists; and photographs of 12 megapixels as a telephone makes them
(JPEG of smooth noise), each with a question and a short answer. One worker in this process. For each codec, three ways
make the same shards with another system prompt, in turn in each round: preprocessing the source, retokenizing with the
source, and retokenizing with kept conversations. The first shard of each is not timed: it loads the tokenizer. Times
are CPU time; ratios are medians of those within a round. Writes retokenize-<date>.md under --out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image

from benchmarks.hardware import hardware
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.retokenize.run import old_config, retokenize_dataset
from vlmdata.preprocess.run.dataset import Watcher, preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store

ROWS_PER_SHARD = 16
#: Height and width of a photograph.
PHOTOGRAPH = (3000, 4000)
PROMPT = "You read receipts."
WAYS = ("preprocess", "retokenize, source", "retokenize, kept conversations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", default=["raw", "zstd"])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    lines = [
        f"# Retokenizing, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/retokenize.py --rows {options.rows} --rounds {options.rounds}` at the default bounds, one "
        "worker, CPU time. Shards that are made again from the source were compared with those of preprocessing.",
        "",
        str(hardware("torch", "tokenizers")),
        "",
        f"| source | codec | {' | '.join(f'{way}, rows/s' for way in WAYS)} | source / preprocess | kept / preprocess "
        "|",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        sources = {"receipts": "demo", "photographs": str(photographs(Path(folder), options.rows))}
        for (name, spec), codec in product(sources.items(), options.codecs):
            place = Path(folder, f"{name}-{codec}")
            lines.append(f"| {name} {measured(spec, codec, place, options.rows, options.rounds)}")
            shutil.rmtree(place)
    text = "\n".join(lines) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"retokenize-{datetime.date.today().isoformat()}.md").write_text(text)
    print(text)


def photographs(folder: Path, rows: int) -> Path:
    """A source of rows with a photograph each."""
    for number in range(rows):
        random = np.random.default_rng(number)
        rough = Image.fromarray(random.integers(0, 256, (300, 400, 3), np.uint8))
        rough.resize(PHOTOGRAPH[::-1], Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
    talk = [{"role": "user", "content": "<image>What is this?"}, {"role": "assistant", "content": "Colours."}]
    lines = [json.dumps({"messages": talk, "images": [f"{number}.jpg"]}) for number in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def measured(spec: str, codec: str, folder: Path, rows: int, rounds: int) -> str:
    """The line of a source and codec."""
    recipe = "cord_v2" if spec == "demo" else "chat"
    source = open_source(spec, limit=rows)
    kept = PreprocessConfig(recipe=recipe, pixels=codec, rows_per_shard=ROWS_PER_SHARD, keep_conversations=True)
    plain = replace(kept, keep_conversations=False)
    for name, config in (("plain", plain), ("kept", kept)):
        preprocess_dataset(source, folder / name, config)
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        prompted = replace(plain, system_prompt=PROMPT)
        made = [
            (WAYS[0], lambda watcher, c=prompted: preprocess_dataset(source, folder / "0", c, watcher=watcher)),
            (WAYS[1], lambda watcher: again(folder / "plain", folder / "1", source, watcher)),
            (WAYS[2], lambda watcher: again(folder / "kept", folder / "2", None, watcher)),
        ]
        for number, (way, make) in enumerate(made):
            speeds[way].append(speed(make))
            out = open_store(folder / str(number))
            hashes = [shard.sha256 for shard in Manifest.read(folder / str(number)).shards]
            if number == 0:
                expected = hashes
            elif number == 1:
                assert hashes == expected, "not the bytes of preprocessing"
            out.delete(out.listing().keys() - {"tokenizer"})
            out.delete_folder("tokenizer")
    medians = [statistics.median(speeds[way]) for way in WAYS]
    ratios = [
        statistics.median(one / base for one, base in zip(speeds[way], speeds[WAYS[0]], strict=True))
        for way in WAYS[1:]
    ]
    return (
        f"| {codec} | " + " | ".join([*(f"{each:.1f}" for each in medians), *(f"{each:.1f}" for each in ratios)]) + " |"
    )


def again(old: Path, out: Path, source: object, watcher: Watcher) -> None:
    dataset = OldDataset.open(old)
    config = replace(old_config(dataset), system_prompt=PROMPT)
    retokenize_dataset(dataset, open_store(out), config, source=source, watcher=watcher)


def speed(make: Callable[[Watcher], object]) -> float:
    """Rows a second of CPU time, of all shards but the first."""
    done: list[tuple[float, int]] = []

    def shard_done(record: object) -> None:
        done.append((time.process_time(), record.totals.rows))

    make(Watcher(shard_done=shard_done))
    return sum(rows for _, rows in done[1:]) / (done[-1][0] - done[0][0])


if __name__ == "__main__":
    main()
