"""Training on packs of 131,072 tokens on one GPU, beside packs of 16,384.

    python benchmarks/train_data.py books --out B
    python benchmarks/long_packs.py --data receipts=R --data books=B --presets 2b

The bundled trainer's step, without multi-token prediction. Of --long, each pack of receipts has over a hundred samples,
and a book is one sample of the whole pack. Packs of --short hold receipts and recompute what --short-recompute says;
long ones take the first of --long-recompute that fits. Needs receipts of more than --long tokens: repeat their rows.
After a case that does not fit, its memory is not given back: run what comes after it in a process of its own.
Writes long-packs-<label>-<date>.json and .md under --out, anew after each case.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from adapter_peer import dataset_for, few_configurations
from train_peer import STARTED, about_run, configs_of, emptied, time_ours

#: Label of the data whose packs of both lengths are measured.
SAMPLES = "receipts"


def cases(options: argparse.Namespace) -> list[tuple[str, int, list[str]]]:
    """Data, capacity and what may be recomputed, in the order of measuring."""
    kinds = list(dict.fromkeys(kind for kind, _ in options.data))
    short = [(SAMPLES, options.short, options.short_recompute)] if SAMPLES in kinds else []
    return [*short, *((kind, options.long, options.long_recompute) for kind in kinds)]


def report(about: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [f"# Long packs, {about['date']}", "", f"- `{about['command']}`", ""]
    lines += [f"On {about['device']}; torch {about['torch']}. {about['note']}", ""]
    lines += ["| preset | data | pack | recompute | tokens/s | relative to the short pack | MFU | peak memory |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, rows in about["presets"].items():
        first = next((each["tokens_per_second"] for each in rows.values() if each.get("batch")), None)
        for case, each in rows.items():
            kind, _, capacity = case.partition(", ")
            if not each.get("batch"):
                lines.append(f"| {name} | {kind} | {capacity} | does not fit | | | | |")
                continue
            again = each["recompute"] + ", tower" * each["vision_recompute"]
            speed = each["tokens_per_second"]
            lines.append(
                f"| {name} | {kind} | {capacity} | {again} | {speed:,.0f} | {speed / first:.2f} | {each['mfu']:.1%} | "
                f"{each['peak_gib']:.1f} GiB |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--presets", nargs="+", default=["2b", "4b"])
    parser.add_argument("--short", type=int, default=16384)
    parser.add_argument("--long", type=int, default=131072)
    parser.add_argument("--short-recompute", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--long-recompute", nargs="+", default=["full+vision"])
    parser.add_argument("--short-steps", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="of long packs; one more warms up")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no case begins")
    parser.add_argument("--label", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    options.data = [(name, Path(path)) for name, _, path in (each.partition("=") for each in options.data)]
    from vlmdata.model.parallel.environment import before_megatron

    before_megatron()

    from vlmdata.model.parallel import groups
    from vlmdata.model.parallel.cpu_mode import cpu_mode_if_needed
    from vlmdata.model.training.build import architecture_of

    groups.initialize()
    few_configurations()
    about = about_run("long_packs.py", "Random weights, bf16; gradients and optimizer state in fp32.")
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "-".join(filter(None, ["long-packs", options.label, about["date"]]))
    with cpu_mode_if_needed():
        for name in options.presets:
            rows = about["presets"][name] = {}
            for kind, capacity, recompute in cases(options):
                dataset = dataset_for(name, kind, options)
                if dataset is None or time.monotonic() - STARTED > options.limit:
                    print(f"  {name} {kind} {capacity:,}: left out", flush=True)
                    continue
                long = capacity == options.long
                emptied()
                chosen = {"capacity": capacity, "recompute": recompute}
                chosen |= {"steps": options.steps, "warmup": 1} if long else {"steps": options.short_steps, "warmup": 3}
                given = argparse.Namespace(**vars(options) | chosen)
                configs = configs_of(name, dataset, given)
                rows[f"{kind}, {capacity:,}"] = time_ours(architecture_of(configs[0]), configs, dataset, given)
                print(f"  {name} {kind} {capacity:,}: {json.dumps(rows[f'{kind}, {capacity:,}'])}", flush=True)
                stem.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
                stem.with_suffix(".md").write_text(report(about))
    groups.destroy()
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
