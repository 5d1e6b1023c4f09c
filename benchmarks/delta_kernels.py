"""Times the kernels before the delta rule against flash-linear-attention's and torch's, which they take the place of.

    python benchmarks/delta_kernels.py
    python benchmarks/delta_kernels.py --tiles

One pack of 16,384 tokens in 16 samples, heads of the presets 0.8b and 2b (16 of keys, 16 of values) and 4b and 9b
(16 and 32), bfloat16. Prints for each way, first ours, the time forward and backward, how long the host takes to launch
it, and each kernel; for ours also the bytes that it must read and write at least, divided by its time. With --tiles,
our kernels with other tiles and numbers of warps instead.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F

from benchmarks.device_timer import by_kernel, host_microseconds, milliseconds
from vlmdata.model.kernels import delta_inputs, short_convolution
from vlmdata.model.kernels.delta_inputs import DeltaInputs
from vlmdata.model.kernels.short_convolution import DeltaHeads

TOKENS, SAMPLES = 16384, 16


def bytes_of(heads: DeltaHeads) -> dict[str, float]:
    """Bytes that each kernel must move."""
    channels = heads.channels
    repeated = heads.values * (2 * heads.key_width + heads.value_width)
    rates = heads.values * TOKENS
    return {
        "_delta_heads": 2.0 * TOKENS * (channels + repeated),
        "_delta_heads_backward": 2.0 * TOKENS * (2 * channels + repeated),
        "_delta_decays": rates * (2 * 2 + 2 + 4),
        "_delta_decays_backward": rates * (2 * 2 + 2 + 4 + 2 * 2),
    }


def arguments(heads: DeltaHeads) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Projection and parameters, boundaries, and the first token of each token's sample."""
    width = heads.channels + heads.values * (heads.value_width + 2)
    shapes = [(TOKENS, width), (heads.channels, 1, 4), (heads.values,), (heads.values,)]
    tensors = [torch.randn(each, device="cuda", dtype=torch.bfloat16).requires_grad_() for each in shapes]
    bounds = torch.linspace(0, TOKENS, SAMPLES + 1, device="cuda").round().to(torch.int32)
    starts = bounds[:-1].repeat_interleave(bounds.diff()).to(torch.int32)
    return tensors, bounds, starts


def theirs(tensors: list[torch.Tensor], bounds: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, ...]:
    """What the layer did before: flash-linear-attention's convolution and norm, torch's copies and decay."""
    from fla.modules.convolution import causal_conv1d
    from fla.modules.l2norm import l2norm

    projected, taps, a_log, dt_bias = tensors
    gate = heads.values * heads.value_width
    mixed, gate, beta, alpha = projected[None].split([heads.channels, gate, heads.values, heads.values], -1)
    out, _ = causal_conv1d(x=mixed, weight=taps.squeeze(1), bias=None, activation="silu", cu_seqlens=bounds)
    keys = heads.keys * heads.key_width
    query, key, value = out.split([keys, keys, heads.values * heads.value_width], -1)
    query, key = (l2norm(x.reshape(1, TOKENS, -1, heads.key_width)) for x in (query, key))
    repeats = heads.values // heads.keys
    if repeats > 1:
        query, key = query.repeat_interleave(repeats, 2), key.repeat_interleave(repeats, 2)
    value = value.reshape(1, TOKENS, -1, heads.value_width).contiguous()
    decay = -a_log.float().exp() * F.softplus(alpha.contiguous().float() + dt_bias.float())
    return query, key, value, gate, decay, beta.contiguous().sigmoid()


def measure(heads: DeltaHeads, name: str) -> None:
    """Prints the times of a way."""
    tensors, bounds, starts = arguments(heads)

    def way() -> Any:
        return DeltaInputs.apply(*tensors, starts, heads) if name == "now" else theirs(tensors, bounds, heads)

    out = way()
    grads = [torch.randn_like(each) for each in out]

    def pull() -> None:
        torch.autograd.grad(out, tensors, grads, retain_graph=True)

    pull()
    kernels = by_kernel(lambda: (way(), pull()))
    print(f"\n{heads}, {TOKENS} tokens, {SAMPLES} samples: {name}")
    print(f"forward {milliseconds(way):.3f} ms, launched in {host_microseconds(way):.0f} µs")
    print(f"backward {milliseconds(pull):.3f} ms, launched in {host_microseconds(pull):.0f} µs")
    print(f"kernels {sum(kernels.values()):.3f} ms")
    moved = bytes_of(heads)
    print("| kernel | ms | GB/s |\n|---|---|---|")
    for kernel, took in kernels.most_common():
        rate = f"{moved[kernel] / took / 1e6:.0f}" if kernel in moved else ""
        print(f"| {kernel[:70]} | {took:.4f} | {rate} |", flush=True)


def try_tiles(heads: DeltaHeads) -> None:
    """Prints the time of the convolution's kernels with other tiles forward and other blocks backward."""
    tensors, _, starts = arguments(heads)
    tiles = list(itertools.product((8, 16, 32), (2, 4, 8)))
    print(f"\n{heads}\n| rows, warps | _delta_heads ms | block | _delta_heads_backward ms |\n|---|---|---|---|")
    for tile, block in itertools.zip_longest(tiles, (64, 128, 256)):
        short_convolution.FORWARD = tile
        if block is not None:
            short_convolution.BLOCK = delta_inputs.BLOCK = block

        def work() -> None:
            out = DeltaInputs.apply(*tensors, starts, heads)
            torch.autograd.grad(out, tensors, [each.detach() for each in out])

        work()
        times = by_kernel(work)
        forward, backward = times["_delta_heads"], times["_delta_heads_backward"]
        print(f"| {tile} | {forward:.3f} | {block or ''} | {backward:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="other tiles of the convolution's kernels")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(0))
    if options.tiles:
        try_tiles(DeltaHeads(16, 16, 128, 128))
        return
    from vlmdata.model.kernels.configurations import choose_configurations

    choose_configurations(128, 128, torch.cuda.get_device_capability())
    # First what needs few seconds: flash-linear-attention's convolution has several configurations to compile.
    for name in ("now", "before"):
        for values in (16, 32):
            measure(DeltaHeads(16, values, 128, 128), name)


if __name__ == "__main__":
    main()
