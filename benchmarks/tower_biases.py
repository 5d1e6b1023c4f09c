"""Times kernels of the vision tower that add the bias of the layer before them, against layers that add their own.

    python benchmarks/tower_biases.py
    python benchmarks/tower_biases.py --tilings --heights 4 8 --columns 256 --programs 1056 2112 --stages 1 2 3

The patches of one pack of 16,384 tokens, width of the presets 2b and 4b, bfloat16. "Before", a layer adds its bias, and
its backward pass computes the bias gradient with cuBLASLt (Transformer Engine) or as a sum (torch, where Transformer
Engine is not installed). Prints for both ways the time of all kernels forward and backward, with the layer's products,
because what their epilogues do changes as well. For our kernels, prints also the bytes that must be read and written at
least, divided by the time. With --tilings, our kernels alone with other tilings.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from model.parallel.environment import before_megatron

before_megatron()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device_timer import by_kernel
from model.kernels import biased_gelu
from model.kernels.biased_gelu import Tiling, gelu_with_bias

#: Tensors as large as the product that each kernel must read or write.
MOVED = {"_gelu_with_bias": 2, "_gelu_with_bias_backward": 3}


def layer(width: int, wide: int, returns_bias: bool) -> Callable[[Tensor], Any]:
    """Transformer Engine's linear layer, or torch's; with ``returns_bias``, it returns its product and its bias."""
    try:
        from transformer_engine.pytorch import Linear
    except ImportError:
        plain = nn.Linear(width, wide, device="cuda", dtype=torch.bfloat16)
        return (lambda x: (F.linear(x, plain.weight), plain.bias)) if returns_bias else plain
    made: Callable[[Tensor], Any] = Linear(
        width, wide, return_bias=returns_bias, params_dtype=torch.bfloat16, device="cuda"
    )
    return made


def ways(width: int, wide: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The feed-forward part's first half."""
    apart, whole = layer(width, wide, True), layer(width, wide, False)
    return {
        "ours": lambda x: gelu_with_bias(*apart(x)),
        "before": lambda x: F.gelu(whole(x), approximate="tanh"),
    }


def rate(kernel: str, elements: int, took: float) -> str:
    return f"{MOVED[kernel] * elements * 2 / took / 1e6:.0f} GB/s"


def compare(patches: int, width: int, wide: int) -> None:
    """Prints the times of both ways and of their kernels."""
    x = torch.randn(patches, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    pull = torch.randn(patches, wide, device="cuda", dtype=torch.bfloat16)
    print(f"\n{patches} patches, {width} to {wide} columns")
    print("| way | forward ms | backward ms | both |\n|---|---|---|---|")
    kernels: dict[str, Counter[str]] = {}
    for name, way in ways(width, wide).items():
        way(x).backward(pull)
        forward = by_kernel(lambda way=way: way(x))
        kernels[name] = by_kernel(lambda way=way: way(x).backward(pull))
        ahead, both = sum(forward.values()), sum(kernels[name].values())
        print(f"| {name} | {ahead:.4f} | {both - ahead:.4f} | {both:.4f} |", flush=True)
    for name, found in kernels.items():
        print(f"{name}:")
        for kernel, took in found.most_common():
            reached = rate(kernel, patches * wide, took) if kernel in MOVED else ""
            print(f"  {took:.4f} ms {kernel[:90]} {reached}")


def try_tilings(patches: int, wide: int, tilings: list[Tiling]) -> None:
    """Prints the times of our kernels with each tiling; backward, also those of the sum over programs."""
    product, pull = (torch.randn(patches, wide, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(wide, device="cuda", dtype=torch.bfloat16).requires_grad_()
    product.requires_grad_()
    print(f"\n{patches} patches of {wide} columns; ms")
    print(f"| {', '.join(Tiling._fields)} | forward | backward | its sums |\n|---|---|---|---|")
    fastest: dict[str, tuple[float, str]] = {}
    for tiling in tilings:
        biased_gelu.FORWARD = biased_gelu.BACKWARD = tiling
        label = ", ".join(map(str, tiling))

        def both() -> None:
            torch.autograd.grad(gelu_with_bias(product, bias), (product, bias), pull)

        try:
            both()
            found = by_kernel(both)
        except Exception as error:  # such as a tiling that needs more shared memory than there is
            print(f"| {label} | {type(error).__name__}: {error}", flush=True)
            continue
        sums = sum(took for kernel, took in found.items() if kernel not in MOVED)
        ahead, back = (found[kernel] for kernel in MOVED)
        print(f"| {label} | {ahead:.4f} | {back:.4f} | {sums:.4f} |", flush=True)
        for kernel, took in (("_gelu_with_bias", ahead), ("_gelu_with_bias_backward", back + sums)):
            fastest[kernel] = min(fastest.get(kernel, (took, label)), (took, label))
    for kernel, (took, label) in fastest.items():
        print(f"fastest {kernel}: {label}: {took:.4f} ms, {rate(kernel, patches * wide, took)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=55_500)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--wide", type=int, default=4096, help="width of the feed-forward part")
    parser.add_argument("--tilings", action="store_true", help="try all combinations of the following")
    parser.add_argument("--heights", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--columns", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--warps", type=int, nargs="+", default=[4])
    parser.add_argument("--programs", type=int, nargs="+", default=[528, 1056, 2112])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    print(torch.cuda.get_device_name(0))
    if options.tilings:
        sizes = options.heights, options.columns, options.warps, options.programs, options.stages
        try_tilings(options.patches, options.wide, [Tiling(*each) for each in itertools.product(*sizes)])
    else:
        compare(options.patches, options.width, options.wide)


if __name__ == "__main__":
    main()
