"""Attention and rotation of the vision tower: what each kernel takes on the shapes of a pack of receipts.

    python benchmarks/tower_attention.py --heads 16 --head-dim 64

Thirteen images of some 3,450 patches, bf16, forward and backward; medians of 30. Errors are relative to torch in
float32, on the first image. A way that is not installed is left out by name. Writes tower-attention-<date>.md under
--out.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmdata.model.parallel.environment import before_megatron

before_megatron()

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.device_timer import milliseconds

LENGTHS = [3448 + 16 * (number % 5) for number in range(13)]
BOUNDS = [0, *itertools.accumulate(LENGTHS)]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def attentions(heads: int, width: int) -> dict[str, Callable[[], Attention]]:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    longest = max(LENGTHS)

    def engine() -> Attention:
        from transformer_engine.pytorch import DotProductAttention

        module = DotProductAttention(heads, width, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding")
        sizes = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        return lambda q, k, v: module(q, k, v, qkv_format="thd", attn_mask_type="padding", **sizes)

    def flash_4() -> Attention:
        from flash_attn.cute.interface import flash_attn_varlen_func

        sizes = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attn_varlen_func(q, k, v, **sizes)
            return out[0] if isinstance(out, tuple) else out

        return attend

    def flash_2() -> Attention:
        from torch.nn.attention.varlen import varlen_attn

        return lambda q, k, v: varlen_attn(q, k, v, bounds, bounds, longest, longest)

    return {
        "Transformer Engine (cuDNN)": engine,
        "FlashAttention 4": flash_4,
        "torch's varlen_attn (FlashAttention 2)": flash_2,
    }


def measured(attend: Attention, heads: int, width: int) -> str:
    query, key, value = (
        torch.randn(BOUNDS[-1], heads, width, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    out = attend(query, key, value)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    first = slice(0, LENGTHS[0])
    exact = [x.detach()[first].float().transpose(0, 1).unsqueeze(0).requires_grad_() for x in (query, key, value)]
    wanted = F.scaled_dot_product_attention(*exact)
    seed = grad.view(-1, heads, width)[first].float().transpose(0, 1).unsqueeze(0)
    wanted_grads = torch.autograd.grad(wanted, exact, seed)
    pairs = [(out.view(-1, heads, width), wanted), *zip(grads, wanted_grads, strict=True)]
    error = max(relative(ours[first], theirs[0].transpose(0, 1)) for ours, theirs in pairs)
    forward = milliseconds(lambda: attend(query, key, value))
    both = milliseconds(lambda: torch.autograd.grad(attend(query, key, value), (query, key, value), grad))
    flops = 4 * sum(length**2 for length in LENGTHS) * heads * width
    return (
        f"{forward:.2f} ms ({flops / forward / 1e9:.0f} TFLOP/s) | {both - forward:.2f} ms "
        f"({2.5 * flops / (both - forward) / 1e9:.0f} TFLOP/s) | {error:.1e}"
    )


def rotations(heads: int, width: int) -> dict[str, str]:
    from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

    from vlmdata.model.kernels.rotation import SplitAndRotate

    mixed = torch.randn(BOUNDS[-1], heads, 3, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    half = 20 * torch.randn(BOUNDS[-1], width // 2, device="cuda")
    angles, turns = torch.cat([half, half], -1), torch.cat([half.cos(), half.sin()], -1)
    bias = torch.zeros(3 * heads * width, device="cuda", dtype=torch.bfloat16)

    def engine() -> tuple[Tensor, ...]:
        turn = angles[:, None, None]
        parts = apply_fused_qkv_rotary_pos_emb(mixed.flatten(-2).unsqueeze(1), turn, turn, [width] * 3)
        return tuple(part.squeeze(1) for part in parts)

    found = {}
    for name, split in (("ours", lambda: SplitAndRotate.apply(mixed, bias, turns)), ("Transformer Engine", engine)):
        grads = [torch.randn_like(part) for part in split()]
        forward = milliseconds(split)
        both = milliseconds(lambda split=split, grads=grads: torch.autograd.grad(split(), mixed, grads))
        found[name] = f"{forward:.2f} ms | {both - forward:.2f} ms"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        f"# The tower's attention and rotation, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/tower_attention.py --heads {options.heads} --head-dim {options.head_dim}` on "
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, bf16: {BOUNDS[-1]:,} patches of "
        f"{len(LENGTHS)} images.",
        "",
        "| attention | forward | backward | largest error |",
        "|---|---|---|---|",
    ]
    for name, make in attentions(options.heads, options.head_dim).items():
        try:
            lines.append(f"| {name} | {measured(make(), options.heads, options.head_dim)} |")
        except ImportError as error:
            lines.append(f"| {name} | not installed ({error}) | | |")
        print(lines[-1], flush=True)
    lines += ["", "| split and rotation | forward | backward |", "|---|---|---|"]
    lines += [f"| {name} | {found} |" for name, found in rotations(options.heads, options.head_dim).items()]
    text = "\n".join([*lines, ""])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"tower-attention-{datetime.date.today().isoformat()}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
