"""What must hold on CUDA: Transformer Engine against plain torch, with equal weights, on one packed batch.

On a CUDA machine with megatron-core, Transformer Engine and flash-linear-attention, from the repository root::

    python -m tests.model.gpu_checks                       # one GPU
    torchrun --nproc-per-node 2 -m tests.model.gpu_checks  # layouts of two

A word after the command selects the checks whose names contain it.

The measure is the error against torch in float32: that of Transformer Engine in bfloat16 must be no more than
``FACTOR`` times that of torch in bfloat16, tensor by tensor, since both round alike and only orders of summation
differ.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import math
import re
import sys
import time
import traceback
from typing import Any

import torch

from vlmdata.model.parallel.environment import before_megatron

before_megatron()

from tests.model.gpu_experts import in_the_buffers, products_agree
from tests.model.gpu_gradients import small_gradients, sums_optimizer
from tests.model.gpu_kernels import KERNELS
from tests.model.gpu_layouts import TWO_GPUS
from tests.model.gpu_lora import adapters_against_torch
from tests.model.gpu_models import architecture, batch, run, videos, with_heads_of_64
from tests.model.helpers import relative
from vlmdata.batch import PackedBatch
from vlmdata.model.kernels.configurations import choose_configurations
from vlmdata.model.network.megatron_config import vision_config
from vlmdata.model.network.settings import ModelSettings
from vlmdata.model.network.vision_attention import FlashAttention
from vlmdata.model.parallel import groups

FACTOR = 4.0


def of_all_experts(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of a layer's experts as one."""
    joined: dict[str, list[torch.Tensor]] = {}
    for name in sorted(gradients):
        joined.setdefault(re.sub(r"local_experts\.\d+", "local_experts", name), []).append(gradients[name].flatten())
    return {name: torch.cat(parts) for name, parts in joined.items()}


def engine_against_torch(
    moe: bool,
    vision_attention: str = "transformer_engine",
    weighted: bool = False,
    family: str = "qwen3_5",
    compiled: bool = False,
    packed: PackedBatch | None = None,
) -> None:
    """One GPU, in bfloat16, judged by torch in float32; weighted losses with the fused cross-entropy of training."""
    wanted, packed = architecture(moe, family), packed or batch(weighted)
    if vision_attention == "flash_attention_4":
        wanted = with_heads_of_64(wanted)
    exact_loss, exact, exact_metrics = run(wanted, packed, ModelSettings())
    plain_loss, plain, _ = run(wanted, packed, ModelSettings(precision="bf16"))
    settings = ModelSettings(
        backend="transformer_engine",
        precision="bf16",
        vision_attention=vision_attention,
        fused_cross_entropy=weighted,
        compile=compiled,
    )
    loss, found, metrics = run(wanted, packed, settings)
    print(f"  loss {exact_loss:.3f} exact, {plain_loss:.3f} torch, {loss:.3f} engine; {exact_metrics} {metrics}")
    assert set(found) == set(exact), set(found) ^ set(exact)
    # A token that bfloat16 sends to another expert changes two experts much and all of them together little.
    found, plain, exact = (of_all_experts(each) for each in (found, plain, exact))
    errors = {name: (relative(found[name], exact[name]), relative(plain[name], exact[name])) for name in exact}
    worst = sorted(errors, key=lambda name: -errors[name][0])[:5]
    print(
        "  worst:",
        *(f"{name} engine {errors[name][0]:.1e} torch {errors[name][1]:.1e}" for name in worst),
        sep="\n    ",
    )
    ratio, name = max((engine / max(torchs, 4e-3), name) for name, (engine, torchs) in errors.items())
    print(f"  largest ratio, engine over torch (or one rounding): {ratio:.1f}, {name}")
    assert abs(loss / exact_loss - 1) < 5e-3  # about one rounding
    bad = [name for name, (engine, torchs) in errors.items() if not engine <= FACTOR * max(torchs, 4e-3) < math.inf]
    assert not bad, bad


