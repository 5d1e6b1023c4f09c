"""What it costs to bring an image to the vision tower: stored uint8 patches against bf16 `pixel_values`.

    python benchmarks/patch_embedding.py --patches 45700

Both from pinned memory to the GPU, then through the 2b tower's patch embedding, forward and backward. Medians of 30.
Writes patch-embedding-<date>.md under --out.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.device_timer import milliseconds
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.model.families.qwen3_5.presets import PRESETS
from vlmdata.model.network.patch_embed import PatchEmbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=45700, help="of a pack of 13 receipts: 45,700")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    device = torch.device("cuda")
    stored = torch.randint(0, 256, (options.patches, 768), dtype=torch.uint8)
    embed = PatchEmbed(PRESETS["2b"].vision, FAMILY, torch.bfloat16, device)
    ways = {
        "uint8 patches": stored.pin_memory(),
        "bf16 pixel_values": FAMILY.pixel_values(stored, torch.bfloat16).pin_memory(),
    }
    lines = [
        f"# Patches to the GPU, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/patch_embedding.py --patches {options.patches}` on {torch.cuda.get_device_name(0)}: one "
        "pack of receipts.",
        "",
        "| way | bytes | copy to the device | embedding, forward and backward |",
        "|---|---|---|---|",
    ]
    results = []
    for name, host in ways.items():
        there = host.to(device)

        def embedded(there: torch.Tensor = there) -> None:
            embed(there).sum().backward()

        copy = milliseconds(lambda host=host: host.to(device, non_blocking=True))
        results.append(copy)
        lines.append(f"| {name} | {host.nbytes / 1e6:.1f} MB | {copy:.2f} ms | {milliseconds(embedded):.2f} ms |")
    lines += ["", f"Copying `pixel_values` takes {results[1] / results[0]:.1f} times as long.", ""]
    text = "\n".join(lines)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"patch-embedding-{datetime.date.today().isoformat()}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
