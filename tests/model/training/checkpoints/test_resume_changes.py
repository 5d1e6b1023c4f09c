"""Going on with other settings: what may change takes effect, what cannot is refused with a way out."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing

from tests.chat_rows import write_jsonl
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import steps_of, train_here
from vlmdata import StreamingLoader
from vlmdata.model.training.checkpoints.run_state import read_state
from vlmdata.model.training.settings.config import ConfigError

pytestmark = pytest.mark.slow


def trained(chats: Path, out: Path, resume: bool = False, **settings: Any) -> Any:
    """Trains a step; the learning rate of all is the configured one."""
    constant = {
        "data__global_batch": 1,
        "optimizer__schedule": "constant",
        "optimizer__warmup_steps": 0,
        "optimizer__lr": 1e-3,
    }
    return train_here(out, chats, resume, **(constant | {"run__steps": 1} | settings))


@pytest.fixture(scope="module")
def first(one_process: None, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both saved."""
    out = tmp_path_factory.mktemp("first") / "run"
    trained(chats, out, run__steps=2, run__save_every=1)
    return out


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats without images."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]}] * 8
    return build_chats(write_jsonl(folder / "chat.jsonl", rows), folder / "texts", pad_multiple=16)


@pytest.fixture
def out(first: Path, tmp_path: Path) -> Path:
    """A copy of that run, to go on with."""
    return Path(shutil.copytree(first, tmp_path / "run"))


def checkpoint(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: tensor for name, tensor in loaded.items() if name.startswith(("vision.", "language."))}


def edited(folder: Path, change: Callable[[dict[str, Any]], object] = lambda state: None) -> None:
    """Makes a checkpoint's run.json one of an earlier version, without a checksum, and changes it."""
    state = json.loads((folder / "run.json").read_text())
    state.pop("checksum", None)
    change(state)
    (folder / "run.json").write_text(json.dumps(state))


