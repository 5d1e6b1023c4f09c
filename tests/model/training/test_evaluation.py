"""Evaluation: the plain loss of every sample, in any layout, without a trace in training; and the best checkpoint."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from hypothesis import given
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.loader.rows import chat_rows
from tests.model.small_vocabulary import build_chats
from tests.model.training.conftest import evaluations_of, short_rows, steps_of
from tests.model.training.plain import plain_loss, write_checkpoint
from tests.model.training.ranks import Ranks, arguments_of
from vlmdata.errors import ConfigMismatchError
from vlmdata.model.training import evaluation
from vlmdata.model.training.checkpoints.best import BestCheckpoint
from vlmdata.model.training.checkpoints.checkpoint import Checkpoints
from vlmdata.model.training.evaluation import Evaluation, Evaluator, set_names
from vlmdata.model.training.reports.logs import RunLog, WeightsAndBiases
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.training.settings.config_loading import load_config

pytestmark = pytest.mark.slow

EXACT = ("loss", "grad_norm", "lr", "targets", "tokens", "images", "patches", "samples", "epoch", "mtp_loss")


def test_the_line_of_an_evaluation_counts_in_words() -> None:
    one = Evaluation(5, 0.5, {"validation": 0.5}, None, 1200, 1, 0.25)
    assert one.line(100) == "eval   5/100  loss 0.5000  1,200 targets  1 sample  0.25 s"


def exact(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in EXACT} for line in steps_of(out)]


def names_in(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def killed(*_: Any) -> None:
    raise KeyboardInterrupt("killed")


class TestTheLoss:
    @pytest.fixture(scope="class")
    def checkpoint(self, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
        return folder, write_checkpoint(folder, chats, "tiny-moe")

    @pytest.fixture(scope="class")
    def expected(self, checkpoint: tuple[Path, Any], validation: Path) -> tuple[float, int]:
        return plain_loss(checkpoint[1], validation)

    def test_is_transformers_loss_of_every_sample(
        self,
        run: Callable[..., Any],
        checkpoint: tuple[Path, Any],
        expected: tuple[float, int],
        validation: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        run(model__hf=str(checkpoint[0]), data__eval_paths=[str(validation)], run__eval_every=1, run__steps=1)
        before, after = evaluations_of(tmp_path / "run")
        assert (before["step"], after["step"]) == (0, 1)
        assert (before["loss"], before["targets"]) == pytest.approx(expected, rel=1e-5)
        assert before["samples"] == 7
        assert after["loss"] < before["loss"]
        assert math.isfinite(before["mtp_loss"])
        said = capsys.readouterr().out
        assert f"eval 0/1  loss {before['loss']:.4f}  mtp {before['mtp_loss']:.4f}  {expected[1]:,} targets" in said

    def test_does_not_depend_on_the_layout(
        self, checkpoint: tuple[Path, Any], expected: tuple[float, int], chats: Path, validation: Path, tmp_path: Path
    ) -> None:
        """Two pipelines of two stages, with experts over both; tests of `--hf` have the tensor-parallel ranks."""
        out = tmp_path / "run"
        layout = ("--pp", "2", "--ep", "2", "--hf", str(checkpoint[0]))
        options = ("--eval-data", str(validation), "--eval-every", "1", "--keep-best")
        ranks = Ranks(arguments_of(chats, out, *layout, *options, steps=1), tmp_path / "said", 4)
        assert ranks.wait() == [0] * 4, "".join(ranks.said(rank) for rank in range(4))
        before, after = evaluations_of(out)
        assert (before["loss"], before["targets"]) == pytest.approx(expected, rel=1e-5)
        assert json.loads((out / "checkpoints" / "best.json").read_text())["loss"] == after["loss"]


def test_training_does_not_notice(run: Callable[..., Any], whole: Path, validation: Path, tmp_path: Path) -> None:
    """Neither its numbers nor its random state, also with workers, nor when it was interrupted and resumed."""
    options = {"data__eval_paths": [str(validation)], "run__eval_every": 2, "data__workers": 1}
    run(run__steps=2, **options)
    run(resume=True, **options)
    assert exact(tmp_path / "run") == exact(whole)
    ours, theirs = (each / "checkpoints/step-00000006/random-00000.pt" for each in (tmp_path / "run", whole))
    assert ours.read_bytes() == theirs.read_bytes()
    assert [each["step"] for each in evaluations_of(tmp_path / "run")] == [0, 2, 4, 6]


def test_several_sets_have_a_loss_each(
    run: Callable[..., Any], validation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two = build_chats(write_jsonl(tmp_path / "two.jsonl", short_rows(20)[-2:]), tmp_path / "two")
    sets = {
        "data__eval_paths": [str(validation), str(two)],
        "data__paths": [str(validation)],
        "data__max_patches": None,
    }
    run(run__steps=1, run__tensorboard=True, **sets)
    (found,) = evaluations_of(tmp_path / "run")
    low, high = sorted((found["loss/validation"], found["loss/two"]))
    assert low < found["loss"] < high
    said = capsys.readouterr().out
    assert "warning: the evaluation set validation is also training data" in said
    assert "evaluation set two" not in said
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"train/loss", "eval/loss", "eval/loss/two", "eval/loss/validation", "eval/mtp_loss"} <= set(
        events.Tags()["scalars"]
    )


def test_weights_and_biases_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    logged: list[tuple[dict[str, float], int]] = []
    started = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: started))  # type: ignore[arg-type]
    log = WeightsAndBiases(load_config(None, ["run.wandb=x", f"run.out={tmp_path}"]), resumed=False)
    log.write(3, {"loss": 1.5, "loss/chat": 1.5}, "eval")
    assert logged == [({"eval/loss": 1.5, "eval/loss/chat": 1.5}, 3)]


def test_another_tokenizer_is_refused(run: Callable[..., Any], validation: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(validation, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["fingerprint"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigMismatchError, match="datasets with different tokenizers cannot be mixed"):
        run(data__eval_paths=[str(other)], run__steps=1)


def test_a_sample_that_fits_no_pack_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    row = max(chat_rows(40), key=lambda each: len(str(each["messages"][1])))
    long = build_chats(write_jsonl(tmp_path / "long.jsonl", [row]), tmp_path / "long")
    with pytest.raises(ConfigError, match=rf"data\.eval_paths {long}: 1 sample.* longer than capacity 448"):
        run(data__eval_paths=[str(long)], run__steps=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.eval_every=5"], "run.eval_every without evaluation data: give a dataset directory with --eval-data"),
        (["run.keep_best=true"], "run.keep_best without evaluation data"),
        (["data.eval_paths=['a', 'b', 'a/']"], "data.eval_paths lists a twice"),
        (["run.eval_steps=5"], "it is 'run.eval_every'"),
    ],
)
def test_settings_without_effect_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join), unique=True, max_size=5))
def test_names_are_the_shortest_that_differ(paths: list[str]) -> None:
    names = set_names(paths)
    assert len(set(names)) == len(paths)
    assert all(path.endswith(name) for path, name in zip(paths, names, strict=True))
    if len({path.rpartition("/")[2] for path in paths}) == len(paths):
        assert all("/" not in name for name in names)


class TestTheBestCheckpoint:
    @pytest.fixture
    def losses(self, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
        """What evaluations after steps shall give; 9 after any other."""
        given: dict[int, float] = {}

        def evaluate(self: Evaluator, step: int) -> Evaluation:
            return Evaluation(step, given.get(step, 9.0), {"validation": 0.0}, None, 1, 1, 0.0)

        monkeypatch.setattr(Evaluator, "__call__", evaluate)
        return given

    @pytest.fixture
    def options(self, validation: Path) -> dict[str, Any]:
        return {
            "data__eval_paths": [str(validation)],
            "run__eval_every": 1,
            "run__keep_best": True,
            "run__keep": 1,
            "data__global_batch": 1,
        }

    def test_is_kept_though_it_is_old(
        self,
        run: Callable[..., Any],
        losses: dict[int, float],
        options: dict[str, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Also where it is being written in the background when it turns out to be the best."""
        losses |= {0: 1.0, 1: 8.0, 2: 7.0, 3: math.nan, 4: 7.0}
        saved: list[int] = []
        save = Checkpoints.save
        monkeypatch.setattr(
            Checkpoints, "save", lambda self, step, *rest: saved.append(step) or save(self, step, *rest)
        )
        run(run__steps=5, run__save_every=2, run__async_save=True, **options)
        assert saved == [1, 2, 4, 5], "each step once"
        # Of step 1 nothing is left: step 2 was better. Step 4 was as good, and is too old.
        assert names_in(tmp_path / "run") == ["step-00000002", "step-00000005"]
        note = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
        assert (note["checkpoint"], note["step"], note["loss"]) == ("step-00000002", 2, 7.0)
        said = capsys.readouterr().out
        assert f"best: step 2, evaluation loss 7.0000, {tmp_path}/run/checkpoints/step-00000002" in said

    def test_is_known_to_a_resumed_run(
        self,
        run: Callable[..., Any],
        losses: dict[int, float],
        options: dict[str, Any],
        chats: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        losses |= {1: 5.0, 2: 6.0, 3: 7.0}
        run(run__steps=1, **options)
        run(run__steps=2, resume=True, **options)
        assert names_in(tmp_path / "run") == ["step-00000001", "step-00000002"]
        # Losses on other data are not comparable.
        run(run__steps=4, resume=True, **(options | {"data__eval_paths": [str(chats)]}))
        assert names_in(tmp_path / "run") == ["step-00000003", "step-00000004"]
        assert "step-00000001 was the best so far on other evaluation data" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("owner", "method"), [(Evaluator, "__call__"), (BestCheckpoint, "mark"), (RunLog, "evaluation")]
    )
    def test_is_found_by_the_evaluation_that_a_killed_run_did_not_record(
        self,
        run: Callable[..., Any],
        losses: dict[int, float],
        options: dict[str, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        method: str,
    ) -> None:
        """It dies after saving step 2, which is the best, at any place until the evaluation is recorded."""
        losses |= {2: 5.0}
        options |= {"run__save_every": 2}
        run(run__steps=1, **options)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, killed)
            with pytest.raises(KeyboardInterrupt, match="killed"):
                run(run__steps=4, resume=True, **options)
        run(run__steps=3, resume=True, **options)
        assert [each["step"] for each in evaluations_of(tmp_path / "run")] == [0, 1, 2, 3]
        assert names_in(tmp_path / "run") == ["step-00000002", "step-00000003"]
        assert json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())["step"] == 2

    def test_is_looked_for_in_a_finished_run(
        self, run: Callable[..., Any], losses: dict[int, float], options: dict[str, Any], tmp_path: Path
    ) -> None:
        run(run__steps=1, data__global_batch=1)
        run(run__steps=1, resume=True, **options)
        (found,) = evaluations_of(tmp_path / "run")
        assert (found["step"], found["loss"]) == (1, 9.0)
        assert json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())["step"] == 1


@pytest.mark.parametrize("step", [2, 3])  # in mid-run and after the last step
def test_a_signal_cuts_an_evaluation_off(
    run: Callable[..., Any],
    whole: Path,
    validation: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
) -> None:
    options = {"data__eval_paths": [str(validation)], "run__eval_every": 2}
    passes = evaluation.run_passes

    def with_signal(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return passes(*arguments, **options)

    run(run__steps=1, **options)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "run_passes", with_signal)
        outcome = run(run__steps=3, resume=True, **(options | {"run__eval_every": 2 if step == 2 else 0}))
    assert (outcome.steps, outcome.interrupted_by) == (step, signal.SIGTERM)
    said = capsys.readouterr().out
    assert f"the evaluation after step {step} was interrupted" in said
    assert f"interrupted: step {step} is saved in" in said
    run(run__steps=3, resume=True, **options)
    assert [each["step"] for each in evaluations_of(tmp_path / "run")] == [0, 1, *range(step, 4)]
    assert [line["loss"] for line in steps_of(tmp_path / "run")] == [line["loss"] for line in steps_of(whole)][:3]
