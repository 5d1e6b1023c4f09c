"""Packs in transformers' ``Trainer`` and in trainers that are built on it: TRL, ms-swift, LLaMA-Factory, Axolotl."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError
from vlmdata.integrations.steps import step_loss, step_weight
from vlmdata.integrations.trainer_arguments import check_arguments, check_evaluation
from vlmdata.integrations.transformers import packed, token_losses
from vlmdata.loader.loader import StreamingLoader
from vlmdata.packing.plan.epoch import EpochPlan

#: Where the state of the loader is in ``trainer_state.json``, under ``stateful_callbacks``.
STATE_NAME = "vlmdata_loader"


class PackedTraining:
    """Mixin that trains a ``Trainer`` on packs. Name it first: ``class PackedSFT(PackedTraining, SFTTrainer)``.

    It replaces the trainer's data path (sampler, collator, sharding), its loss, the count it divides losses by, and the
    loop of its evaluation. All else stays: optimizer, schedule, mixed precision, DDP and FSDP, PEFT, checkpoints, the
    best one included. Logs have the loader's epoch and its true numbers of samples. Arguments that would have no effect
    are refused.

    Args:
        *args: Arguments of the trainer.
        loader: The packs. Create it on each process, without ``dp_rank`` and ``dp_size``.
        eval_loader: Packs of the evaluation data, created likewise. ``eval_loss`` is the mean over all of their
            targets, in any packs.
        allow_unproven: See :func:`vlmdata.integrations.transformers.packed`.
        **kwargs: Keyword arguments of the trainer.

    Raises:
        UsageError: If an argument of the trainer does not fit the loader, or has no effect with it. It names the value
            that does.
    """

    loader: StreamingLoader

    def __init__(
        self,
        *args: Any,
        loader: StreamingLoader,
        eval_loader: StreamingLoader | None = None,
        allow_unproven: bool = False,
        **kwargs: Any,
    ) -> None:
        from transformers import Trainer

        check_evaluation(kwargs.get("args", args[1] if len(args) > 1 else None), kwargs, eval_loader)
        if eval_loader is not None:
            kwargs["eval_dataset"] = eval_loader.as_dataset()  # else the trainer refuses to evaluate
            self._eval_start = eval_loader.state_dict()
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_arguments(trainer, loader, plain=getattr(super().__init__, "__func__", None) is Trainer.__init__)
        packed(trainer.model, allow_unproven=allow_unproven)
        self.loader, self.eval_loader = loader, eval_loader
        self._counts = TrueCounts()
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the weight of the whole step
        trainer.add_callback(_loader_position(loader))

    def get_train_dataloader(self) -> DataLoader[PackedBatch]:
        """Returns the packs of this process, without end. The trainer must not shard them."""
        self._counts = TrueCounts()
        return DataLoader(self.loader.as_dataset(endless=True), batch_size=None, collate_fn=_as_inputs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[PackedBatch]:
        """Returns this process's packs of the evaluation data.

        Raises:
            UsageError: For other data than those of ``eval_loader``.
        """
        if self.eval_loader is None or (eval_dataset is not None and eval_dataset is not vars(self)["eval_dataset"]):
            raise UsageError("PackedTraining evaluates the packs of `eval_loader` only: give it to the trainer.")
        return DataLoader(self.eval_loader.as_dataset(), batch_size=None, collate_fn=_as_inputs)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[PackedBatch]:
        """Refuses to predict.

        Raises:
            UsageError: Always.
        """
        raise UsageError("PackedTraining has no predict(): packs keep no logits. `eval_loader` has a loss.")

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor]:
        """Takes the packs of an optimizer step, and returns them with the weight of all its targets."""
        packs = [next(epoch_iterator) for _ in range(num_batches)]
        first: PackedBatch = packs[0]["pack"]
        self._counts.add_step(self.loader.plan(first.epoch), first.step)
        return packs, step_weight([each["pack"] for each in packs])

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs: :func:`token_losses` moves a pack. Trainers look for tensors and labels in them here."""
        return inputs

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns a pack's part of the mean loss of its step."""
        if "pack" not in inputs or num_items_in_batch is None:
            raise UsageError(
                "PackedTraining computes the loss of packs of its loaders only, in train() and evaluate()."
            )
        pack: PackedBatch = inputs["pack"]
        return step_loss(token_losses(model, pack), pack, num_items_in_batch)

    def evaluation_loop(
        self,
        dataloader: DataLoader[PackedBatch],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Returns the mean loss over the targets of all evaluation data, of all processes, each sample once."""
        from transformers.trainer_utils import EvalLoopOutput

        trainer: Any = self
        assert self.eval_loader is not None
        model = trainer._wrap_model(trainer.model, training=False)
        if not trainer.accelerator._models and model is trainer.model:  # evaluated without training
            model = trainer.accelerator.prepare_model(model, evaluation_mode=True)
        model.eval()
        total = torch.zeros(2, dtype=torch.float64)  # losses and weights
        for inputs in dataloader:
            pack: PackedBatch = inputs["pack"]
            assert pack.loss_weights is not None
            with torch.no_grad(), trainer.compute_loss_context_manager():
                losses = token_losses(model, pack)
            weights = pack.loss_weights[0].double().cpu()
            total += torch.stack([losses.double().cpu() @ weights, weights.sum()])
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
        self._counts.evaluated = self.eval_loader.plan(0).micro_batches(self.eval_loader.dp_size)
        self.eval_loader.load_state_dict(self._eval_start)  # the next evaluation is of the same packs
        summed = trainer.accelerator.reduce(total.float().to(trainer.args.device), "sum").tolist()
        loss = summed[0] / summed[1] if summed[1] else float("nan")
        count, nothing = sum(len(each) for each in self.eval_loader.datasets), cast("Any", None)
        return EvalLoopOutput(
            predictions=nothing, label_ids=None, metrics={f"{metric_key_prefix}_loss": loss}, num_samples=count
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs numbers. Speeds are of the samples and steps that were made, which the trainer does not know."""
        self._counts.correct(logs)
        trainer: Any = super()
        trainer.log(logs, *args, **kwargs)


class TrueCounts:
    """What was trained on in this process's life, over all processes, and the packs of the latest evaluation."""

    def __init__(self) -> None:
        self.samples = self.steps = self.evaluated = 0

    def add_step(self, plan: EpochPlan, step: int) -> None:
        """Counts the samples of a step."""
        packs = plan.step(step)
        self.samples += int(plan.offsets[packs[-1] + 1] - plan.offsets[packs[0]])
        self.steps += 1

    def correct(self, logs: dict[str, float]) -> None:
        """Replaces the speeds in a line of the log."""
        for name in [each for each in logs if each.endswith("_runtime") and logs[each]]:
            prefix = name.removesuffix("_runtime")
            trains = prefix == "train"
            counts = {"samples": self.samples if trains else None, "steps": self.steps if trains else self.evaluated}
            for unit, count in counts.items():
                if count is not None and f"{prefix}_{unit}_per_second" in logs:
                    logs[f"{prefix}_{unit}_per_second"] = round(count / logs[name], 3)


def _loader_position(loader: StreamingLoader) -> Any:
    """Makes a callback that keeps the loader's position in the trainer's state, which is in each checkpoint."""
    from transformers import TrainerCallback

    class LoaderPosition(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Notes the position between steps, where it is the same on all processes."""
            state.stateful_callbacks[STATE_NAME] = loader.state_dict()
            at = loader.position
            state.epoch = at.epoch + at.step / loader.steps(at.epoch)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Continues from the position of the checkpoint, if the run is resumed."""
            if not state.global_step:
                return
            if STATE_NAME not in state.stateful_callbacks:
                raise UsageError(
                    f"The checkpoint of step {state.global_step} has no {STATE_NAME!r} in its trainer_state.json: it "
                    "is of a run without PackedTraining. Start a new run from its weights."
                )
            loader.load_state_dict(state.stateful_callbacks[STATE_NAME])

    return LoaderPosition()


def _as_inputs(batch: Any) -> dict[str, PackedBatch]:
    return {"pack": batch}