class TestSettingsOfTheOptimizer:
    def test_of_the_run_win(self, chats: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        changed = {"lr": 5e-4, "min_lr": 5e-5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3}
        trained(chats, out, resume=True, run__steps=3, **{f"optimizer__{k}": v for k, v in changed.items()})
        said = capsys.readouterr().out
        assert all(f"optimizer.{name}: " in said for name in changed)
        assert [line["lr"] for line in steps_of(out)] == [1e-3, 1e-3, 5e-4]
        state = dist_checkpointing.load_common_state_dict(str(checkpoint(out, 3)))["optimizer"]
        assert float(state["state"]["common_step"]) == 3
        for group in state["param_groups"]:
            assert (group["max_lr"], group["min_lr"], group["lr"]) == (5e-4, 5e-5, 5e-4)
            assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
            assert group["weight_decay"] == 0.3 * group["wd_mult"]
        assert {group["wd_mult"] for group in state["param_groups"]} == {0.0, 1.0}

    def test_have_the_effect_of_adamw(self, chats: Path, out: Path) -> None:
        """The third step against the formula, in float64, from the moments before and after it."""
        trained(chats, out, resume=True, run__steps=3, optimizer__beta1=0.5, optimizer__eps=1e-3, optimizer__lr=1e-2)
        before, after = (dist_checkpointing.load_plain_tensors(str(checkpoint(out, step))) for step in (2, 3))
        name = "vision.patch_embed.weight"
        first, second = (after[f"optimizer.state.{moment}.{name}"].double() for moment in ("exp_avg", "exp_avg_sq"))
        update = (first / (1 - 0.5**3)) / ((second / (1 - 0.95**3)).sqrt() + 1e-3)
        expected = before[name].double() * (1 - 1e-2 * 0.1) - 1e-2 * update
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-5, atol=1e-8)

    @pytest.mark.parametrize("distributed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_win_in_every_layout_of_the_state(self, one_process: None, distributed: bool, dtype: torch.dtype) -> None:
        """megatron-core's plain, mixed-precision and distributed optimizers each keep their groups elsewhere."""
        from tests.model.helpers import small_architecture
        from vlmdata.model.families.qwen3_5.build import build_model
        from vlmdata.model.network.settings import ModelSettings
        from vlmdata.model.training.checkpoints.run_state import keep_settings, optimizer_form
        from vlmdata.model.training.optimizer.learner import build_learner
        from vlmdata.model.training.settings.config_loading import load_config

        def learner(*settings: str) -> Any:
            config = load_config(None, [f"optimizer.distributed={str(distributed).lower()}", *settings])
            model = build_model(
                small_architecture(), ModelSettings(precision="bf16" if dtype == torch.bfloat16 else "fp32")
            )
            # Told that it is on a GPU, as a distributed optimizer is refused elsewhere: only fused Adam restores it.
            made = build_learner(model, config, torch.device("cuda"), dtype)
            for parameter in model.parameters():
                parameter.main_grad.fill_(1.0)
            made.optimizer.step(torch.ones((), dtype=torch.float64))
            return made

        old, new = learner("optimizer.lr=1e-2"), learner("optimizer.lr=1e-3", "optimizer.eps=1e-5")
        assert optimizer_form(old) == {
            "state": "distributed" if distributed else "plain",
            "weights": "bf16" if dtype == torch.bfloat16 else "fp32",
            "adam": "torch",
        }
        loaded = copy.deepcopy(old.optimizer.state_dict())
        with pytest.raises((ValueError, KeyError)):
            new.optimizer.load_state_dict(copy.deepcopy(loaded))
        keep_settings(loaded, new.optimizer)
        new.optimizer.load_state_dict(loaded)
        for group in new.optimizer.param_groups:
            assert (group["max_lr"], group["eps"]) == (1e-3, 1e-5)


class TestWhatCannotChange:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"model__freeze": ["vision"]}, r"model.freeze: \[\] -> \['vision'\]"),
            ({"model__mtp": False}, "model.mtp: true -> false"),
            ({"run__precision": "bf16"}, "optimizer weights: fp32 -> bf16"),
        ],
    )
    def test_is_refused_with_a_way_out(
        self, chats: Path, out: Path, tmp_path: Path, settings: dict[str, Any], message: str
    ) -> None:
        newest = checkpoint(out, 2)
        with pytest.raises(ConfigError, match=f"{message}.*--weights {newest} and another --out"):
            trained(chats, out, resume=True, run__steps=3, **settings)
        if "run__precision" in settings:  # slow on a CPU
            return
        # The way out is one: with a learning rate of zero the weights are those of the checkpoint.
        trained(chats, tmp_path / "new", model__weights=str(newest), optimizer__lr=0, optimizer__min_lr=0, **settings)
        old, new = weights_of(newest), weights_of(checkpoint(tmp_path / "new", 1))
        assert new.keys() == {name for name in old if settings != {"model__mtp": False} or "predictor" not in name}
        assert all(torch.equal(new[name], old[name].to(new[name].dtype)) for name in new)

    @pytest.mark.parametrize("checksums", ["all", "none of files", "none of run.json"])
    def test_is_no_damage(self, chats: Path, out: Path, monkeypatch: pytest.MonkeyPatch, checksums: str) -> None:
        """If megatron-core cannot load sound files, the settings are to blame. Without checksums nobody knows."""

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("Missing keys: ['optimizer.state.exp_avg']")

        if checksums == "none of files":
            (checkpoint(out, 2) / "checksums-00000.json").unlink()
        if checksums == "none of run.json":
            edited(checkpoint(out, 2))
        monkeypatch.setattr("vlmdata.model.training.checkpoints.checkpoint.load_state", refuse)
        with pytest.raises(ConfigError, match=r"RuntimeError: Missing keys.*optimizer\.eps: 1e-08 -> 1e-05") as caught:
            trained(chats, out, resume=True, run__steps=3, optimizer__eps=1e-5)
        path, message = checkpoint(out, 2), str(caught.value)
        if checksums == "all":
            assert "damaged" not in message
            assert f"with --config {path}/config.toml --resume" in message
            assert f"without --resume, with --weights {path} and another --out" in message
        else:
            assert "its files seem damaged" in message
            assert "unless changed settings are the reason" in message

    def test_includes_the_vision_tower(self, one_process: None, texts: Path, tmp_path: Path) -> None:
        trained(texts, tmp_path / "run")
        with pytest.raises(ConfigError, match=r"model\.language_only: false -> true.*--weights .* and another --out"):
            trained(texts, tmp_path / "run", resume=True, run__steps=2, model__language_only=True)

    def test_reports_checkpoints_that_do_not_say_what_they_are(self, chats: Path, out: Path) -> None:
        edited(checkpoint(out, 2), lambda state: state.pop("optimizer"))
        with pytest.raises(ConfigError, match="optimizer weights: fp32 -> bf16"):
            trained(chats, out, resume=True, run__steps=3, run__precision="bf16")
        assert trained(chats, out, resume=True, run__steps=3).steps == 3

    @pytest.mark.parametrize("part", ["state", "adam"])
    def test_includes_where_the_optimizer_ran(self, chats: Path, out: Path, part: str) -> None:
        other = {"state": "distributed"} if part == "state" else {"adam": "transformer_engine"}
        edited(checkpoint(out, 2), lambda state: state["optimizer"].update(other))
        with pytest.raises(ConfigError, match=f"optimizer {part}: .* -> {'plain' if part == 'state' else 'torch'}"):
            trained(chats, out, resume=True, run__steps=3)


