"""Expanding stored patches to `pixel_values` on the CPU: in blocks, as the family does, against whole temporaries.

    python benchmarks/pixel_values.py

One image of 1,003,520 pixels (3,920 patches), the largest of CORD-V2's bounds. Ways run in turn, in every repeat;
numbers are medians over repeats, ratios medians of the ratios within a repeat. A new tensor each time, except "into a
buffer", as loader workers do with the option `pixels`. Writes benchmarks/results/pixel-values-<date>.md.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from hardware import hardware

from vlmdata.families.qwen3_5 import FAMILY

RESULTS = Path(__file__).resolve().parent / "results"
PATCHES = 3920


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    patches = torch.randint(0, 256, (PATCHES, FAMILY.patch_bytes), dtype=torch.uint8)
    machine = hardware("torch")
    text = (
        f"`python benchmarks/pixel_values.py` on {machine}, {datetime.date.today()}.\n\n"
        "| dtype | threads | way | ms per image | CPU ms | speed relative to whole temporaries | in CPU time |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for row in measure(patches, dtype, options.repeats):
                text += f"| {str(dtype).removeprefix('torch.')} | {threads} | {row} |\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"pixel-values-{datetime.date.today()}.md").write_text(text)


def measure(patches: torch.Tensor, dtype: torch.dtype, repeats: int) -> list[str]:
    buffer = FAMILY.pixel_values(patches, dtype)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "whole temporaries": lambda: whole(patches, dtype),
        "blocks": lambda: FAMILY.pixel_values(patches, dtype),
        "blocks, into a buffer": lambda: FAMILY.pixel_values(patches, out=buffer),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            made = way()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            del made
    rows = []
    for name, times in found.items():
        base = found["whole temporaries"]
        ratios = [median(b[i] / t[i] for b, t in zip(base, times, strict=True)) for i in (0, 1)]
        wall, cpu = (1000 * median(t[i] for t in times) for i in (0, 1))
        rows.append(f"{name} | {wall:.1f} | {cpu:.1f} | {ratios[0]:.1f} | {ratios[1]:.1f}")
    return rows


def whole(patches: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All patches at once, in float32."""
    mean, std = ((torch.tensor(each) * 255.0).view(1, 3, 1, 1) for each in (FAMILY.image_mean, FAMILY.image_std))
    values = patches.view(-1, 3, 1, FAMILY.patch_size**2).to(torch.float32).sub_(mean).div_(std)
    return values.to(dtype).expand(-1, -1, FAMILY.temporal_patch_size, -1).reshape(len(patches), -1)


if __name__ == "__main__":
    main()
