"""Arguments of transformers' ``Trainer`` that do not fit packs, or have no effect with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlmdata.errors import UsageError
from vlmdata.loader.loader import StreamingLoader

#: Arguments that the packs decide, with the values that change nothing, and what decides instead.
_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "label_smoothing_factor": ((0, 0.0, None), "the loss of packs has none"),
    "auto_find_batch_size": ((False, None), "`capacity` of the loader is the size of a pack"),
    "include_num_input_tokens_seen": ((False, "no", None), "the loader's `stats` count tokens"),
    "logging_strategy": (("no", "steps"), "packs have no end: give steps"),
    "save_strategy": (("no", "steps", "best"), "packs have no end: give steps"),
    "eval_strategy": (("no", "steps", None), "packs have no end: give steps"),
}
#: The same of the ``Trainer`` itself. Trainers that are built on it set some of them themselves.
_WITHOUT_EFFECT_PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "dataloader_num_workers": ((0,), "the loader has `num_workers` of its own"),
    "dataloader_drop_last": ((False,), "the loader has `last`"),
    "data_seed": ((None,), "the loader has `seed`"),
    "train_sampling_strategy": (("random", None), "the loader's plan is the order"),
}


def check_arguments(trainer: Any, loader: StreamingLoader, plain: bool) -> None:
    """Refuses arguments with which a trainer would group, count or skip packs in another way, or that do nothing.

    ``plain`` says that it is a ``Trainer`` itself, and not one that sets arguments and datasets of its own.

    Raises:
        UsageError: Naming the argument, its value and the value that fits.
    """
    args = trainer.args
    accumulation = loader.plan_config.global_batch // loader.dp_size
    wanted = {
        "gradient_accumulation_steps": (accumulation, f"a step has {loader.plan_config.global_batch} packs"),
        "ignore_data_skip": (True, "else a resumed run reads all earlier packs again"),
    }
    for name, (value, reason) in wanted.items():
        if (found := getattr(args, name)) != value:
            raise _refused(name, found, f"it must be {value!r}: {reason}")
    if args.max_steps <= 0:
        raise _refused("max_steps", args.max_steps, "it must be set: the packs have no end")
    for name, (values, instead) in (_WITHOUT_EFFECT | (_WITHOUT_EFFECT_PLAIN if plain else {})).items():
        if (found := getattr(args, name, values[0])) not in values:
            raise _refused(name, getattr(found, "value", found), f"it would have no effect: {instead}")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        default = next(each.default for each in dataclasses.fields(args) if each.name == name)
        if (found := getattr(args, name)) not in (1, default):
            raise _refused(
                name, found, "it would have no effect: a batch is one pack, of `capacity` tokens. Leave it out"
            )
        setattr(args, name, 1)  # logs and states count packs
    trainer._train_batch_size = args.train_batch_size
    if trainer.compute_loss_func is not None:
        raise _refused("compute_loss_func", trainer.compute_loss_func, "it would have no effect: leave it out")
    _check_data(trainer, plain)


def check_evaluation(args: Any, given: Mapping[str, Any], eval_loader: StreamingLoader | None) -> None:
    """Refuses evaluation by other means than packs, before the trainer asks for a dataset.

    Raises:
        UsageError: Naming what to give.
    """
    if given.get("eval_dataset") is not None:
        raise _refused("eval_dataset", type(given["eval_dataset"]).__name__, "give packs of it, as eval_loader")
    strategy = getattr(args, "eval_strategy", "no")
    if eval_loader is None:
        if strategy not in ("no", None) or getattr(args, "eval_on_start", False):
            raise _refused(
                "eval_strategy", getattr(strategy, "value", strategy), "give the evaluation data, as eval_loader"
            )
        return
    if given.get("compute_metrics") is not None:
        raise _refused("compute_metrics", given["compute_metrics"], "evaluation of packs has a loss, and no logits")
    plan = eval_loader.plan_config
    if plan.blend is not None or plan.schedule or plan.last == "drop":
        raise UsageError(
            "PackedTraining: eval_loader has a blend, a schedule or last='drop'; an evaluation uses each sample once."
        )


def _check_data(trainer: Any, plain: bool) -> None:
    """Refuses training data other than the loader's, but for the row without which some trainers do not begin."""
    data = trainer.train_dataset
    if data is None or (not plain and hasattr(data, "__len__") and len(data) <= 1):
        return
    placeholder = "" if plain else ", or give a dataset of one row, which is not read, if the trainer needs one"
    raise _refused("train_dataset", type(data).__name__, f"the data are the loader's packs: leave it out{placeholder}")


def _refused(name: str, found: Any, remedy: str) -> UsageError:
    return UsageError(f"PackedTraining: {name} is {found!r}; {remedy}.")
