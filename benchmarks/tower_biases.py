"""Times kernels of the vision tower that add the bias of the layer before them, against layers that add their own.

    python benchmarks/tower_biases.py
    python benchmarks/tower_biases.py --tilings
    python benchmarks/tower_biases.py --tilings --gelu 8,256,4,1056,2 8,256,4,1056,3 --rotation 1024,8,528,3

The patches of one pack of 16,384 tokens, width of the presets 2b and 4b, bfloat16. "Before", a layer adds its bias, and
its backward pass computes the bias gradient with cuBLASLt (Transformer Engine) or as a sum (torch, where Transformer
Engine is not installed); then torch's GELU follows, or our rotation with a frozen bias of zeros. Prints for both ways
the time of all kernels forward and backward, with the layer's products, because what their epilogues do changes as
well. For our kernels, prints also the bytes that must be read and written at least, divided by the time. With
--tilings, our kernels alone with other tilings, given by the fields of their tilings.
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

from vlmdata.model.parallel.environment import before_megatron

before_megatron()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device_timer import by_kernel
from vlmdata.model.kernels import biased_gelu, rotation
from vlmdata.model.kernels.biased_gelu import gelu_with_bias
from vlmdata.model.kernels.rotation import SplitAndRotate

#: Tensors as large as the product that each kernel must read or write.
MOVED = {"_gelu_with_bias": 2, "_gelu_with_bias_backward": 3, "_split_and_rotate": 2}
HEAD = 64
Way = Callable[[Tensor], Tensor]
Tilings = list[tuple[int, ...]]


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


def gelu_ways(width: int, wide: int) -> dict[str, Way]:
    """The feed-forward part's first half."""
    apart, whole = layer(width, wide, True), layer(width, wide, False)
    return {
        "ours": lambda x: gelu_with_bias(*apart(x)),
        "before": lambda x: F.gelu(whole(x), approximate="tanh"),
    }


def rotated(product: Tensor, bias: Tensor, turns: Tensor) -> Tensor:
    """Query, key and value in one tensor, whose gradient is not copied."""
    return InOne.apply(*SplitAndRotate.apply(product.unflatten(-1, (-1, 3, HEAD)), bias, turns))  # type: ignore[no-any-return]


