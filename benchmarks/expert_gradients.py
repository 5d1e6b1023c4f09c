"""Gradients of experts' weights in one kernel, beside torch's grouped product and Transformer Engine's products.

    python benchmarks/expert_gradients.py --experts 256 --shapes 1024x2048 2048x512 --rows 131072

All add to float32 gradients; the expected limit is the longer of their bytes and FLOP. Rows are spread unevenly: the
largest expert has about twice as many as the mean. Prints a line of JSON per way and tiling.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from device_timer import host_microseconds, milliseconds

from vlmdata.model.kernels.expert_gradients import TILING, ProductTiling, add_weight_gradients

TILINGS = [
    TILING,
    ProductTiling(128, 128, 64, 8, 3),
    ProductTiling(128, 128, 128, 8, 2),
    ProductTiling(128, 128, 32, 8, 5),
    ProductTiling(64, 128, 64, 4, 4),
    ProductTiling(128, 128, 64, 8, 4),
    ProductTiling(64, 256, 64, 8, 4),
    ProductTiling(128, 256, 64, 8, 3),
]


def ways(rows: int, experts: int, n: int, k: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(experts, generator=generator)
    counts = (shares / shares.sum() * rows).long()
    counts[-1] += rows - counts.sum()
    ends = counts.cumsum(0).to("cuda", torch.int32)
    x, d = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
    whole = torch.zeros(experts, n, k, device="cuda")
    places = torch.tensor([each.data_ptr() for each in whole], device="cuda")
    parts = counts.tolist()

    def one_by_one() -> None:
        general_grouped_gemm(
            list(x.split(parts)), list(d.split(parts)), list(whole), [None] * experts, torch.bfloat16, layout="NT",
            m_splits=parts, grad=False, accumulate=True, use_split_accumulator=True, use_bias=False,
        )  # fmt: skip

    found: dict[str, Callable[[], object]] = {
        f"one kernel, {tuple(tiling)}": lambda tiling=tiling: add_weight_gradients(x, d, ends, places, tiling)  # type: ignore[misc]
        for tiling in TILINGS
    }
    found["torch, then a sum"] = lambda: whole.add_(F.grouped_mm(d.T, x, offs=ends))
    found["Transformer Engine, one by one"] = one_by_one
    return found


def main() -> None:
    """Measures all ways for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", default=["1024x2048", "2048x512"], help="output x input width")
    parser.add_argument("--rows", type=int, default=131072)
    options = parser.parse_args()
    for shape in options.shapes:
        n, k = map(int, shape.split("x"))
        flop = 2 * options.rows * n * k / 989e12
        moved = (2 * 4 * options.experts * n * k + 2 * options.rows * (n + k)) / 4.8e12
        print(json.dumps({"shape": shape, "limit_ms": round(1e3 * max(flop, moved), 3)}), flush=True)
        for name, work in ways(options.rows, options.experts, n, k).items():
            try:
                row = {"device_ms": round(milliseconds(work), 3), "host_us": round(host_microseconds(work))}
            except triton.runtime.OutOfResources as error:
                row = {"error": str(error)[:300]}
            print(json.dumps({"shape": shape, "way": name} | row), flush=True)


if __name__ == "__main__":
    main()
