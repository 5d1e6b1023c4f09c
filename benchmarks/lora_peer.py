r"""LoRA at true sizes: the bundled trainer, beside transformers + peft + Liger's kernels, on the same samples.

    python benchmarks/lora_peer.py --data RECEIPTS --presets 9b --capacity 8192 --recompute none full

Weights are random. Each preset takes the dataset of its family. Ways:

- ours: ``train.py --lora-rank R`` on full packs, once for each value of --recompute and --base (``lora.base``: weights
  in bf16 or NF4), in a process of its own. It reads
  its data while it trains; tokens/s, MFU, peak memory and data wait are those of its log, after a warm-up;
- peft: transformers' model in bf16 with peft's adapters of the same matrices and Liger's RMSNorm, SwiGLU and fused
  linear cross-entropy, fused AdamW, on batches padded to their longest sample and ready on the device, of the largest
  size that fits, found by trying;
- peft, checkpointing: the same with activations computed again.

Tokens are true tokens. MFU counts no gradients of frozen weights (``model/flops.py``, ``model/lora/flops.py``), for all
ways. Writes lora-peer-<label>-<date>.json and .md under --out after each way.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import train_peer
from adapter_peer import few_configurations, with_liger
from kernel_families import kernel_sums, table
from train_peer import DEVICE, STARTED, PeerStep, emptied, figures, largest_batch, of_samples, padded, peer_of, timed

from vlmdata import VlmDataset, open_dataset
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import preset, spec_of
from vlmdata.model.flops import StepFlops
from vlmdata.model.lora.attach import Plan, plan_of
from vlmdata.model.lora.flops import with_adapters
from vlmdata.model.lora.options import LoraOptions

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("ours", "peft", "peft, checkpointing")


def plan_for(architecture: Architecture, rank: int) -> tuple[Plan, StepFlops]:
    """What is adapted, and the FLOP formula of both sides, without multi-token prediction."""
    plan = plan_of(architecture, LoraOptions(rank=rank), mtp=False)
    frozen = ("vision", "merger", "language")
    flops = spec_of(architecture).step_flops(architecture, False, frozen, ("language",))
    return plan, with_adapters(flops, plan.sites.values(), rank, architecture)


def time_ours(name: str, data: Path, recompute: str, base: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a run of train.py, or the end of what it said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        last = options.steps + options.warmup + options.profile
        command = [
            *(sys.executable, str(ROOT / "train.py"), "--data", str(data), "--preset", name, "--out", str(out)),
            *("--lora-rank", str(options.rank), "--capacity", str(options.capacity), "--global-batch", "1"),
            *("--steps", str(last), "--workers", "2", "--set", "model.mtp=false"),
            *("--set", f"model.recompute={recompute}", "--set", f"lora.base={base}", "--set", "run.tensorboard=false"),
            *(("--set", f"run.profile=[{last},{last}]") if options.profile else ()),
        ]
        begun = time.monotonic()
        left = max(10.0, min(options.patience, options.limit - (begun - STARTED)))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=left, env=with_toml_writer(Path(folder))
            )
        except subprocess.TimeoutExpired:
            print(f"no end after {left:.0f} s; the steps before count", flush=True)
        else:
            print("\n".join(done.stdout.splitlines()[:8]), flush=True)
            if done.returncode:
                print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
                return {"failed": (done.stderr or done.stdout).strip().splitlines()[-1][:300]}
        log = out / "metrics.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        if len(lines) <= options.warmup:
            return {"failed": f"{len(lines)} steps within {left:.0f} s"}
        seconds = time.monotonic() - begun
        if options.profile and (out / "profile" / "rank-00000.json").exists():
            _print_profile(out / "profile" / "rank-00000.json", options, name)
    lines = [line for line in lines if "event" not in line]
    counted = lines[options.warmup : options.warmup + options.steps]
    total = sum(line["seconds"] for line in counted)
    return {
        "tokens_per_second": sum(line["tokens"] for line in counted) / total,
        "mfu": statistics.mean(line["mfu"] for line in counted) if "mfu" in counted[0] else None,
        "peak_gib": max(line.get("memory_gib") or 0.0 for line in lines),
        "data_wait": sum(line["data_wait"] for line in counted) / total,
        "seconds_per_step": total / len(counted),
        "first_step_and_start_seconds": seconds - sum(line["seconds"] for line in lines[1:]),
        "batch": f"packs of {options.capacity:,}",
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "options": shlex.join(command[command.index("--preset") :]).replace(f"--out {out} ", ""),
    }


def _print_profile(trace: Path, options: argparse.Namespace, name: str) -> None:
    """Prints the kernels of the last step by family, and keeps torch's table."""
    print("\n".join(table({name: kernel_sums(trace, 1)})), flush=True)
    shutil.copy(trace.with_suffix(".txt"), options.out / f"lora-profile-{name}.txt")


def with_toml_writer(folder: Path) -> dict[str, str]:
    """Returns the environment of a run of train.py, which writes TOML. Makes a writer if there is none."""
    environment = dict(os.environ)
    if importlib.util.find_spec("tomli_w") is None:
        lines = [
            "import json",
            "def dumps(groups):",
            "    line = lambda name, value: f'{name} = {json.dumps(value)}'",
            "    tables = ([f'[{name}]', *(line(*each) for each in group.items())] for name, group in groups.items())",
            "    return '\\n'.join('\\n'.join(table) for table in tables) + '\\n'",
        ]
        (folder / "tomli_w.py").write_text("\n".join(lines) + "\n")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))
    return environment


