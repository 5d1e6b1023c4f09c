"""Two ranks that run the scripts in ``docs/frameworks.md``: started by ``test_frameworks.py``.

    python -m tests.loader.framework_run DATA FOLDER FRAMEWORK…

The ranks are forked once the frameworks are imported, which takes longer than all the rest. What they print is in
``FOLDER/log-<rank>``.

Writes ``FOLDER/<framework>-<rank>.json`` for each framework: the batches that were trained on in a run of ``TOTAL``
steps, in one of ``STOP`` steps and in its continuation, and the weights after the first and the last of these.
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
from torch.nn.functional import cross_entropy

from vlmdata import PackedBatch, StreamingLoader

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
HEADINGS = {
    "ddp": "Plain DDP",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "trainer": "transformers' Trainer",
}
#: Epochs of 2, 3 and 2 steps of the chats.
SETTINGS: dict[str, Any] = {"capacity": 1000, "global_batch": 4, "max_patches": 240}
TOTAL, STOP = 7, 4

Seen = list[tuple[int, int, int, list[str]]]


#: Ids count modulo this: which rank learns from which samples does not depend on the vocabulary, which costs most.
IDS = 256


class TinyModel(torch.nn.Module):
    """Predicts the next token from the current one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(IDS, 8)
        self.output = torch.nn.Linear(8, IDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(input_ids % IDS))


def losses_of(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """The loss of each token; 0 where there is no target."""
    assert batch.labels is not None
    labels = batch.labels[0]
    return cross_entropy(model(batch.input_ids)[0], labels.where(labels < 0, labels % IDS), reduction="none")


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


def run(framework: str, data: str, folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """A whole run, and one that stops and continues."""
    seen: Seen = []

    def token_losses(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
        seen.append((batch.epoch, batch.step, batch.micro_batch, list(batch.sample_keys)))
        return losses_of(model, batch)

    names["token_losses"] = token_losses
    scripts(HEADINGS[framework], names)
    train: Callable[..., None] = names[f"train_{framework}"]
    counts_all = framework in ("lightning", "trainer")  # their number of steps includes those before a resume

    def go(steps: int, place: str, resume: bool = False) -> tuple[Seen, list[float]]:
        seen.clear()
        model = TinyModel()
        train(data, model, steps, str(folder / f"{framework}-{place}"), resume=resume)
        return list(seen), summary(model)

    whole, weights = go(TOTAL, "whole")
    before, _ = go(STOP, "parts")
    after, continued = go(TOTAL if counts_all else TOTAL - STOP, "parts", resume=True)
    return {"whole": whole, "before": before, "after": after, "weights": weights, "continued": continued}


def main() -> None:
    data, folder, frameworks = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    for module in ("accelerate", "transformers.trainer", "vlmdata.loader.loader"):
        with suppress(ImportError):
            importlib.import_module(module)
    children = [fork_rank(rank, data, folder, frameworks) for rank in range(2)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


def fork_rank(rank: int, data: str, folder: Path, frameworks: list[str]) -> int:
    """Starts a rank and returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        run_rank(rank, data, folder, frameworks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_rank(rank: int, data: str, folder: Path, frameworks: list[str]) -> None:
    """Runs the frameworks one after the other."""
    names = scripts("Shared code", {})
    names["make_loader"] = lambda data: StreamingLoader(data, num_workers=1, **SETTINGS)
    for framework in frameworks:
        try:
            found = run(framework, data, folder, names)
        except Exception:
            found = {"error": traceback.format_exc()}
        (folder / f"{framework}-{rank}.json").write_text(json.dumps(found))
        if "error" in found:
            os._exit(1)  # the other rank may wait for this one for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