class InOne(torch.autograd.Function):
    """Stands for attention: its output is the query, and each of its inputs has the output's gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (grads[0].unflatten(-1, (-1, HEAD)),) * 3


def rotation_ways(width: int, patches: int) -> dict[str, Way]:
    """The queries, keys and values of a block."""
    apart, whole = layer(width, 3 * width, True), layer(width, 3 * width, False)
    turns, zeros = turned(patches), torch.zeros(3 * width, device="cuda", dtype=torch.bfloat16)
    return {
        "ours": lambda x: rotated(*apart(x), turns),
        "before": lambda x: rotated(whole(x), zeros, turns),
    }


def turned(patches: int) -> Tensor:
    angles = 20 * torch.randn(patches, HEAD // 2, device="cuda")
    return torch.cat([angles.cos(), angles.sin()], -1)


def rate(kernel: str, elements: int, took: float) -> str:
    return f"{MOVED[kernel] * elements * 2 / took / 1e6:.0f} GB/s"


def compare(name: str, both: dict[str, Way], patches: int, width: int, wide: int, launches: int) -> None:
    """Prints the times of both ways and of their kernels; ``wide`` columns of the product, launches of our kernel."""
    x = torch.randn(patches, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    print(f"\n{name}: {patches} patches, {width} to {wide} columns")
    print("| way | forward ms | backward ms | both |\n|---|---|---|---|")
    kernels: dict[str, Counter[str]] = {}
    for kind, way in both.items():
        pull = torch.randn_like(way(x))
        way(x).backward(pull)
        forward = by_kernel(lambda way=way: way(x))
        kernels[kind] = by_kernel(lambda way=way, pull=pull: way(x).backward(pull))
        ahead, total = sum(forward.values()), sum(kernels[kind].values())
        print(f"| {kind} | {ahead:.4f} | {total - ahead:.4f} | {total:.4f} |", flush=True)
    for kind, found in kernels.items():
        print(f"{kind}:")
        for kernel, took in found.most_common():
            reached = rate(kernel, patches * wide, took / launches) if kernel in MOVED else ""
            print(f"  {took:.4f} ms {kernel[:90]} {reached}")


def try_tilings(
    name: str, module: Any, tilings: Tilings, way: Callable[[Tensor, Tensor], Tensor], product: Tensor
) -> None:
    """Prints the times of a module's kernels with each tiling; backward, also those of the sum over programs."""
    kind = type(module.FORWARD)
    fields = kind._fields
    print(f"\n{name}: {len(product)} patches of {product.shape[1]} columns; ms")
    print(f"| {', '.join(fields)} | forward | backward | its sums |\n|---|---|---|---|")
    bias = torch.randn(product.shape[1], device="cuda", dtype=torch.bfloat16).requires_grad_()
    pull = torch.randn_like(way(product, bias))
    fastest: dict[str, tuple[float, str]] = {}
    for tiling in tilings:
        module.FORWARD = module.BACKWARD = kind(*tiling)
        label = ",".join(map(str, tiling))
        try:
            way(product, bias).backward(pull)
            ahead = sum(by_kernel(lambda: way(product, bias)).values())
            found = by_kernel(lambda: torch.autograd.grad(way(product, bias), (product, bias), pull))
        except Exception as error:  # such as a tiling that needs more shared memory than there is
            print(f"| {label} | {type(error).__name__}: {error}", flush=True)
            continue
        back = sum(took for kernel, took in found.items() if kernel in MOVED) - ahead
        sums = sum(found.values()) - ahead - back
        print(f"| {label} | {ahead:.4f} | {back:.4f} | {sums:.4f} |", flush=True)
        for kind, took in (("forward", ahead), ("backward", back + sums)):
            fastest[kind] = min(fastest.get(kind, (took, label)), (took, label))
    for kind, (took, label) in fastest.items():
        print(f"fastest {kind}: {label}: {took:.4f} ms")


def tiling(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


#: Tilings of GELU and of rotation that are tried if none are named.
GELU = [
    *itertools.product([4, 8], [256], [4], [1056, 2112], [1, 2, 3]),
    *itertools.product([8], [512], [8], [528, 1056], [1, 3]),
    *itertools.product([16], [256], [4], [528, 1056], [1, 2]),
]
ROTATION = [
    *itertools.product([1024], [8], [396, 528, 660], [1, 2, 3, 4]),
    *itertools.product([512], [4], [792, 1056, 1188], [1, 2, 3]),
    *itertools.product([1024], [4], [528], [1, 2, 3]),
    *itertools.product([512], [8], [1056], [1, 2, 3]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=55_500)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--wide", type=int, default=4096, help="width of the feed-forward part")
    parser.add_argument("--tilings", action="store_true", help="try tilings")
    parser.add_argument("--gelu", type=tiling, nargs="*", default=GELU)
    parser.add_argument("--rotation", type=tiling, nargs="*", default=ROTATION)
    options = parser.parse_args()
    patches, width, wide = options.patches, options.width, options.wide
    print(torch.cuda.get_device_name(0))
    if not options.tilings:
        compare("GELU", gelu_ways(width, wide), patches, width, wide, 1)
        compare("rotation", rotation_ways(width, patches), patches, width, 3 * width, 2)
        return

    def product(columns: int) -> Tensor:
        return torch.randn(patches, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()

    turns = turned(patches)
    try_tilings("GELU", biased_gelu, options.gelu, gelu_with_bias, product(wide))
    try_tilings("rotation", rotation, options.rotation, lambda *both: rotated(*both, turns), product(3 * width))


if __name__ == "__main__":
    main()
