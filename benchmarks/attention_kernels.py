"""Times the kernel between an attention layer's projection and its attention, forward and backward.

    python benchmarks/attention_kernels.py
    python benchmarks/attention_kernels.py --tiles
    python benchmarks/attention_kernels.py --tiles --heights 4 8 --numbers 8 --warps 2 4

16,384 tokens, bfloat16, in the layouts of Qwen3.5 0.8b and 2b (2 groups of 4 queries and gates, 256 wide, 64 rotated)
and of Qwen3-VL 2b (8 groups of 2 queries, 128 wide, all rotated). Prints the time of each kernel, and the bytes that it
must read and write at least divided by that. With --tiles the kernel alone, with other tokens of a tile (as of heads
256 wide; twice as many of heads 128 wide), tiles of a program and warps. All of these are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.device_timer import by_kernel, host_microseconds, milliseconds
from vlmdata.model.kernels import attention_inputs
from vlmdata.model.kernels.attention_inputs import AttentionHeads, AttentionInputs

TOKENS = 16384
#: Layouts and the columns that are rotated.
LAYOUTS = {
    "Qwen3.5 0.8b, 2b": (AttentionHeads(2, 4, 256, gated=True, zero_centered=True, eps=1e-6), 64),
    "Qwen3-VL 2b": (AttentionHeads(8, 2, 128, gated=False, zero_centered=False, eps=1e-6), 128),
}
KERNEL = "_split_norm_rotate"


def bytes_of(heads: AttentionHeads, rotated: int) -> tuple[float, float]:
    """Bytes that the kernel must move forward and backward. Both halves of the angles are equal: it reads one."""
    normalised = heads.groups * (heads.queries + 1) * heads.width
    angles = 4 * rotated // 2
    return TOKENS * (2.0 * 2 * heads.columns + angles), TOKENS * (2.0 * (2 * heads.columns + normalised) + angles)


def both_ways(heads: AttentionHeads, rotated: int, device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward and the backward pass, which was run once."""
    shapes = [(TOKENS, heads.columns), (heads.width,), (heads.width,)]
    mixed, *weights = (torch.empty(each, device=device, dtype=torch.bfloat16) for each in shapes)
    angles = torch.empty(TOKENS, rotated, device=device)
    for each in (mixed, *weights):
        each.normal_().requires_grad_()
    angles.uniform_(0, 16384)

    def way() -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = AttentionInputs.apply(mixed, angles, *weights, heads)[: 3 + heads.gated]
        return found

    out = way()
    grads = [torch.empty_like(each).normal_() for each in out]

    def pull() -> object:
        return torch.autograd.grad(out, [mixed, *weights], grads, retain_graph=True)

    pull()
    return way, pull


def measure(name: str) -> None:
    """Prints the times of a layout."""
    heads, rotated = LAYOUTS[name]
    print(f"\n{name}, {TOKENS} tokens, tiles {attention_inputs.FORWARD} forward, {attention_inputs.BACKWARD} backward")
    ways = both_ways(heads, rotated, "cuda")
    rows = []
    for direction, work, least in zip(("forward", "backward"), ways, bytes_of(heads, rotated), strict=True):
        kernels = by_kernel(work)
        host, device = host_microseconds(work), milliseconds(work)
        print(f"{direction} {device:.3f} ms, launched in {host:.0f} µs, kernels {sum(kernels.values()):.3f} ms")
        rows += [(direction, *each, least) for each in kernels.most_common()]
    print("| | kernel | ms | GB/s |\n|---|---|---|---|")
    for direction, kernel, took, least in rows:
        rate = f"{least / took / 1e6:.0f}" if kernel == KERNEL else ""
        print(f"| {direction} | {kernel[:70]} | {took:.4f} | {rate} |", flush=True)


def set_tiles(options: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """Sets one choice of tiles after the other, forward and backward. A thread has at most four rows' columns."""
    for height, number, warps in itertools.product(options.heights, options.numbers, options.warps):
        if warps <= 2 * height and height <= 4 * warps:
            attention_inputs.FORWARD = attention_inputs.BACKWARD = height, number, warps
            yield height, number, warps


def try_tiles(options: argparse.Namespace) -> None:
    """Prints the times of the kernel with each choice of tiles."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, *sys.argv, "--compile"], check=True, stdout=subprocess.DEVNULL)
    print(f"compiled in {time.perf_counter() - begun:.1f} s")
    columns = [f"{name}, {way}" for name in LAYOUTS for way in ("forward", "backward")]
    print("| tokens, tiles, warps |" + "".join(f" {each}, ms | GB/s |" for each in columns))
    print("|---" * (1 + 2 * len(columns)) + "|")
    for choice in set_tiles(options):
        cells = []
        for heads, rotated in LAYOUTS.values():
            for work, least in zip(both_ways(heads, rotated, "cuda"), bytes_of(heads, rotated), strict=True):
                times: Counter[str] = by_kernel(work)
                cells += [f"{times[KERNEL]:.4f}", f"{least / times[KERNEL] / 1e6:.0f}"]
        print(f"| {choice} | " + " | ".join(cells) + " |", flush=True)
    print(f"ended after {time.perf_counter() - begun:.1f} s")


def compile_all(options: argparse.Namespace) -> None:
    """Compiles the kernel with each choice of tiles into Triton's cache."""
    from vlmdata.model.kernels.compile_ahead import collect, compile_in_forks, pretend_hopper

    pretend_hopper()
    calls = []
    for _ in set_tiles(options):
        for heads, rotated in LAYOUTS.values():
            calls += collect(lambda heads=heads, rotated=rotated: both_ways(heads, rotated, "meta"))  # type: ignore[misc]
    sys.exit(compile_in_forks(calls, len(os.sched_getaffinity(0))) > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="other tiles and numbers of warps")
    parser.add_argument("--heights", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="tokens of a tile")
    parser.add_argument("--numbers", type=int, nargs="+", default=[4, 8, 16], help="tiles of a program")
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 4, 8], help="warps of a program")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_all(options)
    print(torch.cuda.get_device_name(0))
    if options.tiles:
        try_tiles(options)
        return
    for name in LAYOUTS:
        measure(name)


if __name__ == "__main__":
    main()
