"""Times the kernels of the vision tower's residual stream against those that they take the place of.

    python benchmarks/tower_kernels.py
    python benchmarks/tower_kernels.py --tilings --widths 768 --heights 2 4 --programs 396 660 --stages 1 2

The patches of one pack of 16,384 tokens, widths of the presets 0.8b (768), 2b and 4b (1024), bfloat16. A block has each
of three functions once: keep_and_norm (its first norm), sum_and_norm and sum_with_bias. Prints for each of them, ours
and before, the time of its kernels forward and backward, with the sum of two gradients where both outputs have one; for
ours also the bytes that must be read and written at least, divided by the time. "Before" has Transformer Engine's layer
norm, or torch's where that is not installed. With --tilings, ours with other tilings instead.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from vlmdata.model.parallel.environment import before_megatron

before_megatron()

import torch
from torch import Tensor

from benchmarks.device_timer import by_kernel, milliseconds
from vlmdata.model.kernels import residual_norm
from vlmdata.model.kernels.residual_norm import Tiling

EPS = 1e-6
#: Tensors of a row for each patch that a function must read or write, forward and backward.
MOVED = {"keep_and_norm": (2, 4), "sum_and_norm": (4, 4), "sum_with_bias": (3, 1)}
Way = Callable[..., tuple[Tensor, ...]]


def ours() -> dict[str, Way]:
    return {
        "keep_and_norm": lambda x, y, bias, *norm: residual_norm.keep_and_norm(x, *norm, EPS),
        "sum_and_norm": lambda *inputs: residual_norm.sum_and_norm(*inputs, EPS),
        "sum_with_bias": lambda x, y, bias, *_: (residual_norm.sum_with_bias(x, y, bias),),
    }


def before(norm: Any) -> dict[str, Way]:
    """What a block did. The bias is added by itself, as in Transformer Engine's row-parallel layers."""

    def summed(x: Tensor, y: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
        return x + (y + bias)

    def keep_and_norm(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        x = x.view_as(x)  # so that the gradients of both outputs are added
        return x, norm(x)

    def sum_and_norm(*inputs: Tensor) -> tuple[Tensor, ...]:
        x = summed(*inputs)
        return x, norm(x)

    return {
        "keep_and_norm": keep_and_norm,
        "sum_and_norm": sum_and_norm,
        "sum_with_bias": lambda *inputs: (summed(*inputs),),
    }


def layer_norm(width: int) -> tuple[Any, str]:
    """Transformer Engine's layer norm, or torch's, and its name."""
    try:
        from transformer_engine.pytorch import LayerNorm
    except ImportError:
        return torch.nn.LayerNorm(width, EPS, device="cuda", dtype=torch.bfloat16), "torch's norm"
    return LayerNorm(width, eps=EPS, params_dtype=torch.bfloat16, device="cuda"), "Transformer Engine's norm"


class Inputs:
    """Inputs of all functions, (patches, width) and (width,), and gradients of their outputs."""

    def __init__(self, patches: int, width: int, norm: Any = None):
        shapes = [(patches, width), (patches, width), (width,), (width,), (width,)]
        self.all = [torch.randn(each, device="cuda", dtype=torch.bfloat16).requires_grad_() for each in shapes]
        self.pull = [torch.randn(patches, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        self.of_norm = self.all[3:] if norm is None else [norm.weight, norm.bias]

    def backward(self, name: str, out: tuple[Tensor, ...]) -> None:
        """Computes gradients of what the function depends on."""
        wanted = self.all[:1] if name == "keep_and_norm" else self.all[:3]
        wanted = wanted if name == "sum_with_bias" else [*wanted, *self.of_norm]
        torch.autograd.grad(out, wanted, self.pull[: len(out)])


def kernel_times(name: str, way: Way, inputs: Inputs) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of each kernel forward, and backward."""
    inputs.backward(name, way(*inputs.all))
    forward = by_kernel(lambda: way(*inputs.all))
    # Transformer Engine computes gradients of an output once, so each backward pass has a forward pass of its own.
    return forward, by_kernel(lambda: inputs.backward(name, way(*inputs.all))) - forward


def rate(moved: int, patches: int, width: int, took: float) -> str:
    return f"{moved * patches * width * 2 / took / 1e6:.0f}"


def compare(patches: int, width: int) -> None:
    """Prints the times of both ways, and their sum over a block."""
    norm, title = layer_norm(width)
    print(f"\n{patches} patches of {width}; before: {title}")
    print("| function | way | forward ms | GB/s | backward ms | GB/s | with launches, forward | both |")
    print("|---|---|---|---|---|---|---|---|")
    kernels: dict[str, dict[str, float]] = {}
    for way, functions, inputs in (
        ("ours", ours(), Inputs(patches, width)),
        ("before", before(norm), Inputs(patches, width, norm)),
    ):
        total = [0.0, 0.0]
        for name, function in functions.items():
            times = kernel_times(name, function, inputs)
            for kind, found in zip(("forward", "backward"), times, strict=True):
                kernels[f"{name}, {way}, {kind}"] = found
            ms = [sum(each.values()) for each in times]
            total = [a + b for a, b in zip(total, ms, strict=True)]
            rates = [
                rate(moved, patches, width, took) if way == "ours" else ""
                for moved, took in zip(MOVED[name], ms, strict=True)
            ]
            launched = [
                milliseconds(lambda function=function, inputs=inputs: function(*inputs.all)),
                milliseconds(lambda n=name, f=function, inputs=inputs: inputs.backward(n, f(*inputs.all))),
            ]
            cells = [f"{ms[0]:.4f}", rates[0], f"{ms[1]:.4f}", rates[1], *(f"{took:.3f}" for took in launched)]
            print(f"| {name} | {way} | {' | '.join(cells)} |", flush=True)
        print(f"| all three | {way} | {total[0]:.4f} |  | {total[1]:.4f} |  |  |  |", flush=True)
    for name, found in kernels.items():
        print(f"{name}: " + ", ".join(f"{kernel[:60]} {took:.4f}" for kernel, took in found.items()))


def try_tilings(patches: int, width: int, tilings: list[Tiling]) -> None:
    """Prints the times of our kernels with each tiling; backward without the sum over programs, which comes after."""
    inputs = Inputs(patches, width)
    kinds = [f"{name} {kind}" for name in MOVED for kind in ("forward", "backward", "sums")]
    print(f"\n{patches} patches of {width}; ms\n| height, columns per warp, programs, stages | {' | '.join(kinds)} |")
    print("|---" * (1 + len(kinds)) + "|")
    fastest: dict[str, tuple[float, str]] = {}
    for tiling in tilings:
        residual_norm.FORWARD = residual_norm.BACKWARD = residual_norm.OF_BIAS = tiling
        label, cells = ", ".join(map(str, tiling)), []
        try:
            for name, way in ours().items():
                forward, backward = kernel_times(name, way, inputs)
                main = backward["_sum_and_norm_backward"]
                cells += [sum(forward.values()), main, sum(backward.values()) - main]
        except Exception as error:  # such as a tiling that needs more shared memory than there is
            print(f"| {label} | {type(error).__name__}: {error}", flush=True)
            continue
        print(f"| {label} | {' | '.join(f'{each:.4f}' for each in cells)} |", flush=True)
        # What counts backward is both.
        cells = [each + cells[place + 1] if place % 3 == 1 else each for place, each in enumerate(cells)]
        for kind, took in zip(kinds, cells, strict=True):
            fastest[kind] = min(fastest.get(kind, (took, label)), (took, label))
    for name, (forward_moved, backward_moved) in MOVED.items():
        for kind, moved in (("forward", forward_moved), ("backward", backward_moved)):
            took, label = fastest[f"{name} {kind}"]
            print(f"fastest {name} {kind}: {label}: {took:.4f} ms, {rate(moved, patches, width, took)} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=55_500)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1024])
    parser.add_argument("--tilings", action="store_true", help="try all combinations of the following")
    parser.add_argument("--heights", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--per-warp", type=int, nargs="+", default=[256])
    parser.add_argument("--programs", type=int, nargs="+", default=[264, 396, 528, 660, 924])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    print(torch.cuda.get_device_name(0))
    tilings = itertools.product(options.heights, options.per_warp, options.programs, options.stages)
    chosen = [Tiling(*each) for each in tilings]
    for width in options.widths:
        if options.tilings:
            try_tilings(options.patches, width, chosen)
        else:
            compare(options.patches, width)


if __name__ == "__main__":
    main()
