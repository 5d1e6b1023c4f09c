"""Kernels are compiled into Triton's cache without a GPU, in forks, with the configurations of the table."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forked import MODELS, run_forked
from vlmdata.model.kernels.configurations import CANDIDATES, HOPPER, choose_configurations
from vlmdata.model.kernels.shapes import AttentionShape, DeltaNetShape, TowerKernels

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="no flash-linear-attention here")

SHAPE = DeltaNetShape(tokens=16384, key_heads=16, value_heads=32, key_width=128, value_width=128, taps=4)


def in_a_process(call: str, cache: Path) -> dict[str, Any]:
    """In a process of its own: which driver Triton has is settled once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_forked(f"{__name__}:{call}", server=MODELS, env=environment | {"TRITON_CACHE_DIR": str(cache)})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["lines"] = [json.loads(line) for line in done.stdout.splitlines()[:-1]]
    return found | {"errors": done.stderr}


def compiled() -> None:
    """Compiles the kernels of ``triton_kernels.py`` in forks, and once more in this process."""
    import torch
    import triton

    from vlmdata.model.kernels.compile_ahead import collect, compile_in_forks, pretend_hopper

    pretend_hopper()
    from tests.model.kernels.triton_kernels import add, broken

    x = torch.empty(64, device="meta")

    def run() -> None:
        add[(1,)](x, x, 64)
        add[(1,)](x, x, 64)
        broken[(1,)](x)

    calls = collect(run)
    failed = compile_in_forks(calls, 2)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    calls[0]()
    print(json.dumps({"calls": len(calls), "failed": failed, "hits": hits}))


@needs_triton
def test_forks_compile_what_a_function_launches(tmp_path: Path) -> None:
    found = in_a_process("compiled", tmp_path)
    assert found["calls"] == 2, "the second launch of the same kernel needs nothing"
    assert [(line["kernel"], line["cached"]) for line in found["lines"]] == [("add", False)]
    assert found["hits"] == [True], "the fork left the kernel in the cache"
    assert found["failed"] == 1
    assert "no_such_function" in found["errors"]


def of_the_delta_net() -> None:
    """Which kernels are compiled with the table and with all configurations, and for which tiles."""
    from collections import Counter

    from vlmdata.model.kernels.compile_ahead import collect, pretend_hopper, run_all_configurations

    pretend_hopper()

    def sources() -> list[Any]:
        calls = collect(lambda: run_all_configurations(lambda: SHAPE.run("meta")))
        cells = [cell.cell_contents for call in calls for cell in call.__closure__ or ()]
        return [each for each in cells if hasattr(each, "constants")]

    every = len(sources())
    own = choose_configurations(128, 128, HOPPER)
    found = sources()
    tiles = [value for each in found if each.name == "chunk_bwd_kernel_dqkwg" for value in each.constants.values()]
    counts = Counter(each.name for each in found)
    print(json.dumps({"own": own, "every": every, "counts": counts, "tiles": tiles}, default=str))


@needs_fla
def test_the_table_names_configurations_that_exist(tmp_path: Path) -> None:
    found = in_a_process("of_the_delta_net", tmp_path)
    assert not set(found["own"]) & set(CANDIDATES)
    variants = {"causal_conv1d_fwd_kernel": 2, "chunk_local_cumsum_scalar_kernel": 2}  # two activations, two directions
    assert found["counts"] == {name: len(each) * variants.get(name, 1) for name, each in CANDIDATES.items()}
    assert found["every"] > 4 * sum(found["counts"].values())
    assert found["tiles"].count(128) > found["tiles"].count(64), "a Hopper GPU has room for tiles of 128"


