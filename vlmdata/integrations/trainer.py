"""Packs in transformers' ``Trainer`` and in trainers that are built on it: TRL, ms-swift, LLaMA-Factory, Axolotl."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError
from vlmdata.integrations.steps import step_loss, step_weight
from vlmdata.integrations.transformers import packed, token_losses
from vlmdata.loader.loader import StreamingLoader

#: Where the state of the loader is in ``trainer_state.json``, under ``stateful_callbacks``.
STATE_NAME = "vlmdata_loader"


class PackedTraining:
    """Mixin that trains a ``Trainer`` on packs. Name it first: ``class PackedSFT(PackedTraining, SFTTrainer)``.

    It replaces the trainer's data path (sampler, collator, sharding), its loss and the count it divides losses by.
    All else stays: optimizer, schedule, mixed precision, DDP and FSDP, PEFT, logs and checkpoints. The trainer's own
    datasets and collators are not used. Evaluation is the trainer's own, and knows no packs.

    Args:
        *args: Arguments of the trainer.
        loader: The packs. Create it on each process, without ``dp_rank`` and ``dp_size``.
        allow_unproven: See :func:`vlmdata.integrations.transformers.packed`.
        **kwargs: Keyword arguments of the trainer.

    Raises:
        UsageError: If an argument of the trainer does not fit the loader. It names the value that does.
    """

    loader: StreamingLoader

    def __init__(self, *args: Any, loader: StreamingLoader, allow_unproven: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        _check_arguments(trainer.args, loader)
        packed(trainer.model, allow_unproven=allow_unproven)
        self.loader = loader
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the weight of the whole step
        trainer.add_callback(_loader_position(loader))

    def get_train_dataloader(self) -> DataLoader[PackedBatch]:
        """Returns the packs of this process, without end. The trainer must not shard them."""
        return DataLoader(self.loader.as_dataset(endless=True), batch_size=None, collate_fn=_as_inputs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor]:
        """Takes the packs of an optimizer step, and returns them with the weight of all its targets."""
        packs = [next(epoch_iterator) for _ in range(num_batches)]
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
            raise UsageError("PackedTraining has no evaluation: set eval_strategy='no', and compute the loss yourself")
        pack: PackedBatch = inputs["pack"]
        return step_loss(token_losses(model, pack), pack, num_items_in_batch)


def _loader_position(loader: StreamingLoader) -> Any:
    """Makes a callback that keeps the loader's position in the trainer's state, which is in each checkpoint."""
    from transformers import TrainerCallback

    class LoaderPosition(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Notes the position between steps, where it is the same on all processes."""
            state.stateful_callbacks[STATE_NAME] = loader.state_dict()

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


def _check_arguments(args: Any, loader: StreamingLoader) -> None:
    """Refuses arguments with which a trainer would group, count or skip packs in another way."""
    accumulation = loader.plan_config.global_batch // loader.dp_size
    wanted = {
        "gradient_accumulation_steps": (accumulation, f"a step has {loader.plan_config.global_batch} packs"),
        "ignore_data_skip": (True, "else a resumed run reads all earlier packs again"),
    }
    for name, (value, reason) in wanted.items():
        if (found := getattr(args, name)) != value:
            raise UsageError(f"PackedTraining: {name} is {found!r}; it must be {value!r}: {reason}.")
    if args.max_steps <= 0:
        raise UsageError(f"PackedTraining: max_steps is {args.max_steps}; it must be set: the packs have no end.")