def float_patches_and_recompute(family: str = "qwen3_5") -> None:
    """Recomputed blocks and layers give the same gradients."""
    wanted, packed = architecture(family=family), batch()
    settings = ModelSettings(backend="transformer_engine", precision="bf16")
    _, plain, _ = run(wanted, packed, settings)
    _, again, _ = run(wanted, packed, dataclasses.replace(settings, recompute="full", vision_recompute=True))
    worst = max((relative(again[name], plain[name]), name) for name in plain)
    print("  worst:", worst)
    assert worst[0] < 0.05


def main() -> int:
    """Runs what the number of GPUs allows; the exit status is the number of failures."""
    faulthandler.dump_traceback_later(550, exit=True)
    groups.initialize()
    world = torch.distributed.get_world_size()
    # As in a run: of the kernels' many configurations, Triton chooses among few.
    choose_configurations(128, 128, torch.cuda.get_device_capability())
    checks: dict[str, Any] = KERNELS | {
        "small gradients": small_gradients,
        "sums optimizer": sums_optimizer,
        "experts, one product": products_agree,
        "experts, in the buffers": in_the_buffers,
        "engine against torch, dense": lambda: engine_against_torch(moe=False),
        "engine against torch, experts": lambda: engine_against_torch(moe=True),
        "with torch's compiler, dense": lambda: engine_against_torch(moe=False, compiled=True),
        "with torch's compiler, experts": lambda: engine_against_torch(moe=True, compiled=True),
        "weighted losses, dense": lambda: engine_against_torch(moe=False, weighted=True),
        "weighted losses, experts": lambda: engine_against_torch(moe=True, weighted=True),
        "recompute": float_patches_and_recompute,
        "Qwen3-VL, dense": lambda: engine_against_torch(moe=False, family="qwen3_vl"),
        "Qwen3-VL, experts": lambda: engine_against_torch(moe=True, family="qwen3_vl"),
        "Qwen3-VL, recompute": lambda: float_patches_and_recompute("qwen3_vl"),
        "adapters, dense": lambda: adapters_against_torch(False),
        "adapters, experts": lambda: adapters_against_torch(True),
        "adapters, dense, recomputed": lambda: adapters_against_torch(False, recompute="full"),
        "adapters, dense, norms recomputed": lambda: adapters_against_torch(False, recompute="selective"),
        "adapters, NF4, dense": lambda: adapters_against_torch(False, storage="nf4"),
        "adapters, NF4, experts": lambda: adapters_against_torch(True, storage="nf4"),
        "adapters, NF4, Qwen3-VL, experts, recomputed": lambda: adapters_against_torch(True, "qwen3_vl", "full", "nf4"),
        "adapters, Qwen3-VL, dense": lambda: adapters_against_torch(False, "qwen3_vl"),
        "adapters, Qwen3-VL, experts, recomputed": lambda: adapters_against_torch(True, "qwen3_vl", "full"),
        "videos": lambda: engine_against_torch(moe=False, packed=videos()),
        "Qwen3-VL, videos": lambda: engine_against_torch(moe=False, family="qwen3_vl", packed=videos()),
    }
    if FlashAttention.is_usable(vision_config(with_heads_of_64(architecture()), ModelSettings(precision="bf16"))):
        checks["FlashAttention 4 in the tower"] = lambda: engine_against_torch(False, "flash_attention_4")
        checks["FlashAttention 4 in the tower, videos"] = lambda: engine_against_torch(
            False, "flash_attention_4", packed=videos()
        )
    else:
        print("FlashAttention 4 is not installed: its check is left out")
    if world > 1:
        checks = TWO_GPUS
    checks = {name: check for name, check in checks.items() if all(word in name for word in sys.argv[1:])}
    failures = 0
    for name, check in checks.items():
        print(f"== {name}", flush=True)
        begun = time.perf_counter()
        try:
            check()
            print(f"  holds, {time.perf_counter() - begun:.0f} s", flush=True)
        except Exception:
            failures += 1
            traceback.print_exc()
            if world > 1:
                break  # the other rank may hang in a collective
    print(f"{failures} of {len(checks)} failed", flush=True)
    groups.destroy()
    return failures


if __name__ == "__main__":
    sys.exit(main())