def of_the_rule() -> None:
    """What the trainer's delta rule launches, and flash-linear-attention's own."""
    import torch

    from vlmdata.model.kernels.compile_ahead import collect, pretend_hopper, run_all_configurations

    pretend_hopper()
    choose_configurations(128, 128, HOPPER)
    from vlmdata.model.kernels.delta_rule import DeltaRule

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def rule(keep: bool) -> None:
        parts = [empty(SHAPE.tokens, SHAPE.value_heads, 128) for _ in range(3)]
        rates = [empty(SHAPE.tokens, SHAPE.value_heads, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        bounds = torch.tensor([0, SHAPE.tokens], dtype=torch.int32)
        chunks = torch.tensor([[0, number] for number in range(SHAPE.tokens // 64)], dtype=torch.int32)
        out = DeltaRule.apply(*parts, *rates, bounds, chunks, keep)
        out.backward(torch.ones_like(out))

    def kernels(run: Any) -> list[str]:
        calls = collect(lambda: run_all_configurations(run))
        cells = [cell.cell_contents for call in calls for cell in call.__closure__ or ()]
        found = [each for each in cells if hasattr(each, "constants")]
        return sorted(f"{each.name} {each.signature} {each.constants} {each.attrs}" for each in found)

    ways = {"computed again": lambda: rule(False), "kept": lambda: rule(True)}
    ours = {name: kernels(way) for name, way in ways.items()}
    print(json.dumps({"ours": ours, "theirs": kernels(lambda: SHAPE.run("meta", rule_only=True))}))


@needs_fla
def test_the_rule_launches_what_is_compiled_ahead(tmp_path: Path) -> None:
    found = in_a_process("of_the_rule", tmp_path)
    rules = [each for name, each in CANDIDATES.items() if not name.startswith(("causal_conv1d", "l2norm"))]
    assert len(found["theirs"]) >= sum(map(len, rules))
    assert all(each == found["theirs"] for each in found["ours"].values())


def of_layers() -> None:
    """What is compiled for layers, and what a delta net, attention and a feed-forward layer of these sizes launch."""
    import torch
    from torch import nn

    from vlmdata.model.families.qwen3_5.gated_delta_net import KernelGatedDeltaNet
    from vlmdata.model.kernels.compile_ahead import collect, pretend_hopper
    from vlmdata.model.kernels.gating import SwiGLUActivation
    from vlmdata.model.kernels.shapes import run_layers
    from vlmdata.model.network.attention import KernelSelfAttention
    from vlmdata.model.parallel.packed import PackParams

    pretend_hopper()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def bare(kind: Any, **attributes: Any) -> Any:
        made = kind.__new__(kind)
        nn.Module.__init__(made)
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    def norm() -> nn.Module:
        return nn.RMSNorm(16, dtype=torch.bfloat16, device="meta")

    def layers() -> None:
        config = SimpleNamespace(num_query_groups=2, layernorm_zero_centered_gamma=True, layernorm_epsilon=1e-6)
        group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        net = bare(
            KernelGatedDeltaNet,
            config=config,
            pg_collection=SimpleNamespace(cp=group),
            cp_size=1,
            tp_size=1,
            conv_bias=False,
            recompute_norm_out=False,
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=16,
            value_head_dim=16,
            qk_dim_local_tp=32,
            v_dim_local_tp=64,
            in_proj=lambda _: (empty(300, 1, 200), None),
            conv1d=nn.Conv1d(128, 128, 4, groups=128, bias=False, dtype=torch.bfloat16, device="meta"),
            A_log=empty(4),
            dt_bias=empty(4),
            _rule=lambda query, key, value, *_: query + key + value,
            out_norm=norm(),
            out_proj=lambda x: (x, None),
        )
        pack = PackParams(qkv_format="thd")
        pack.sample_starts = torch.zeros(300, dtype=torch.int32, device="meta")
        made = [net(empty(300, 1, 32), packed_seq_params=pack)[0]]
        attention = bare(
            KernelSelfAttention,
            config=config,
            hidden_size_per_attention_head=16,
            num_query_groups_per_partition=2,
            num_attention_heads_per_partition=4,
            world_size=1,
            linear_qkv=lambda _: (empty(21, 1, 192), None),
            q_layernorm=norm(),
            k_layernorm=norm(),
            _angles=torch.empty(21, 1, 1, 8, device="meta"),
        )
        *parts, gate = attention.get_query_key_value_tensors(empty(21, 1, 32), output_gate=True)
        made += [*parts, attention._apply_output_gate(empty(21, 1, 64), gate)]
        made.append(SwiGLUActivation(None)(empty(21, 1, 192)))
        torch.autograd.backward(made, [torch.ones_like(each) for each in made])

    def kernels(run: Any) -> list[str]:
        cells = [cell.cell_contents for call in collect(run) for cell in call.__closure__ or ()]
        found = [each for each in cells if hasattr(each, "constants")]
        return sorted(f"{each.name} {each.signature} {each.constants} {each.attrs}" for each in found)

    delta_net = DeltaNetShape(tokens=300, key_heads=2, value_heads=4, key_width=16, value_width=16, taps=4)
    attention = AttentionShape(2, 2, 16, 8, gated=True, zero_centered=True, feed_forward=96)
    ahead = kernels(lambda: run_layers(delta_net, attention, "meta"))
    print(json.dumps({"ahead": ahead, "layers": kernels(layers)}))


@needs_triton
def test_layers_launch_what_is_compiled_ahead(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = in_a_process("of_layers", tmp_path)
    names = [each.partition(" ")[0] for each in found["ahead"]]
    delta_net = ["_delta_decays", "_delta_decays_backward", "_delta_heads", "_delta_heads_backward"]
    both_ways = ["_gate"] * 4 + ["_norm_and_gate"] * 2 + ["_split_norm_rotate"] * 2
    assert names == delta_net + both_ways
    assert found["layers"] == found["ahead"]


def of_the_tower() -> None:
    """What is compiled for the tower, and what a block launches."""
    import torch
    from torch import nn

    from vlmdata.model.kernels.compile_ahead import collect, pretend_hopper
    from vlmdata.model.network.residual import KernelResidual
    from vlmdata.model.network.vision import VisionBlock
    from vlmdata.model.network.vision_attention import _split_and_rotate

    pretend_hopper()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def block() -> None:
        made: Any = VisionBlock.__new__(VisionBlock)
        nn.Module.__init__(made)
        made.norm1, made.norm2 = (nn.LayerNorm(96, dtype=torch.bfloat16, device="meta") for _ in range(2))
        made.qkv = lambda x: (torch.cat([x, x, x], -1), empty(288))
        made.proj = made.linear_fc2 = lambda x: (x[:, :96], empty(96))
        made.core_attention = lambda *inputs: torch.cat(_split_and_rotate(*inputs))[:300].flatten(1)
        made.linear_fc1 = lambda x: (torch.cat([x, x], -1), empty(192))
        made.head_dim, made.residual = 16, KernelResidual(1e-6)
        images: Any = SimpleNamespace(turns=torch.empty(300, 16, device="meta"))
        out = made(empty(300, 96), images)
        out.backward(torch.ones_like(out))

    def kernels(run: Any) -> list[str]:
        cells = [cell.cell_contents for call in collect(run) for cell in call.__closure__ or ()]
        found = [each for each in cells if hasattr(each, "constants")]
        return sorted(f"{each.name} {each.signature} {each.constants} {each.attrs}" for each in found)

    print(json.dumps({"ahead": kernels(lambda: TowerKernels(6, 16, 96, 192).run("meta")), "block": kernels(block)}))


@needs_triton
def test_the_tower_launches_what_is_compiled_ahead(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = in_a_process("of_the_tower", tmp_path)
    names = [each.partition(" ")[0] for each in found["ahead"]]
    both_ways = ["_gelu_with_bias", "_gelu_with_bias_backward"] + ["_split_and_rotate"] * 2
    assert names == both_ways + ["_sum_and_norm"] * 3 + ["_sum_and_norm_backward"] * 3
    assert found["block"] == found["ahead"]


def of_cross_entropy() -> None:
    from vlmdata.model.kernels.shapes import run_cross_entropy

    run_cross_entropy(320, "meta")
    print(json.dumps({"package": "transformer_engine" in sys.modules}))


def test_cross_entropy_is_imported_without_what_loads_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a package of the same layout: the real one is only there with CUDA."""
    files = {
        "__init__": "raise OSError('no CUDA')",
        "common/__init__": "raise OSError('no CUDA')",
        "pytorch/__init__": "raise OSError('no CUDA')",
        "pytorch/triton/__init__": "raise OSError('no CUDA')",
        "common/triton/cross_entropy": "kernels = []",
        "pytorch/triton/cross_entropy": """
            import json
            from transformer_engine.common.triton.cross_entropy import kernels

            def cross_entropy_forward(logits, labels, *, label_smoothing, reduce_loss, dist_process_group, ignore_idx,
                                      overwrite_input):
                print(json.dumps([*logits.shape, logits.device.type, *labels.shape, ignore_idx, overwrite_input]))
                return None, logits, None, labels, None, 0, 1

            def cross_entropy_backward(saved, stats, target, count, gradient, *, label_smoothing, reduce_loss, rank,
                                       world_size, ignore_idx):
                print(json.dumps([*saved.shape, *gradient.shape, rank, world_size]))
        """,
    }
    for name, code in files.items():
        file = tmp_path / "site" / "transformer_engine" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(code))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    )
    found = in_a_process("of_cross_entropy", tmp_path)
    assert found["lines"] == [[2, 1, 320, "meta", 2, 1, -100, False], [2, 1, 320, 2, 1, 0, 1]]
