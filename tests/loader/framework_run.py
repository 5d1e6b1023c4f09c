"""Two ranks and a process without a group that run the scripts in ``docs/frameworks.md``: for ``test_frameworks.py``.

    python -m tests.loader.framework_run DATA FOLDER FRAMEWORK…

All are forked once the frameworks are imported, which takes longer than all the rest. What they print is in
``FOLDER/log-<rank>``. The process without a group, as under plain ``python``, is ``alone``.

Writes ``FOLDER/<framework>-<rank>.json`` for each framework: the batches that were trained on in a run of ``TOTAL``
steps, in one of ``STOP`` steps and in its continuation, and the weights after the first and the last of these. The
process without a group makes the first run alone.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.tiny_models import tiny_model
from vlmdata import PackedBatch, StreamingLoader

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
HEADINGS = {
    "ddp": "Plain DDP",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "trainer": "transformers' Trainer",
}
#: The scripts that run under plain ``python``, too.
ALONE = ("accelerate", "trainer")
#: Epochs of 3, 4 and 3 steps of 32 random samples.
SETTINGS: dict[str, Any] = {"capacity": 600, "global_batch": 4, "max_patches": 640}
TOTAL, STOP = 8, 5

#: Of each batch: epoch, step, micro-batch, sample keys, number of images.
Seen = list[tuple[int, int, int, list[str], int]]


def make_model() -> Any:
    """The tiny model that all train."""
    return tiny_model("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def summary(model: torch.nn.Module) -> list[float]:
    """Sum and norm of every parameter."""
    parameters = [parameter.detach().double() for parameter in model.parameters()]
    return [float(number) for each in parameters for number in (each.sum(), each.norm())]


def scripts(heading: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs the code under a heading of the guide."""
    section = GUIDE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(compile(block, str(GUIDE), "exec"), names)
    return names


def run(framework: str, data: str, folder: Path, names: dict[str, Any], alone: bool) -> dict[str, Any]:
    """A whole run, and one that stops and continues."""
    seen: Seen = []
    computed = names["computed"]

    def token_losses(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
        images = len(batch.image_grid_thw)
        seen.append((batch.epoch, batch.step, batch.micro_batch, list(batch.sample_keys), images))
        return computed(model, batch)

    names["token_losses"] = token_losses
    scripts(HEADINGS[framework], names)
    train: Callable[..., None] = names[f"train_{framework}"]
    counts_all = framework in ("lightning", "trainer")  # their number of steps includes those before a resume

    environment = dict(os.environ)

    def go(steps: int, place: str, resume: bool = False) -> tuple[Seen, list[float]]:
        seen.clear()
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at its end
        model = make_model()
        train(data, model, steps, str(folder / f"{framework}-{place}"), resume=resume)
        return list(seen), summary(model)

    whole, weights = go(TOTAL, "alone" if alone else "whole")
    if alone:
        return {"whole": whole, "weights": weights}
    before, _ = go(STOP, "parts")
    after, continued = go(TOTAL if counts_all else TOTAL - STOP, "parts", resume=True)
    return {"whole": whole, "before": before, "after": after, "weights": weights, "continued": continued}


def main() -> None:
    data, folder, frameworks = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    for module in (
        "accelerate",
        "lightning.pytorch",
        "transformers.trainer",
        "transformers.models.qwen3_5.modeling_qwen3_5",
    ):
        with suppress(ImportError):
            importlib.import_module(module)
    children = [fork_rank(rank, data, folder, frameworks) for rank in (0, 1, None)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


def fork_rank(rank: int | None, data: str, folder: Path, frameworks: list[str]) -> int:
    """Starts a rank, or the process without a group, and returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(folder / f"log-{name_of(rank)}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if rank is None:
            for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[name]
            frameworks = [framework for framework in frameworks if framework in ALONE]
        else:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        run_rank(rank, data, folder, frameworks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def name_of(rank: int | None) -> str:
    """How files of a process are named."""
    return "alone" if rank is None else str(rank)


def run_rank(rank: int | None, data: str, folder: Path, frameworks: list[str]) -> None:
    """Runs the frameworks one after the other."""
    names = scripts("Shared code", {})
    names["computed"] = names["token_losses"]
    names["make_loader"] = lambda data: StreamingLoader(data, num_workers=1, **SETTINGS)
    for framework in frameworks:
        try:
            found = run(framework, data, folder, names, rank is None)
        except Exception:
            found = {"error": traceback.format_exc()}
        (folder / f"{framework}-{name_of(rank)}.json").write_text(json.dumps(found))
        if "error" in found:
            os._exit(1)  # the other rank may wait for this one for ever
    if rank is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
