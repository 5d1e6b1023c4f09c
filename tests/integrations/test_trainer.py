"""``PackedTraining`` in transformers' Trainer: evaluation, logs, and arguments that would have no effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

import transformers

from tests.integrations.framework_run import SETTINGS, make_model, summary
from tests.integrations.tiny_models import losses_of_sample
from tests.loader.synthetic import write_dataset
from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.integrations.trainer import PackedTraining
from vlmdata.loader.loader import StreamingLoader
from vlmdata.packing.config import Blend

pytestmark = pytest.mark.slow  # imports of transformers


class PackedTrainer(PackedTraining, transformers.Trainer):
    """As in the guide."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Weighted samples to train on, and others to evaluate on."""
    folder = tmp_path_factory.mktemp("trainer")
    trained = write_dataset(folder / "trained", 4, 8, family="qwen3_5", weighted=True)
    return trained, write_dataset(folder / "evaluated", 1, 7, family="qwen3_5", weighted=True)


@pytest.fixture
def trainer(data: tuple[Path, Path], tmp_path: Path) -> Callable[..., PackedTrainer]:
    """Makes a trainer with some arguments, and some other keywords."""

    def make(keywords: dict[str, Any] | None = None, **changed: Any) -> PackedTrainer:
        loaders = [StreamingLoader(each, dp_rank=0, dp_size=1, **SETTINGS) for each in data]
        arguments = {
            "max_steps": 5,
            "gradient_accumulation_steps": SETTINGS["global_batch"],
            "ignore_data_skip": True,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
        }
        args = transformers.TrainingArguments(str(tmp_path / "run"), **(arguments | changed))
        given = {"loader": loaders[0], "eval_loader": loaders[1]} | (keywords or {})
        return PackedTrainer(make_model(), args, **given)

    return make


def loss_of(model: Any, data: Path) -> float:
    """The mean loss over all targets, sample by sample, without packs."""
    total = weight = 0.0
    dataset = VlmDataset(data)
    with torch.no_grad():
        for sample in (dataset[number] for number in range(len(dataset))):
            weights = torch.from_numpy(sample.loss_weights[1 : sample.length].copy())
            total += float((losses_of_sample(model, sample).double() * weights.double()).sum())
            weight += float(weights.double().sum())
    return total / weight


def test_the_best_model_is_found_by_the_loss_of_each_sample(
    trainer: Callable[..., PackedTrainer], data: tuple[Path, Path], tmp_path: Path
) -> None:
    made: Any = trainer(load_best_model_at_end=True, save_total_limit=1, eval_on_start=True)
    first = loss_of(made.model, data[1])
    made.train()
    losses = {line["step"]: line["eval_loss"] for line in made.state.log_history if "eval_loss" in line}
    assert list(losses) == [0, 1, 2, 3, 4, 5]
    assert losses[0] == pytest.approx(first, rel=1e-5)
    best = min(range(1, 6), key=losses.__getitem__)
    assert (made.state.best_global_step, made.state.best_metric) == (best, losses[best])
    assert loss_of(made.model, data[1]) == pytest.approx(losses[best], rel=1e-5)
    assert made.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)


def test_training_does_not_notice_evaluation(trainer: Callable[..., PackedTrainer]) -> None:
    evaluated: Any = trainer(save_strategy="no")
    alone: Any = trainer({"eval_loader": None}, eval_strategy="no", save_strategy="no")
    evaluated.train()
    alone.train()
    assert summary(evaluated.model) == summary(alone.model)


def test_logs_have_the_loaders_epochs_and_samples(
    trainer: Callable[..., PackedTrainer], data: tuple[Path, Path], tmp_path: Path
) -> None:
    made: Any = trainer(save_steps=2)
    metrics = made.train().metrics
    with StreamingLoader(data[0], dp_rank=0, dp_size=1, **SETTINGS) as loader:
        batches = [batch for _ in range(2) for batch in loader][: 5 * SETTINGS["global_batch"]]
        steps = loader.steps(0)
        assert loader.steps(1) > 5 - steps > 0, "the run ends within the second epoch"
    epochs = [line["epoch"] for line in made.state.log_history if "loss" in line]
    at = [(step // steps, step % steps / loader.steps(step // steps)) for step in range(1, 6)]
    assert epochs == pytest.approx([epoch + part for epoch, part in at])
    samples = sum(len(batch.origins) for batch in batches)
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(samples, rel=0.02)
    assert metrics["train_steps_per_second"] * metrics["train_runtime"] == pytest.approx(5, rel=0.05)
    found = [line for line in made.state.log_history if "eval_runtime" in line][-1]
    with StreamingLoader(data[1], dp_rank=0, dp_size=1, **SETTINGS) as loader:
        assert found["eval_samples_per_second"] / found["eval_steps_per_second"] == pytest.approx(
            7 / len(loader), rel=0.02
        )
    # A resumed run counts what it makes itself, and goes on in the epoch.
    resumed: Any = trainer(save_steps=2)
    metrics = resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4")).metrics
    assert metrics["train_steps_per_second"] * metrics["train_runtime"] == pytest.approx(1, rel=0.05)
    state = json.loads((tmp_path / "run" / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["epoch"] == pytest.approx(epochs[-1])


@pytest.mark.parametrize(
    ("keywords", "arguments", "problem"),
    [
        ({}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1; it would have no effect"),
        ({}, {"per_device_train_batch_size": 2}, "per_device_train_batch_size is 2; it would have no effect"),
        ({}, {"per_device_eval_batch_size": 2}, "per_device_eval_batch_size is 2; it would have no effect"),
        ({}, {"save_strategy": "epoch"}, "save_strategy is 'epoch'"),
        ({}, {"eval_strategy": "epoch"}, "eval_strategy is 'epoch'"),
        ({}, {"dataloader_num_workers": 3}, "dataloader_num_workers is 3; .* the loader has `num_workers`"),
        ({}, {"data_seed": 3}, "data_seed is 3; .* the loader has `seed`"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size is True"),
        ({}, {"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen is 'all'"),
        ({"train_dataset": [1]}, {}, "train_dataset is 'list'; the data are the loader's packs: leave it out"),
        ({"eval_dataset": [1]}, {}, "eval_dataset is 'list'; give packs of it, as eval_loader"),
        ({"eval_loader": None}, {}, "eval_strategy is 'steps'; give the evaluation data, as eval_loader"),
        ({"compute_loss_func": print}, {}, "compute_loss_func is .* it would have no effect"),
        ({"compute_metrics": print}, {}, "compute_metrics is .* has a loss, and no logits"),
        ({}, {"max_steps": -1}, "max_steps is -1; it must be set"),
        ({}, {"gradient_accumulation_steps": 3}, "gradient_accumulation_steps is 3; it must be 4: a step has 4 packs"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(
    trainer: Callable[..., PackedTrainer], keywords: dict[str, Any], arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=f"PackedTraining: {problem}"):
        trainer(keywords, **arguments)


def test_other_data_is_not_evaluated(trainer: Callable[..., PackedTrainer], data: tuple[Path, Path]) -> None:
    made: Any = trainer()
    with pytest.raises(UsageError, match="evaluates the packs of `eval_loader` only"):
        made.evaluate([1])
    with pytest.raises(UsageError, match=r"has no predict\(\)"):
        made.predict([1])
    half = StreamingLoader(data[1], dp_rank=0, dp_size=1, **SETTINGS, blend=Blend("epochs", (0.5,)))
    with half, pytest.raises(UsageError, match="eval_loader has a blend"):
        trainer({"eval_loader": half})