class TestWeightsWithoutPrediction:
    """Weights converted from files that have no multi-token prediction, for a model that has it."""

    @pytest.fixture(scope="class")
    def weights(self, one_process: None, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        from safetensors.torch import load_file, save_file

        from vlmdata.model.weights.convert import to_hf, to_megatron

        folder = tmp_path_factory.mktemp("without")
        to_hf(checkpoint(first, 2), folder / "hf")
        for file in (folder / "hf").glob("*.safetensors"):
            save_file({k: v for k, v in load_file(file).items() if not k.startswith("mtp.")}, file)
        index = folder / "hf" / "model.safetensors.index.json"
        if index.exists():
            content = json.loads(index.read_text())
            content["weight_map"] = {k: v for k, v in content["weight_map"].items() if not k.startswith("mtp.")}
            index.write_text(json.dumps(content))
        assert not to_megatron(folder / "hf", folder / "weights").mtp
        return folder / "weights"

    def test_are_refused_with_both_ways_out(self, chats: Path, weights: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no multi-token prediction weights.*mtp=false.*mtp=true"):
            trained(chats, tmp_path / "run", model__weights=str(weights))

    @pytest.mark.parametrize("predict", [False, True])
    def test_train_without_it_or_from_random_ones(
        self, chats: Path, weights: Path, first: Path, tmp_path: Path, predict: bool, capsys: Any
    ) -> None:
        out = tmp_path / "run"
        trained(chats, out, model__weights=str(weights), model__mtp=predict, optimizer__lr=0, optimizer__min_lr=0)
        assert ("they start from random values" in capsys.readouterr().out) == predict
        old, new = weights_of(checkpoint(first, 2)), weights_of(checkpoint(out, 1))
        fresh = {name for name in old if name.startswith("language.predictor.")}
        assert fresh
        assert new.keys() == (old.keys() if predict else old.keys() - fresh)
        assert all(torch.equal(new[name], old[name]) for name in old.keys() - fresh)
        if predict:
            assert not all(torch.equal(new[name], old[name]) for name in fresh)

    @pytest.mark.parametrize("of", ["run", "hf"])
    def test_of_another_model_are_reported(
        self, chats: Path, first: Path, weights: Path, tmp_path: Path, of: str
    ) -> None:
        """Also where the other one has no multi-token prediction: that is not what is wrong."""
        path = checkpoint(first, 2) if of == "run" else weights
        difference = r"they are of another model \(.*model\.text_config\.hidden_size: \d+ -> \d+"
        with pytest.raises(ConfigError, match=rf"{difference}.* here\. Select their model") as caught:
            trained(chats, tmp_path / "run", model__preset="proxy", model__weights=str(path))
        assert "{" not in str(caught.value)

    def test_of_a_run_rather_than_a_checkpoint_are_reported(self, chats: Path, first: Path, tmp_path: Path) -> None:
        for folder in (first, first / "checkpoints"):
            newest = rf"is not a distributed checkpoint; {checkpoint(first, 2)} is one"
            with pytest.raises(ConfigError, match=newest):
                trained(chats, tmp_path / "run", model__weights=str(folder))

    def test_that_are_not_there_are_reported(self, chats: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere is not a folder; give a Hugging Face checkpoint, "):
            trained(chats, tmp_path / "run", model__weights=str(tmp_path / "nowhere"))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file: Path) -> None:
    """A bit of a tensor, which still reads."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_images_for_a_model_without_a_tower_are_refused(chats: Path, texts: Path, run: Any) -> None:
    message = r"chat has [0-9]+ images and videos, but model\.language_only builds no vision tower: give data without"
    with pytest.raises(ConfigError, match=message):
        run(model__language_only=True)
    with pytest.raises(ConfigError, match=rf"data\.eval_paths {chats}: .*{message}"):
        run(data__paths=[str(texts)], data__eval_paths=[str(chats)], model__language_only=True)
    # No sample of a dataset without weight is read.
    of_texts = {"data__paths": [str(chats), str(texts)], "data__blend": [0.0, 1.0], "data__global_batch": 1}
    assert run(**of_texts, model__language_only=True, run__steps=1).steps == 1


def test_settings_that_came_after_a_checkpoint_are_no_change(chats: Path, out: Path, capsys: Any) -> None:
    edited(
        checkpoint(out, 2),
        lambda state: (state["config"]["data"].pop("eval_paths"), state["config"]["run"].pop("keep_best")),
    )
    trained(chats, out, resume=True, run__steps=2)
    said = capsys.readouterr().out
    assert "run.save_every: 1 -> 0" in said
    assert "eval_paths" not in said
    assert "keep_best" not in said


def test_nothing_to_do_is_reported(chats: Path, out: Path, capsys: Any) -> None:
    assert trained(chats, out, resume=True, run__steps=1).steps == 2
    assert "nothing to do: step 2 is saved" in capsys.readouterr().out


def test_steps_of_mostly_empty_packs_are_pointed_out(chats: Path) -> None:
    from vlmdata.model.training.loop import _empty_packs

    options = {"capacity": 2048, "num_workers": 0}
    with StreamingLoader(chats, global_batch=1, **options) as loader:
        packs = loader.plan(0).num_packs
        assert _empty_packs(loader) == []
    with StreamingLoader(chats, global_batch=2 * packs, **options) as loader:
        (line,) = _empty_packs(loader)
    assert line.startswith(f"an epoch has {packs} packs for 1 step of {2 * packs}: the remaining packs are empty")


def test_a_folder_that_another_run_is_using_is_refused(chats: Path, out: Path) -> None:
    """The lock is of processes, so that of another one is held here by a child."""
    import fcntl
    import multiprocessing

    def hold(ready: Any, done: Any) -> None:
        with (out / ".lock").open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write("process 1 on elsewhere")
            file.flush()
            ready.set()
            done.wait()

    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=hold, args=(ready, done))
    child.start()
    assert ready.wait(60)
    try:
        with pytest.raises(ConfigError, match=r"is in use by another run \(process 1 on elsewhere\): stop that one"):
            trained(chats, out, resume=True, run__steps=3)
    finally:
        done.set()
        child.join()
    assert trained(chats, out, resume=True, run__steps=3).steps == 3


class TestDamage:
    @pytest.mark.parametrize("checksums", [True, False])
    @pytest.mark.parametrize(
        ("pattern", "damage"),
        [
            ("*.distcp", _truncate),
            ("*.distcp", Path.unlink),
            (".metadata", _truncate),
            (".metadata", Path.unlink),
            ("random-*.pt", _truncate),
            ("run.json", _truncate),
            ("run.json", Path.unlink),
        ],
    )
    def test_is_reported_with_the_checkpoint_before(
        self, chats: Path, out: Path, pattern: str, damage: Callable[[Path], None], checksums: bool
    ) -> None:
        if not checksums:  # a run that was killed before they were made
            (checkpoint(out, 2) / "checksums-00000.json").unlink()
        damage(sorted(checkpoint(out, 2).glob(pattern))[0])
        with pytest.raises(ConfigError, match="cannot be loaded; its files seem damaged") as caught:
            trained(chats, out, resume=True, run__steps=3)
        assert str(checkpoint(out, 2)) in str(caught.value)
        assert "continue from step-00000001, the previous checkpoint, move step-00000002 out of" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_of_a_bit_is_reported(self, chats: Path, out: Path, tmp_path: Path, capsys: Any) -> None:
        _flip(checkpoint(out, 2) / "__0_0.distcp")
        message = r"__0_0\.distcp changed after it was written: xxh3 is \w+, expected \w+\."
        with pytest.raises(ConfigError, match=rf"{message} To continue from step-00000001"):
            trained(chats, out, resume=True, run__steps=3)
        with pytest.raises(ConfigError, match=rf"model\.weights .*{message} Convert them again, or use another"):
            trained(chats, tmp_path / "new", model__weights=str(checkpoint(out, 2)))
        trained(chats, out, resume=True, run__steps=3, run__verify=False)
        assert "not checked" not in capsys.readouterr().out

    def test_of_a_bit_of_the_run_state_is_found(self, out: Path) -> None:
        """Of any bit, however the file was written: it tells which samples come next."""
        file, sound = checkpoint(out, 2) / "run.json", read_state(checkpoint(out, 2))
        file.write_text(json.dumps(json.loads(file.read_text())))
        assert read_state(checkpoint(out, 2)) == sound
        content, generator = file.read_bytes(), random.Random(0)
        loader = range(content.index(b'"loader"'), content.index(b'"datasets"'))
        for place in [*loader, *generator.choices(range(len(content)), k=200)]:
            changed = bytearray(content)
            changed[place] ^= 1 << generator.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(ValueError, match=r"run\.json does not describe a run: "):
                read_state(checkpoint(out, 2))

    @pytest.mark.parametrize("other", [("step",), ("loader", "step"), ("loader", "epoch"), ("loader", "micro_batch")])
    def test_of_the_position_is_found_without_a_checksum(self, chats: Path, out: Path, other: tuple[str, ...]) -> None:
        """In a checkpoint of an earlier version: the folder and the plan say at which step it is."""

        def change(state: dict[str, Any]) -> None:
            place = state if len(other) == 1 else state[other[0]]
            place[other[-1]] += 1

        edited(checkpoint(out, 2), change)
        with pytest.raises(ConfigError, match=r"run\.json is of step \d, but .*move step-00000002 out of"):
            trained(chats, out, resume=True, run__steps=3)

    def test_is_not_found_without_checksums_and_that_is_reported(self, chats: Path, out: Path, capsys: Any) -> None:
        table = checkpoint(out, 2) / "checksums-00000.json"
        table.write_text("half")
        with pytest.raises(ConfigError, match=r"model\.weights .*: checksums-00000\.json is not a checksum table"):
            trained(chats, out.parent / "new", model__weights=str(checkpoint(out, 2)))
        table.unlink()
        trained(chats, out.parent / "new", model__weights=str(checkpoint(out, 2)))
        assert "step-00000002: not checked, for lack of a checksum: .metadata" in capsys.readouterr().out
        edited(checkpoint(out, 2))
        trained(chats, out, resume=True, run__steps=3)
        assert "for lack of a checksum: run.json, .metadata, __0_0.distcp, …" in capsys.readouterr().out

    def test_is_skipped_as_documented(self, chats: Path, out: Path, tmp_path: Path) -> None:
        undisturbed = weights_of(checkpoint(out, 2))
        checkpoint(out, 2).rename(tmp_path / "aside")
        trained(chats, out, resume=True, run__steps=2)
        again = weights_of(checkpoint(out, 2))
        assert all(torch.equal(again[name], undisturbed[name]) for name in undisturbed)

    def test_of_the_only_one_is_reported(self, chats: Path, out: Path) -> None:
        shutil.rmtree(checkpoint(out, 1))
        _truncate(next(checkpoint(out, 2).glob("*.distcp")))
        with pytest.raises(ConfigError, match="no earlier checkpoint: start a new run"):
            trained(chats, out, resume=True, run__steps=3)
