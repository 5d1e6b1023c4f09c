"""Attention over the segments of a pack: Transformer Engine's against torch's ``varlen_attn``, forward and backward.

    python benchmarks/segment_attention.py --out benchmarks/results/segment-attention-<date>.md

bfloat16, on one CUDA device. Decoders have 16,384 tokens in segments of receipts (about 1,000 tokens each) or of chats
(100 to 4,000); towers have 56,000 patches of 16 images, without a causal mask. TFLOP/s count the scores within
segments. The error is that of the output and of the queries' gradient, relative to float32 within one segment.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from vlmdata.model.parallel.environment import before_megatron

before_megatron()  # one cuDNN in the process: with two, gradients are wrong

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from benchmarks.device_timer import milliseconds

#: Boundaries, longest segment -> attention of queries, keys, values (T, heads, width).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Heads and segments of a layer."""

    name: str
    queries: int
    groups: int
    width: int
    lengths: tuple[int, ...]
    causal: bool

    @property
    def flop(self) -> float:
        """Operations of the forward pass within segments."""
        pairs = sum(n * n for n in self.lengths) * (0.5 if self.causal else 1.0)
        return 4.0 * pairs * self.queries * self.width


def cases() -> list[Case]:
    """Decoders and towers of both families."""
    receipts = (1024,) * 16
    drawn = np.random.default_rng(0).lognormal(6.3, 1.0, 200).clip(100, 4000).astype(int)
    chats = tuple(int(n) for n in drawn[: np.searchsorted(drawn.cumsum(), 16384)])
    images = (3528,) * 16
    heads = (
        ("Qwen3.5 2b", 8, 2, 256),
        ("Qwen3.5 4b", 16, 4, 256),
        ("Qwen3-VL 2b", 16, 8, 128),
        ("Qwen3-VL 4b", 32, 8, 128),
    )
    decoders = [
        Case(f"{name}, {kind}", queries, groups, width, lengths, True)
        for name, queries, groups, width in heads
        for kind, lengths in (("receipts", receipts), ("chats", chats))
    ]
    towers = [Case(f"tower, heads of {width}", 16, 16, width, images, False) for width in (64, 72)]
    return decoders + towers


def transformer_engine(case: Case, bounds: Tensor, longest: int) -> Attention:
    """Transformer Engine's choice, which is cuDNN's kernel where flash-attn is not installed."""
    from transformer_engine.pytorch import DotProductAttention

    kind = "padding_causal" if case.causal else "padding"
    module = DotProductAttention(
        case.queries, case.width, case.groups, attention_dropout=0.0, qkv_format="thd", attn_mask_type=kind
    )

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = {"max_seqlen_q": longest, "max_seqlen_kv": longest, "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
        out: Tensor = module(query, key, value, **sizes)
        return out.view(query.shape)

    return attend


def torch_varlen(case: Case, bounds: Tensor, longest: int) -> Attention:
    """Torch's kernel for sequences of any lengths."""
    window = (-1, 0) if case.causal else (-1, -1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=window)
        assert isinstance(out, Tensor)
        return out

    return attend


def reference(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Float32 attention of one segment, (n, heads, width)."""
    q, k, v = (x.float().transpose(0, 1)[None] for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
    return out[0].transpose(0, 1)


def measure(case: Case, kind: Callable[[Case, Tensor, int], Attention]) -> tuple[float, float, float]:
    """Milliseconds forward and backward, and the largest relative error."""
    total, first = sum(case.lengths), case.lengths[0]
    bounds = torch.tensor((0, *np.cumsum(case.lengths).tolist()), dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(heads: int) -> Tensor:
        shape = total, heads, case.width
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()

    inputs = query, key, value = drawn(case.queries), drawn(case.groups), drawn(case.groups)
    attend = kind(case, bounds, max(case.lengths))
    out = attend(*inputs)
    pull = torch.randn(out.shape, device="cuda", dtype=out.dtype, generator=generator)

    def both() -> Any:  # Transformer Engine frees what the backward pass needs, so both are repeated
        return torch.autograd.grad(attend(*inputs), inputs, pull)

    found = out[:first], both()[0][:first]
    part = [x[:first].detach().float().requires_grad_() for x in inputs]
    wanted = reference(case, *part)
    gradient = torch.autograd.grad(wanted, part[0], pull[:first].float())[0]
    pairs = zip(found, (wanted, gradient), strict=True)
    error = max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
    with torch.no_grad():
        forward = milliseconds(lambda: attend(query, key, value), 20)
    return forward, milliseconds(both, 20) - forward, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the table here")
    options = parser.parse_args()
    lines = [
        f"# Attention over segments, {datetime.date.today().isoformat()}\n",
        f"`python benchmarks/segment_attention.py`, {torch.cuda.get_device_name(0)}, torch {torch.__version__}\n",
        "| layer | kernel | forward, ms | backward, ms | forward, TFLOP/s | backward, TFLOP/s | error |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in cases():
        for name, kind in (("Transformer Engine", transformer_engine), ("varlen_attn", torch_varlen)):
            forward, backward, error = measure(case, kind)
            rates = case.flop / forward / 1e9, 2.5 * case.flop / backward / 1e9
            numbers = f"{forward:.3f} | {backward:.3f} | {rates[0]:.0f} | {rates[1]:.0f} | {error:.4f}"
            lines.append(f"| {case.name} | {name} | {numbers} |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
