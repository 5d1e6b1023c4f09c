"""Making ``pixel_values`` on a CPU, beside a copy of the bytes that it writes, which no way of making them can beat.

    python benchmarks/pixel_values.py
    python benchmarks/pixel_values.py --data R

One thread, CPU time, the least of several rounds of each in turn; 28,000 patches with two frames of equal pixels, as in
a pack of 7,000 tokens of images. `equal`: mean and deviation are those of Qwen3.5-VL; else they differ by channel.
Prints a table. With --data, prints the CPU time of loading a pack of a dataset instead. PYTHONPATH=TREE measures
another checkout.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch

from vlmdata import StreamingLoader
from vlmdata.families.pixel_values import expand_patches

FRAMES, CHANNELS, PIXELS = 2, 3, 256


def seconds(work: Callable[[], object]) -> float:
    """CPU time of a call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure_loading(data: str, rounds: int) -> None:
    """Prints the CPU time of a pack: the mean of five after the first, the least of the rounds."""
    print("| dtype | a pack, ms |\n|---|---|")
    for pixels in ("bfloat16", "float32"):
        found = []
        for _ in range(rounds):
            packs = iter(StreamingLoader(data, capacity=8192, global_batch=1, num_workers=0, pixels=pixels))
            next(packs)
            found.append(seconds(partial(list, islice(packs, 5))) / 5)
        print(f"| {pixels} | {1e3 * min(found):.1f} |", flush=True)


def main() -> None:
    """Measures each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=28_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", help="measure loading this dataset, of at least six packs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.data:
        measure_loading(options.data, options.rounds)
        return
    pixels = torch.randint(0, 256, (options.patches, CHANNELS * PIXELS), dtype=torch.uint8)
    print("| dtype | channels | made, ms | copied, ms | copied / made |\n|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for channels, mean, std in (
            ("equal", (0.5,) * 3, (0.5,) * 3),
            ("unequal", (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)),
        ):
            out = torch.empty(options.patches, CHANNELS, FRAMES, PIXELS, dtype=dtype)
            source = torch.empty_like(out)
            make, copy = partial(expand_patches, pixels, mean, std, out), partial(out.copy_, source)
            found = [(seconds(make), seconds(copy)) for _ in range(options.rounds)]
            made, copied = (min(times) for times in zip(*found, strict=True))
            row = (str(dtype).removeprefix("torch."), channels, f"{1e3 * made:.1f}", f"{1e3 * copied:.1f}")
            print(f"| {' | '.join(row)} | {copied / made:.2f} |", flush=True)


if __name__ == "__main__":
    main()
