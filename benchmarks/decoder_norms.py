"""Times the kernels of a decoder's residual stream against those that they take the place of.

    python benchmarks/decoder_norms.py
    python benchmarks/decoder_norms.py --tilings --widths 2048 --heights 2 4 --programs 264 528 --stages 2 3

One pack of 16,384 tokens, widths of the presets 0.8b (1024), 2b (2048) and 4b (2560), bfloat16, zero-centred weights. A
layer has both functions once: keep_and_rms_norm (its first norm) and sum_and_rms_norm. Prints for each of them, ours
and before, the time of its kernels forward and backward, with the sum of two gradients; for ours also the bytes that
must be read and written at least, divided by the time. "Before" has Transformer Engine's RMS norm, or torch's where
that is not installed. With --tilings, ours with other tilings instead; heights are those of rows of 1,024 columns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from model.parallel.environment import before_megatron

before_megatron()

import torch
from torch import Tensor

from benchmarks.device_timer import by_kernel, host_microseconds
from model.kernels import residual_rms_norm
from model.kernels.residual_norm import Tiling

EPS = 1e-6
#: Tensors of a row for each token that a function must read or write, forward and backward.
MOVED = {"keep_and_rms_norm": (2, 4), "sum_and_rms_norm": (4, 4)}
Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def ours(weight: Tensor) -> dict[str, Way]:
    return {
        "keep_and_rms_norm": lambda x, y: residual_rms_norm.keep_and_rms_norm(x, weight, EPS, True),
        "sum_and_rms_norm": lambda x, y: residual_rms_norm.sum_and_rms_norm(x, y, weight, EPS, True),
    }


def before(norm: Any) -> dict[str, Way]:
    def keep(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.view_as(x)  # so that the gradients of both outputs are added
        return x, norm(x)

    def summed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + y
        return x, norm(x)

    return {"keep_and_rms_norm": keep, "sum_and_rms_norm": summed}


def rms_norm(width: int) -> tuple[Any, str]:
    """Transformer Engine's RMS norm, or torch's, and its name."""
    try:
        from transformer_engine.pytorch import RMSNorm as Engine
    except ImportError:
        return torch.nn.RMSNorm(width, EPS, device="cuda", dtype=torch.bfloat16), "torch's norm"
    norm = Engine(width, eps=EPS, params_dtype=torch.bfloat16, device="cuda", zero_centered_gamma=True)
    return norm, "Transformer Engine's norm"


class Inputs:
    """Inputs of both functions, (tokens, width), and gradients of their outputs."""

    def __init__(self, tokens: int, width: int, weight: Tensor | None = None):
        x, y, *self.pull = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.both = x.requires_grad_(), y.requires_grad_()
        fresh = torch.zeros(width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.weight = fresh if weight is None else weight

    def backward(self, name: str, out: tuple[Tensor, Tensor]) -> None:
        """Computes gradients of what the function depends on."""
        added = self.both[:1] if name == "keep_and_rms_norm" else self.both
        torch.autograd.grad(out, [*added, self.weight], self.pull)


def kernel_times(name: str, way: Way, inputs: Inputs) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of each kernel forward, and backward."""
    inputs.backward(name, way(*inputs.both))
    forward = by_kernel(lambda: way(*inputs.both))
    return forward, by_kernel(lambda: inputs.backward(name, way(*inputs.both))) - forward


def rate(moved: int, tokens: int, width: int, took: float) -> str:
    return f"{moved * tokens * width * 2 / took / 1e6:.0f}"


def compare(tokens: int, width: int) -> None:
    """Prints the times of both ways, and their sum over a layer."""
    norm, title = rms_norm(width)
    print(f"\n{tokens} tokens of {width}; before: {title}")
    print(
        "| function | way | forward ms | GB/s | backward ms | GB/s | host, both directions, µs |\n" + "|---" * 7 + "|"
    )
    kernels: dict[str, dict[str, float]] = {}
    mine = Inputs(tokens, width)
    for way, functions, inputs in (
        ("ours", ours(mine.weight), mine),
        ("before", before(norm), Inputs(tokens, width, norm.weight)),
    ):
        total = [0.0, 0.0]
        for name, function in functions.items():
            times = kernel_times(name, function, inputs)
            for kind, found in zip(("forward", "backward"), times, strict=True):
                kernels[f"{name}, {way}, {kind}"] = found
            ms = [sum(each.values()) for each in times]
            total = [a + b for a, b in zip(total, ms, strict=True)]
            speeds = [rate(moved, tokens, width, took) for moved, took in zip(MOVED[name], ms, strict=True)]
            cells = [f"{ms[0]:.4f}", speeds[0], f"{ms[1]:.4f}", speeds[1]]
            host = host_microseconds(lambda n=name, f=function, i=inputs: i.backward(n, f(*i.both)))
            print(f"| {name} | {way} | {' | '.join(cells)} | {host:.0f} |", flush=True)
        print(f"| both | {way} | {total[0]:.4f} |  | {total[1]:.4f} |  |  |", flush=True)
    for name, found in kernels.items():
        print(f"{name}: " + ", ".join(f"{kernel[:60]} {took:.4f}" for kernel, took in found.items()))


def try_tilings(tokens: int, width: int, tilings: list[Tiling]) -> None:
    """Prints the times of our kernels with each tiling. Backward includes the sum over programs."""
    inputs = Inputs(tokens, width)
    kinds = [f"{name} {kind}" for name in MOVED for kind in ("forward", "backward")]
    print(f"\n{tokens} tokens of {width}; ms\n| height, columns per warp, programs, stages | {' | '.join(kinds)} |")
    print("|---" * (1 + len(kinds)) + "|")
    fastest: dict[str, tuple[float, str]] = {}
    for tiling in tilings:
        residual_rms_norm.FORWARD = residual_rms_norm.BACKWARD = tiling
        label = ", ".join(map(str, tiling))
        try:
            times = [found for name, way in ours(inputs.weight).items() for found in kernel_times(name, way, inputs)]
        except Exception as error:  # such as a tiling that needs more shared memory than there is
            print(f"| {label} | {type(error).__name__}: {error}", flush=True)
            continue
        cells = [sum(found.values()) for found in times]
        print(f"| {label} | {' | '.join(f'{each:.4f}' for each in cells)} |", flush=True)
        for kind, took in zip(kinds, cells, strict=True):
            fastest[kind] = min(fastest.get(kind, (took, label)), (took, label))
    for kind, moved in zip(kinds, itertools.chain(*MOVED.values()), strict=True):
        took, label = fastest[kind]
        print(f"fastest {kind}: {label}: {took:.4f} ms, {rate(moved, tokens, width, took)} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 2560])
    parser.add_argument("--tilings", action="store_true", help="try all combinations of the following")
    parser.add_argument("--heights", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--per-warp", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--programs", type=int, nargs="+", default=[264, 528, 792])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    print(torch.cuda.get_device_name(0))
    tilings = itertools.product(options.heights, options.per_warp, options.programs, options.stages)
    chosen = [Tiling(*each) for each in tilings]
    for width in options.widths:
        if options.tilings:
            try_tilings(options.tokens, width, chosen)
        else:
            compare(options.tokens, width)


if __name__ == "__main__":
    main()
