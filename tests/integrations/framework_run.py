"""Two ranks and a process without a group that run the scripts in ``docs/frameworks.md``: for ``test_frameworks.py``.

    python -m tests.integrations.framework_run DATA FOLDER FRAMEWORK…

All are forked once the frameworks are imported, which takes longer than all the rest. What they print is in
``FOLDER/log-<rank>``. The process without a group, as under plain ``python``, is ``alone``.

Writes ``FOLDER/<framework>-<rank>.json`` for each framework: the batches that were trained on and their losses in a run
of ``TOTAL`` steps, in one of ``STOP`` steps and in its continuation, and the weights after the first and the last of
these. The process without a group makes the first run alone.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import vlmdata.integrations.steps
import vlmdata.integrations.transformers
from tests.forked import fork_server_of_workers
from tests.integrations.tiny_models import tiny_model
from vlmdata import PackedBatch, StreamingLoader
from vlmdata.integrations.supported import conditional_model

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"


@dataclass(frozen=True)
class Framework:
    """A section of the guide.

    Attributes:
        heading: Of the section. Its function is ``train_<name>``.
        package: What must be installed; None if vlmdata needs it anyway.
        imports: Modules to import before ranks are forked.
        after: Another framework whose section comes before, because this one uses its code.
        alone: Whether the script runs under plain ``python``, too.
        counts_all: Whether its number of steps includes those before a resume.
        state: Whether its checkpoints have a ``trainer_state.json`` with the losses it has logged.
        saved: Whether it loads the model from a folder.
    """

    heading: str
    package: str | None
    imports: tuple[str, ...] = ()
    after: str | None = None
    alone: bool = True
    counts_all: bool = True
    state: bool = False
    saved: bool = False


FRAMEWORKS = {
    "ddp": Framework("Plain DDP", None, alone=False, counts_all=False),
    "accelerate": Framework("Accelerate", "accelerate", ("accelerate",), counts_all=False),
    "trainer": Framework("transformers' Trainer", "accelerate", ("transformers.trainer",), state=True),
    "lightning": Framework("Lightning", "lightning", ("lightning.pytorch",), alone=False),
    "trl": Framework("TRL", "trl", ("trl",), after="trainer", state=True),
    "swift": Framework("ms-swift", "swift", ("swift.trainers",), after="trainer", state=True, saved=True),
    "llamafactory": Framework(
        "LLaMA-Factory", "llamafactory", ("llamafactory.train.sft.workflow",), after="trainer", state=True, saved=True
    ),
}
#: Epochs of 3, 3 and 4 steps of 32 random samples: packs of windows are more in some epochs.
SETTINGS: dict[str, Any] = {"capacity": 600, "global_batch": 4, "max_patches": 640, "shuffle_window": 2}
TOTAL, STOP = 10, 5

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


class Watch:
    """What the scripts do: it takes the place of ``token_losses`` and ``step_loss`` for all of them.

    Attributes:
        seen: The batches in order.
        losses: What each batch adds to the mean loss of its step, times the number of ranks.
        model: The model that was called last.
    """

    def __init__(self) -> None:
        self.seen: Seen = []
        self.losses: list[float] = []
        self.model: Any = None
        self._token_losses = vlmdata.integrations.transformers.token_losses
        self._step_loss = vlmdata.integrations.steps.step_loss

    def install(self) -> None:
        for module in [module for name, module in sys.modules.items() if name.startswith("vlmdata.integrations")]:
            for name in ("token_losses", "step_loss"):
                if hasattr(module, name):
                    setattr(module, name, getattr(self, f"watched_{name}"))

    def watched_token_losses(self, model: torch.nn.Module, batch: PackedBatch, **kwargs: Any) -> torch.Tensor:
        images = len(batch.image_grid_thw)
        self.model = conditional_model(model)
        self.seen.append((batch.epoch, batch.step, batch.micro_batch, list(batch.sample_keys), images))
        return self._token_losses(model, batch, **kwargs)

    def watched_step_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = self._step_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss

    def clear(self) -> None:
        self.seen, self.losses, self.model = [], [], None


def run(name: str, data: str, folder: Path, names: dict[str, Any], watch: Watch, alone: bool) -> dict[str, Any]:
    """A whole run, and one that stops and continues."""
    framework = FRAMEWORKS[name]
    for section in filter(None, (framework.after, name)):
        scripts(FRAMEWORKS[section].heading, names)
    train: Callable[..., None] = names[f"train_{name}"]
    environment = dict(os.environ)

    def go(steps: int, place: str, resume: bool = False) -> dict[str, Any]:
        watch.clear()
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at its end
        model = str(Path(data).with_name("model")) if framework.saved else make_model()
        train(data, model, steps, str(folder / f"{name}-{place}"), resume=resume)
        return {"seen": watch.seen, "losses": watch.losses, "weights": summary(watch.model)}

    whole = go(TOTAL, "alone" if alone else "whole")
    if alone:
        return {"whole": whole}
    before = go(STOP, "parts")
    after = go(TOTAL if framework.counts_all else TOTAL - STOP, "parts", resume=True)
    found = {"whole": whole, "before": before, "after": after}
    if framework.state:
        state = json.loads((folder / f"{name}-whole" / f"checkpoint-{TOTAL}" / "trainer_state.json").read_text())
        found["logged"] = [each["loss"] for each in state["log_history"] if "loss" in each]
    return found


def main() -> None:
    data, folder, frameworks = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    modules = [module for name in frameworks for module in FRAMEWORKS[name].imports]
    for module in (*modules, "transformers.models.qwen3_5.modeling_qwen3_5", "vlmdata.integrations.trainer"):
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
            frameworks = [name for name in frameworks if FRAMEWORKS[name].alone]
        else:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        fork_server_of_workers()
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
    watch = Watch()
    watch.install()
    names = scripts("Shared code", {})
    names["make_loader"] = lambda data: StreamingLoader(data, num_workers=1, **SETTINGS)
    for name in frameworks:
        try:
            found = run(name, data, folder, names, watch, rank is None)
        except BaseException:
            found = {"error": traceback.format_exc()}
        (folder / f"{name}-{name_of(rank)}.json").write_text(json.dumps(found))
        if "error" in found:
            os._exit(1)  # the other rank may wait for this one for ever
    if rank is not None and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