class AdapterStep(PeerStep):
    """An optimizer step of peft's adapters."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        trained = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=train_peer.LEARNING_RATE, weight_decay=train_peer.WEIGHT_DECAY, fused=DEVICE.type == "cuda"
        )


def peft_model(architecture: Architecture, plan: Plan, rank: int, checkpointing: bool) -> torch.nn.Module:
    """transformers' model with Liger's kernels and peft's adapters of the same matrices."""
    from peft import LoraConfig, get_peft_model

    model: Any = peer_of(architecture, checkpointing=False)
    if DEVICE.type == "cuda":  # on a CPU, this is a check of the script
        with_liger(model)
    single = [name for name, site in plan.sites.items() if not site.experts]
    spread = [name for name, site in plan.sites.items() if site.experts]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=single, target_parameters=spread or None)
    # Adapters in bf16, as the base: by default peft makes them float32, which is slower.
    adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    if checkpointing:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable()
    return adapted.train()  # type: ignore[no-any-return]


def time_peft(
    architecture: Architecture, dataset: VlmDataset, checkpointing: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of peft's adapters at the largest batch that fits."""
    emptied()
    plan, flops = plan_for(architecture, options.rank)
    step = AdapterStep(peft_model(architecture, plan, options.rank, checkpointing))
    count = largest_batch(step, dataset, options)
    while count:
        emptied()
        try:
            chosen = [[(i * count + j) % len(dataset) for j in range(count)] for i in range(options.steps)]
            batches = [padded(dataset, numbers) for numbers in chosen]
            counts = [of_samples(dataset, numbers, flops) for numbers in chosen]
            slots = sum(batch["input_ids"].numel() for batch in batches)
            seconds, losses = timed(step, batches, options)
        except torch.OutOfMemoryError:
            step.optimizer.zero_grad(set_to_none=True)
            count -= 1
            continue
        return figures(seconds, counts, slots, losses) | {"batch": f"{count} padded samples"}
    return {"failed": "not one sample fits"}


def report(about: dict[str, Any]) -> str:
    """The table of all ways."""
    head = "| model | way | batch | tokens/s | relative to the faster of peft | MFU | peak memory | data wait |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for name, ways in about["presets"].items():
        peers = [each["tokens_per_second"] for way, each in ways.items() if "peft" in way and "failed" not in each]
        for way, each in ways.items():
            if "failed" in each:
                rows.append(f"| {name} | {way} | {each['failed']} | – | – | – | – | – |")
                continue
            ratio = f"{each['tokens_per_second'] / max(peers):.2f}" if peers else "–"
            mfu = f"{each['mfu']:.1%}" if each.get("mfu") else "–"
            wait = f"{each['data_wait']:.1%}" if "data_wait" in each else "none"
            rows.append(
                f"| {name} | {way} | {each['batch']} | {each['tokens_per_second']:,.0f} | {ratio} | {mfu} | "
                f"{each['peak_gib']:.1f} GiB | {wait} |"
            )
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers", "peft"))
    title = f"# LoRA beside peft, {about['date']}"
    return (
        "\n\n".join(
            [title, f"- `{about['command']}`", f"On {about['device']}; {versions}. {about['note']}", "\n".join(rows)]
        )
        + "\n"
    )


def main() -> None:
    """Measures all ways and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="dataset; one for each family")
    parser.add_argument("--presets", nargs="+", default=["9b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--recompute", nargs="+", default=["none", "full"], help="of our runs")
    parser.add_argument("--base", nargs="+", default=["plain"], help="lora.base of our runs")
    parser.add_argument("--profile", action="store_true", help="profile one more step of our runs")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--start", type=int, default=4, help="the batch with which the search for the largest begins")
    parser.add_argument("--largest", type=int, default=24)
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for one of our runs")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which no way begins")
    parser.add_argument("--label", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    import transformers

    few_configurations()
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/lora_peer.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": importlib.metadata.version("peft") if set(options.ways) - {"ours"} else "not used",
        "note": f"Rank {options.rank} on all matrices of the language model; random weights in bf16.",
        "presets": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "-".join(filter(None, ["lora-peer", options.label, about["date"]]))
    for name in options.presets:
        ways = about["presets"].setdefault(name, {})
        architecture = preset(name)
        dataset = next(
            d for d in map(open_dataset, options.data) if d.manifest.model_family.name == architecture.data_family
        )
        tokenizer = dataset.manifest.tokenizer
        if architecture.language.vocab_size < tokenizer.vocab_size or DEVICE.type == "cpu":
            architecture = architecture.with_vocabulary(tokenizer)
        architecture = dataclasses.replace(architecture, image_token_id=tokenizer.image)
        for way in options.ways:
            for recompute, base in itertools.product(options.recompute, options.base) if way == "ours" else [("", "")]:
                label = f"{way}, recompute {recompute}" if recompute else way
                label += f", base {base}" if len(options.base) > 1 or base == "nf4" else ""
                if time.monotonic() - STARTED > options.limit:
                    print(f"  {name} {label}: left out, --limit has passed", flush=True)
                    continue
                emptied()
                if way == "ours":
                    ways[label] = time_ours(name, Path(dataset.directory), recompute, base, options)
                else:
                    ways[label] = time_peft(architecture, dataset, way.endswith("checkpointing"), options)
                print(f"  {name} {label}: {json.dumps(ways[label])}", flush=True)
                stem.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
                stem.with_suffix(".md").write_text(report(about))
    print(stem.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
