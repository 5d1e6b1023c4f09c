"""Fully sharded training: the same steps as one process, and checkpoints that change hands."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.training.conftest import evaluations_of, steps_of, train_here
from tests.model.training.ranks import Ranks, arguments_of
from tests.model.training.test_run import exact, killed_in_step
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config
from vlmdata.model.training.settings.early_checks import check_early
from vlmdata.model.weight_names.table import assign

pytest.importorskip("megatron.core")

FSDP = ("--set", "parallel.fsdp=true")


@pytest.mark.slow
def test_a_run_moves_between_layouts(whole: Path, chats: Path, validation: Path, tmp_path: Path) -> None:
    """One process, itself sharded, one process, two that share the rows: steps and weights of the undisturbed run."""
    from vlmdata.model.weights.convert import to_hf
    from vlmdata.model.weights.hf_files import HfTensors

    out = tmp_path / "run"
    train_here(out, chats, run__steps=1)
    train_here(out, chats, resume=True, run__steps=2, parallel__fsdp=True)
    train_here(out, chats, resume=True, run__steps=3)
    evaluated = ("--eval-data", str(validation), "--set", "run.eval_every=2", "--keep-best")
    ranks = Ranks(arguments_of(chats, out, *FSDP, *evaluated, "--resume"), tmp_path / "said", 2)
    assert ranks.wait() == [0, 0], ranks.said(0) + ranks.said(1)
    assert "2 processes: dp 2 x tp 1 x cp 1 x pp 1, ep 1, fully sharded; " in ranks.said(0)
    for found, wanted in zip(steps_of(out), steps_of(whole), strict=True):
        for name in ("loss", "grad_norm", "mtp_loss", "lr"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-5), (found["step"], name)
    assert [each["step"] for each in evaluations_of(out)] == [4, 6]  # between steps, gathered weights are let go
    folders = []
    for run in (out, whole):
        folders.append(run.parent / f"hf-{run.name}")
        to_hf(run / "checkpoints" / "step-00000006", folders[-1])
    ours, theirs = (HfTensors(folder) for folder in folders)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in ours.tensors:
        torch.testing.assert_close(ours.read(name, None), theirs.read(name, None), rtol=1e-4, atol=1e-6)
    starts = [
        train_here(tmp_path / f"from-hf-{sharded}", chats, run__steps=1, model__weights=str(folders[0]), **settings)
        for sharded, settings in ((False, {}), (True, {"parallel__fsdp": True}))
    ]
    assert starts[1].loss == pytest.approx(starts[0].loss, rel=1e-6)


@pytest.mark.slow
def test_optimizer_state_of_another_precision_is_refused(one_process: None, chats: Path, tmp_path: Path) -> None:
    """Sharded from plain, and plain from sharded."""
    out = tmp_path / "run"
    train_here(out, chats, run__steps=1)
    with pytest.raises(ConfigError, match="optimizer weights: fp32 -> bf16"):
        train_here(out, chats, resume=True, run__steps=2, run__precision="bf16", parallel__fsdp=True)
    train_here(out, chats, resume=True, run__steps=2, parallel__fsdp=True)
    with pytest.raises(ConfigError, match="optimizer weights: fp32 -> bf16"):
        train_here(out, chats, resume=True, run__steps=3, run__precision="bf16")


def rank_1_is_killed_in_step_3(rank: int) -> None:
    if rank == 1:
        killed_in_step(2, rank)  # it counts two batches per step, and a rank of two has one


@pytest.mark.slow
def test_killed_it_goes_on_as_if_nothing_had_been(chats: Path, whole: Path, tmp_path: Path) -> None:
    """One of two ranks, while a checkpoint may be being written; the other one ends by itself."""
    out, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    saving = (*FSDP, "--save-every", "1", "--set", "run.async_save=true", "--set", "run.timeout_minutes=1")
    killed = Ranks(
        arguments_of(chats, out, *saving, steps=3), tmp_path / "killed", 2, prepare=rank_1_is_killed_in_step_3
    )
    codes = killed.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == 1, killed.said(0)
    assert steps_of(out)[-1]["step"] == 2
    resumed = Ranks(arguments_of(chats, out, *saving, "--resume", steps=3), tmp_path / "resumed", 2)
    assert resumed.wait() == [0, 0], resumed.said(0) + resumed.said(1)
    alone = Ranks(arguments_of(chats, undisturbed, *FSDP, steps=3), tmp_path / "alone", 2)
    assert alone.wait() == [0, 0], alone.said(0) + alone.said(1)
    assert exact(out) == exact(undisturbed)
    for found, wanted in zip(steps_of(out), steps_of(whole)[:3], strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.slow
def test_checkpoints_are_those_of_the_distributed_optimizer(tmp_path: Path) -> None:
    """In bfloat16, entry by entry: the form of checkpoints on GPUs, which a CPU can save but not restore."""
    ranks = Ranks(["checkpoints:distributed"], tmp_path / "said", 2, script="tests/model/gpu_sharding.py")
    assert ranks.wait() == [0, 0], ranks.said(0) + ranks.said(1)
    assert " entries, 0 of them differ" in ranks.said(0)


def test_rows_of_a_whole_value_are_assigned() -> None:
    class Sharded:
        first_row, rows = 2, torch.zeros(3, 4)

        def to_local(self) -> torch.Tensor:
            return self.rows

    value = torch.arange(24.0).view(6, 4)
    parameter = Sharded()
    assign(parameter, value)
    assert torch.equal(parameter.rows, value[2:5])
    plain = torch.zeros(6, 4)
    assign(plain, value)
    assert torch.equal(plain, value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parallel.pp": 2}, "parallel.pp 2: each micro-batch of a pipeline would gather a stage's weights again. Use"),
        ({"parallel.vision_gpus": 1}, "parallel.vision_gpus 1: a rank of the tower alone may have no image"),
        ({"parallel.tp": 2}, "parallel.tp 2: the delta net's output norm needs sequence parallelism then. Add --sp"),
        ({"run.fp8": True}, "run.fp8 true: Transformer Engine would keep an FP8 copy"),
        (
            {"optimizer.overlap": False},
            "optimizer.overlap false: gradients are always reduced during the backward pass",
        ),
        ({"optimizer.distributed": True}, "optimizer.distributed true: it shards the optimizer state with"),
    ],
)
def test_what_does_not_go_together_is_refused(
    settings: dict[str, Any], said: str, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = {"data.paths": [str(chats)], "parallel.fsdp": True}
    with pytest.raises(ConfigError, match=r"parallel\.fsdp does not go together with") as caught:
        check_early(load_config(None, list((given | settings).items())))
    assert said in str(caught.value)
    check_early(load_config(None, list(given.items())))


@pytest.mark.parametrize(("setting", "value"), [("moments", "bf16"), ("offload", True)])
def test_compact_moments_need_it(setting: str, value: Any, chats: Path) -> None:
    given = [("data.paths", [str(chats)]), (f"optimizer.{setting}", value)]
    with pytest.raises(ConfigError, match=rf"optimizer\.{setting}=.* needs fully sharded parameters: add --set paral"):
        check_early(load_config(None, given))
    check_early(load_config(None, [*given, ("parallel.fsdp", True)]))


def test_moments_on_the_host_are_not_written_in_the_background(chats: Path) -> None:
    given = [("data.paths", [str(chats)]), ("parallel.fsdp", True), ("optimizer.offload", True)]
    check_early(load_config(None, given))
    with pytest.raises(ConfigError, match=r"optimizer\.offload does not go together with run\.async_save true"):
        check_early(load_config(None, [*given, ("run.async_save", True)]))


def test_a_parameter_takes_16_bytes_and_nothing_is_held_twice(one_process: None, tmp_path: Path) -> None:
    """Weights of 4 bytes after building; after a step gradients of 4 and moments of 8, until it is saved."""
    from tests.model.gpu_sharding import Run, small, small_pack

    def live() -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
        return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found}.values())

    before = live()
    settings = {"run.precision": "bf16", "model.recompute": "full"}
    run = Run(small(False), tmp_path, True, settings, small_pack, 1, weights=False)
    assert run.learner.sharded is not None
    count = sum(own.rows.numel() for own in run.learner.sharded.held)
    assert live() - before == pytest.approx(4 * count, rel=0.01)
    run.steps(0, 2)
    assert live() - before == pytest.approx(16 * count, rel=0.03)
    run.checkpoints.agree_on_latest()
    run.checkpoints.save(2, run.learner, {})
    run.checkpoints.wait()
    assert live() - before == pytest.approx(12 * count, rel=0.03)


def test_a_group_of_one_rank_sends_nothing(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would allocate for it at the end of the first step, on a GPU that may be full then."""
    from vlmdata.model.training.optimizer.learner import TargetWeights

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of one rank")

    for name in ("broadcast", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    assert TargetWeights().over_all_ranks(torch.device("cpu")).item() == 0


def test_only_one_layer_is_gathered_at_a_time(one_process: None) -> None:
    """Of the decoder and of the tower, in both passes and with full recomputation; afterwards none."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    from tests.model.helpers import mixed_samples, pack, small_architecture
    from vlmdata.model.families import spec_of
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.training.optimizer.sharded_model import ShardedModel

    architecture = small_architecture(mtp=1)
    model: Any = spec_of(architecture).build(architecture, ModelSettings(recompute="full"))
    names = [name for name, _ in model.named_parameters()]
    wrapped = ShardedModel(model.train(), torch.float32, torch.device("cpu"))
    assert [name for name, _ in wrapped.named_parameters()] == names
    layers = [*model.vision.blocks, *model.language.decoder.layers, model.language.predictor]

    def gathered() -> int:
        return sum(not all(isinstance(each, DTensor) for each in layer.parameters()) for layer in layers)

    seen: list[int] = []

    def note(*_: Any) -> None:
        seen.append(gathered())

    for layer in layers:
        inner = next(each for each in layer.modules() if each is not layer and isinstance(each, nn.Module))
        inner.register_forward_pre_hook(note)
    output = wrapped(pack(mixed_samples()))
    forward = len(seen)
    assert forward == len(layers)
    output.sum().backward()
    assert len(seen) == forward + len(layers) - len(model.vision.blocks)  # once more, to recompute
    assert set(seen[:forward]) == {1}
    assert max(seen) <= 2  # a layer's weights may stay until the one before it has computed again
    assert gathered() == 0
    wrapped.finish_grad_sync()
    assert all(own.rows.main_grad.shape == own.rows.shape for own in wrapped.held)


def test_a_layer_is_gathered_before_the_one_in_front_of_it_computes(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward pass. The backward pass gathers none again that it is done with."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from tests.model.helpers import mixed_samples, pack, small_architecture
    from vlmdata.model.families import spec_of
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.training.optimizer.sharded_model import ShardedModel

    architecture = small_architecture(layers=4)
    settings = ModelSettings(recompute="full", vision_recompute=True)
    model: Any = spec_of(architecture).build(architecture, settings)
    wrapped = ShardedModel(model.train(), torch.float32, torch.device("cpu"))
    seen: list[tuple[str, str]] = []
    gather: Any = FSDPParamGroup.unshard

    def noted(group: Any, *given: Any) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            seen.append(("gather", group._module_fqn))
        gather(group, *given)

    monkeypatch.setattr(FSDPParamGroup, "unshard", noted)
    chains = {"vision.blocks": model.vision.blocks, "language.decoder.layers": model.language.decoder.layers}
    for name, layers in chains.items():
        for number, layer in enumerate(layers):
            inner = next(each for each in layer.modules() if each is not layer)
            inner.register_forward_pre_hook(lambda *_, name=f"{name}.{number}": seen.append(("compute", name)))
    output = wrapped(pack(mixed_samples()))
    forward, seen = seen, seen[:0]
    output.sum().backward()
    for name, layers in chains.items():
        for number in range(len(layers) - 1):
            following = forward.index(("gather", f"{name}.{number + 1}"))
            assert following < forward.index(("compute", f"{name}.{number}"))
        again = [each for kind, each in seen if kind == "gather" and each.startswith(name)]
        assert again == [f"{name}.{number}" for number in reversed(range(len(layers)))]
