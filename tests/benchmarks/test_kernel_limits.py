"""Work of launches and tables of limits, of functions and kernels whose bytes and FLOP are known."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernel_limits import report, row_of, rows, singles
from benchmarks.kernel_work import Recorder, distinct_bytes, group

WIDTHS = {"tower": 64, "decoder": 256}


def noted(work: object) -> dict[str, tuple[int, float]]:
    """Bytes and FLOP by name of what a function calls."""
    recorder = Recorder()
    with recorder:
        work()  # type: ignore[operator]
    assert set(recorder.calls.values()) <= {1}
    return {call.name: (call.bytes, call.flops) for call in recorder.calls}


def test_bytes_are_those_of_each_tensor_once() -> None:
    x, y = torch.zeros(4, 8), torch.zeros(8)
    assert distinct_bytes([x, [y, (x,)], None, 3]) == 4 * 32 + 4 * 8
    assert distinct_bytes([y.expand(100, 8)]) == 32


def test_work_of_torchs_functions() -> None:
    x, w, table = torch.zeros(6, 8), torch.zeros(8, 4), torch.zeros(1000, 8)
    ids = torch.tensor([1, 2, 3])
    assert noted(lambda: x @ w) == {"aten::mm": (4 * (48 + 32 + 24), 2.0 * 6 * 8 * 4)}
    assert noted(lambda: torch.addmm(torch.zeros(4), x, w))["aten::addmm"] == (4 * (48 + 32 + 24 + 4), 2.0 * 6 * 8 * 4)
    assert noted(lambda: x + 1) == {"aten::add": (4 * 96, 0)}
    assert noted(lambda: x.add_(1)) == {"aten::add_": (4 * 96, 0)}
    assert noted(lambda: x.zero_()) == {"aten::zero_": (4 * 48, 0)}
    assert noted(lambda: x.view(-1).unsqueeze(0).detach()) == {}
    assert noted(lambda: torch.nn.functional.embedding(ids, table)) == {"aten::embedding": (2 * 4 * 24, 0)}


def test_work_of_a_backward_pass_is_noted() -> None:
    w = torch.zeros(8, 4, requires_grad=True)
    x = torch.zeros(6, 8)
    recorder = Recorder()
    with recorder:
        (x @ w).sum().backward()
    products = [call for call, number in recorder.calls.items() for _ in range(number) if call.name == "aten::mm"]
    assert [call.flops for call in products] == [2.0 * 6 * 8 * 4] * 2


def test_work_of_transformer_engines_functions() -> None:
    recorder = Recorder()
    recorder.on = True
    x, w, d = torch.zeros(6, 8), torch.zeros(4, 8), torch.zeros(6, 4)
    # As its linear layers call it: the product, and the gradients of input and weight.
    for a, turned, b, turned_b, out in ((w, True, x, False, d), (w, False, d, False, x), (x, False, d, True, w)):
        recorder.engine("generic_gemm", [a, turned, b, turned_b], (out, None))
    assert {call.flops for call in recorder.calls} == {2.0 * 6 * 8 * 4}
    recorder.calls.clear()
    noop = torch.zeros(0)
    recorder.engine("multi_tensor_adam", [65536, noop, [[x], [w], [d]], 0.1], None)  # gradient read, others rewritten
    recorder.engine("multi_tensor_scale", [65536, noop, [[x], [x]], 0.1], None)
    assert [call.bytes for call in recorder.calls] == [4 * (48 + 2 * 32 + 2 * 24), 4 * 2 * 48]


def test_attention_counts_its_segments() -> None:
    recorder = Recorder()
    recorder.takes(torch.tensor([0, 3, 10]).numpy(), torch.tensor([4, 8]).numpy())
    recorder.on = True
    recorder.engine("fused_attn_fwd", [torch.zeros(3), torch.zeros(12, 2, 64)], torch.zeros(12, 2, 64))
    recorder.engine("fused_attn_bwd", [torch.zeros(3), torch.zeros(10, 2, 256)], torch.zeros(10, 2, 256))
    assert {call.name: call.flops for call in recorder.calls} == {
        "tower attention, forward": 4.0 * 2 * 64 * (16 + 64),
        "decoder attention, backward": 2.5 * 4.0 * 2 * 256 * (9 + 49) / 2,
    }


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    {
        "nvjet_sm90_tst_128x288_64x4_2x1_v_bz_coopA_NNT": "matrix products",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>": "matrix products",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<x>": "sums, copies and others of torch",
        "void transformer_engine::multi_tensor_apply_kernel<AdamFunctor<float>>": "AdamW",
        "void multi_tensor_apply_kernel<transformer_engine::multi_tensor_l2norm::L2NormFunctor>": (
            "gradients: norm and scaling"
        ),
        "void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel": "norms of Transformer Engine",
        "_sum_and_norm_backward": "tower: sums and norms",
        "_sum_and_rms_norm_backward": "decoder: sums and norms",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "delta rule",
        "_delta_heads_backward": "before the delta rule",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x80_4x1x1": "attention of the tower",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256_4x1x1": (
            "attention of the decoder"
        ),
        "void cudnn::fusion::compute_dot_do_o<__nv_bfloat16, 64, 72>(T1 const*)": "attention of the tower",
        "void cudnn::fusion::convert_dq_to_16bits_ragged<true>(void const*)": "attention of either",
        "void cudnn::fusion::fmha_reduce_head_ragged<true>(void const*)": "attention of the decoder",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90": "attention of the tower",
    }.items(),
)
def test_a_kernel_belongs_to_its_row(kernel: str, wanted: str) -> None:
    assert row_of(kernel, WIDTHS) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    {
        "generic_gemm": "matrix products",
        "aten::mm": "matrix products",
        "aten::mul": "sums, copies and others of torch",
        "aten::_foreach_add_": "sums, copies and others of torch",
        "multi_tensor_adam": "AdamW",
        "multi_tensor_unscale_l2norm": "gradients: norm and scaling",
        "rmsnorm_fwd": "norms of Transformer Engine",
        "tower attention, backward": "attention of the tower",
    }.items(),
)
def test_noted_work_belongs_to_the_row_of_its_kernels(name: str, wanted: str) -> None:
    assert group(name) == wanted


def test_a_limit_is_the_longer_of_bytes_and_flop_of_each_call() -> None:
    found = {
        "about": "a made-up device",
        "seconds": 0.02,
        "mfu": 0.5,
        "limits": [1e12, 1e9],
        "widths": WIDTHS,
        "kernels": {"nvjet_a": (2, 6.0), "nvjet_b": (1, 4.0), "_gate": (4, 8.0), "nobody_knows": (1, 2.0)},
        # 2 calls bound by 2 ms of FLOP, one by 1 ms of bytes; 4 calls of 1.5 ms of bytes.
        "work": [["generic_gemm", 10, 2e9, 2], ["aten::mm", 10**6, 1e6, 1], ["_gate", 1_500_000, 0.0, 4]],
    }
    products, gates, other = rows(found)
    assert (products["name"], products["ms"], products["limit"]) == ("matrix products", 10.0, pytest.approx(5.0))
    assert (gates["name"], gates["ms"], gates["limit"]) == ("SwiGLU and gates", 8.0, pytest.approx(6.0))
    assert (other["name"], other["limit"]) == ("other", 0)
    (single,) = singles(found)
    assert (single["name"], single["limit"]) == ("`_gate`", pytest.approx(6.0))
    told = report({"date": "2026-11-24", "commands": ["python …"], "presets": {"2b": found}})
    assert "| matrix products | 3 | 10.00 | 50.0% | 5.00 | FLOP | 0.50 | 5.0 |" in told
    assert "| SwiGLU and gates | 4 | 8.00 | 40.0% | 6.00 | bytes | 0.75 | 2.0 |" in told
    assert "| other | 1 | 2.00 | 10.0% | – | – | – | – |" in told
