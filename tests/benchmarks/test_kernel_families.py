"""Kernels of a trace by families: names like those in traces of H200s, and times of made-up ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernel_families import FAMILIES, family, kernel_sums, table

NAMES = {
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor": "tower attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x80_4x1x1": "tower attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256_4x1x1": "decoder attention",
    "void cudnn::fusion::compute_dot_do_o<__nv_bfloat16, 64, 72>(T1 const*)": "tower attention",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "delta rule and convolution",
    "_split_and_rotate": "rotation in the tower",
    "void transformer_engine::multi_tensor_apply::multi_tensor_apply_kernel<AdamFunctor>": (
        "AdamW, gradient norm and scaling"
    ),
    "nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNT": "matrix products",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>": "matrix products",
    "void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel": "norms",
    "_sum_and_norm_backward": "norms",
    "_sum_and_rms_norm": "norms",
    "_sum_of_parts": "norms",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": "GELU, SwiGLU",
    "_gelu_with_bias_backward": "GELU, SwiGLU",
    "Memcpy HtoD (Pinned -> Device)": "copies and fills",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>": "copies and fills",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "other",
}


@pytest.mark.parametrize(("name", "wanted"), NAMES.items())
def test_a_kernel_belongs_to_its_family(name: str, wanted: str) -> None:
    assert family(name) == wanted


kernels = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, 1000), st.integers(1, 50)), min_size=1, max_size=30
)


@given(kernels, st.integers(1, 3))
def test_sums_are_those_of_every_microsecond(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str, int, int]], steps: int
) -> None:
    trace = tmp_path_factory.mktemp("trace") / "rank-00000.json"
    events = [{"cat": "kernel", "name": name, "ts": begin, "dur": long} for name, begin, long in found]
    others = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 10_000}, {"ph": "M", "name": "process_name"}]
    trace.write_text(json.dumps({"traceEvents": others + events}))
    sums = kernel_sums(trace, steps)
    for each in [*FAMILIES, "other"]:
        wanted = sum(long for name, _, long in found if family(name) == each) / 1000 / steps
        assert sums["families"].get(each, 0.0) == pytest.approx(wanted)
    running = {moment for _, begin, long in found for moment in range(begin, begin + long)}
    span = max(running) + 1 - min(running)
    assert sums["busy"] == pytest.approx(len(running) / span)
    computing = {m for name, b, long in found if family(name) != "communication" for m in range(b, b + long)}
    assert sums["alone"] == pytest.approx(len(running - computing) / 1000 / steps)
    assert sums["span"] == pytest.approx(span / 1000 / steps)
    assert sums["kernels"] == pytest.approx(len(found) / steps)
    assert len({line.count("|") for line in table({"a": sums, "b": sums})}) == 1


def test_transfer_is_what_the_rank_that_came_last_took(tmp_path: Path) -> None:
    """In both messages of a kind, another rank waits."""
    names = {"ncclDevKernel_AllGather_RING_LL": [(0, 9), (20, 4)], "ncclDevKernel_ReduceScatter": [(30, 5)]}
    other = {"ncclDevKernel_AllGather_RING_LL": [(7, 2), (20, 7)], "ncclDevKernel_ReduceScatter": [(32, 3)]}
    for rank, ran in enumerate((names, other)):
        events = [{"cat": "kernel", "name": n, "ts": b, "dur": long} for n, each in ran.items() for b, long in each]
        (tmp_path / f"rank-{rank:05d}.json").write_text(json.dumps({"traceEvents": events}))
    sums = kernel_sums(tmp_path / "rank-00000.json", 2)
    assert sums["transfer"] == pytest.approx((2 + 4 + 3) / 1000 / 2)
    assert "| communication, transfer | 0.0 |" in table({"a": sums})
