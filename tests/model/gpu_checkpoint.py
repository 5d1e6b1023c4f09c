"""What a checkpoint holds after training on several ranks, against what the ranks hold: the same to the last bit.

On a CUDA machine, from the repository root::

    torchrun --nproc-per-node 2 --master-addr 127.0.0.1 -m tests.model.gpu_checkpoint [dp] [cp] [tp]

and the same on CPUs, where the distributed optimizer and its overlapped gather run on gloo. A line for every layout;
the exit code is the number of failures.

With ``optimizer.overlap`` a rank has new weights for its own share of the optimizer's state only, until the next
forward pass gathers the others. A checkpoint must hold all of them new, and the forward pass after it must be right; an
evaluation between steps must see all of them new, and training must not notice it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from vlmdata.model.families.qwen3_5.spec import step_flops
from vlmdata.model.parallel.environment import before_megatron

before_megatron()

from megatron.core import dist_checkpointing, parallel_state

from tests.model.helpers import make_sample, pack, small_architecture
from vlmdata.batch import PackedBatch
from vlmdata.model.families.qwen3_5.build import build_model
from vlmdata.model.network.settings import ModelSettings
from vlmdata.model.parallel import cpu_mode, groups
from vlmdata.model.training.checkpoints.checkpoint import Checkpoints
from vlmdata.model.training.checkpoints.model_state import sharded_model
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.evaluation import Evaluator
from vlmdata.model.training.optimizer.learner import Learner, build_learner, unwrapped
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.step import Stepper

#: By name, the axes of :func:`vlmdata.model.parallel.groups.initialize` that take all processes; data parallelism is
#: the rest.
LAYOUTS: dict[str, tuple[str, ...]] = {"dp": (), "cp": ("context",), "tp": ("tensor",)}
#: Kernels of a GPU may add in another order from run to run.
TOLERANCE = 1e-3 if torch.cuda.is_available() else 0.0
CUDA = torch.cuda.is_available()
#: Steps before a checkpoint, and between it, an evaluation and the end. A step in bfloat16 is slow on a CPU.
STEPS, MORE_STEPS = (3, 2) if CUDA else (1, 1)
#: Told that it is on a GPU, as a distributed optimizer is refused elsewhere: what restores it is CUDA's. Saving is not.
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class Trainee:
    """A small model in training; every rank its own packs, or its slices of the same ones.

    Args:
        layout: Arguments of :func:`vlmdata.model.parallel.groups.initialize`.
        out: The run's folder.
    """

    def __init__(self, layout: dict[str, int], out: Path):
        self.place, self.context, tensor = RankPlace.here(), layout.get("context", 1), layout.get("tensor", 1)
        self.config = self._config(out)
        if CUDA:
            from tests.model.gpu_models import architecture

            self.architecture = architecture()
        else:
            self.architecture = small_architecture()
        groups.seed_all(1234)
        settings = ModelSettings(
            context_parallel=self.context,
            tensor_parallel=tensor,
            sequence_parallel=tensor > 1,
            vision_tensor_parallel=1,
            precision="bf16",
            backend="transformer_engine" if CUDA else "torch",
        )
        model = build_model(self.architecture, settings).to(DEVICE if CUDA else "cpu")
        self.learner: Learner = build_learner(model, self.config, DEVICE, torch.bfloat16)
        self._step = Stepper(
            self.learner,
            self.place,
            micro_batches=2,
            capacity=2048,
            flops=step_flops(self.architecture, mtp=False),
            device=DEVICE if CUDA else torch.device("cpu"),
        )
        self._batches = self._packs()

    def _config(self, out: Path) -> TrainConfig:
        settings = {"lr": 1e-2, "warmup_steps": 0, "distributed": True, "overlap": True}
        return load_config(None, [("run.out", str(out)), *((f"optimizer.{k}", v) for k, v in settings.items())])

    def _packs(self) -> Iterator[PackedBatch]:
        number = 0
        while True:
            number += 1
            seed = 100 * number + 10 * self.place.dp_rank
            samples = [
                make_sample(seed, [(4, 6)], 60),
                make_sample(seed + 1, [], 40),
                make_sample(seed + 2, [(2, 2)], 20),
            ]
            batch = pack(samples, alignment=16)
            if self.context > 1:
                batch = batch.context_parallel_shard(self.place.cp_rank, self.context)
            yield batch.to(DEVICE) if CUDA else batch

    def steps(self, count: int) -> list[float]:
        """Trains; the losses."""
        return [self._step(self._batches).loss for _ in range(count)]

    def evaluate(self) -> float:
        """The loss over three packs of each rank."""
        sets = {"packs": Packs(list(itertools.islice(self._packs(), 3)))}
        device = DEVICE if CUDA else torch.device("cpu")
        evaluate = Evaluator(sets, self.learner, self.place, self.config, device)  # type: ignore[arg-type]
        found = evaluate(STEPS)
        assert found is not None
        return found.loss

    def save(self, step: int) -> Path:
        """The checkpoint of a step."""
        checkpoints = Checkpoints(self.config, self.architecture, self.place, async_save=False)
        checkpoints.agree_on_latest()
        checkpoints.save(step, self.learner, {})
        return Path(self.config.run.out) / "checkpoints" / f"step-{step:08d}"


class Packs:
    """A loader of packs in memory, as far as an evaluation needs one."""

    def __init__(self, packs: list[PackedBatch]):
        self._packs, self.datasets = packs, ([],)

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self._packs)

    def steps(self, epoch: int) -> int:
        """Packs of this rank."""
        return len(self._packs)

    def state_dict(self) -> None:
        """It has none."""

    def load_state_dict(self, state: None) -> None:
        """It always begins anew."""


def check(layout: dict[str, int], out: Path) -> str:
    """Trains, saves and compares; a line to print.

    Raises:
        AssertionError: Saying what differs.
    """
    trainee = Trainee(layout, out / "saved")
    losses = trainee.steps(STEPS)
    folder = trainee.save(STEPS)  # before an evaluation, which would gather the weights
    live = _as_the_owners_have_it(trainee.learner)
    wanted = sharded_model(unwrapped(trainee.learner.model[0]))
    for entry in wanted.values():
        if isinstance(getattr(entry, "data", None), torch.Tensor):
            entry.data = torch.full_like(entry.data, float("nan"))
    loaded = dist_checkpointing.load({"model": wanted}, str(folder))["model"]
    bad = [name for name, tensor in live.items() if not torch.equal(loaded[name].to(tensor.device), tensor)]
    assert not bad, f"{len(bad)} of {len(live)} saved weights are not those of the ranks that own them: {bad[:3]}"

    stored = dist_checkpointing.load_plain_tensors(str(folder))
    prefix = next(
        p for p in ("optimizer.state.param.", "optimizer.state.fp32_param.") if any(n.startswith(p) for n in stored)
    )
    masters = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
    bad = [name for name, master in masters.items() if not torch.equal(master.to(stored[name].dtype), stored[name])]
    assert not bad, f"{len(bad)} of {len(masters)} saved weights are not the rounded fp32 ones: {bad[:3]}"

    after = trainee.steps(MORE_STEPS)
    evaluated = trainee.evaluate()
    trainee.save(STEPS + MORE_STEPS)
    again = trainee.evaluate()
    assert abs(evaluated - again) <= TOLERANCE * again, f"evaluation loss {evaluated} before saving, {again} after it"
    after += trainee.steps(MORE_STEPS)
    undisturbed = Trainee(layout, out / "not-saved").steps(STEPS + 2 * MORE_STEPS)
    for ours, theirs in zip([*losses, *after], undisturbed, strict=True):
        assert abs(ours - theirs) <= TOLERANCE * abs(theirs), (
            f"losses {losses} {after} with saving, {undisturbed} without"
        )
    weights = f"{len(live)} weights and {len(masters)} fp32 ones are as saved"
    return f"{weights}; loss {losses[0]:.4f} to {after[-1]:.4f}, evaluated {again:.4f}"


def _as_the_owners_have_it(learner: Learner) -> dict[str, torch.Tensor]:
    """Every weight of this rank, rounded from the fp32 shares of all that hold it, which are never old."""
    named = {name: each for name, each in unwrapped(learner.model[0]).named_parameters() if each.requires_grad}
    whole = {each: torch.zeros(each.numel(), device=each.device) for each in named.values()}
    for optimizer in learner.optimizer.chained_optimizers:
        groups_of = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
        for parameters, shares in groups_of:
            for parameter, share in zip(parameters, shares, strict=True):
                part = optimizer._get_model_param_range_map(parameter)["param"]
                whole[parameter][part.start : part.end] = share.detach()
    for values in whole.values():
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return {name: whole[each].to(torch.bfloat16).view_as(each) for name, each in named.items()}


def main(names: list[str]) -> int:
    """Checks the named layouts, of all processes each; the number of failures, over ranks."""
    torch.set_num_threads(1)
    failures = 0
    with cpu_mode.cpu_mode_if_needed(), contextlib.ExitStack() as stack:
        groups.initialize()
        world, rank = dist.get_world_size(), dist.get_rank()
        box = [stack.enter_context(tempfile.TemporaryDirectory()) if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        for name in names or LAYOUTS:
            parallel_state.destroy_model_parallel()
            groups.initialize(**dict.fromkeys(LAYOUTS[name], world))  # type: ignore[arg-type]
            failed = False
            try:
                line = check(dict.fromkeys(LAYOUTS[name], world), Path(str(box[0])) / name)
            except AssertionError as caught:
                line, failed = f"FAILED: {caught}", True
            total = torch.tensor([int(failed)], device=DEVICE if CUDA else "cpu")
            dist.all_reduce(total)
            failures += int(total)
            if failed or rank == 0:
                print(f"{name} {world}, rank {rank}: {line}", flush=True)
            if total:
                break  # ranks may no longer be at the same place
        dist.barrier()
        groups.destroy()
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
