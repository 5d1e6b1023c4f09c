"""Opens what the command names, and runs the check."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlmdata.errors import UsageError
from vlmdata.integrations.check import models
from vlmdata.integrations.check.check import Result, check
from vlmdata.integrations.check.own import builder_of, is_function
from vlmdata.integrations.check.packs import check_data
from vlmdata.integrations.check.report import Subject
from vlmdata.integrations.check.run import transformers_model
from vlmdata.integrations.images import image_notes
from vlmdata.integrations.videos import video_notes
from vlmdata.storage.open import open_dataset


@dataclass(frozen=True)
class Options:
    """Options of the command.

    Attributes:
        tokens: Room of a pack.
        dtype: Name of the parameters' dtype.
        device: Where to compute.
        full: Whether to use the checkpoint.
        attention: ``attn_implementation``, or None.
        gradients: Whether to compare these, too.
        allow_unproven: Whether to accept other versions of transformers.
    """

    tokens: int
    dtype: str
    device: str
    full: bool
    attention: str | None
    gradients: bool
    allow_unproven: bool


def check_named(model: str, data: str, options: Options) -> tuple[Subject, Result]:
    """Runs a check of a model and a dataset that are given by name.

    Raises:
        UsageError: If one of them cannot be used.
        DatasetFormatError: If the dataset is missing or damaged.
    """
    dtype, device = getattr(torch, options.dtype), _device(options.device)
    dataset = open_dataset(data)
    kind, of_layers = "", 0
    if is_function(model):
        _refuse(options)
        build = builder_of(model)
        weights = "own"
    else:
        config = models.read_config(model)
        models.require_fitting(config, dataset)
        kind, of_layers = config.model_type, config.text_config.num_hidden_layers
        weights = "checkpoint" if options.full else "random"
        build = models.builder(model, config, options.full, options.attention, dtype, options.allow_unproven)
    batches = check_data(dataset, options.tokens)
    first = build()
    if (inner := transformers_model(first.model)) is not None:
        models.require_fitting(inner.config, dataset)
        kind = inner.config.model_type
    made = [first]
    result = check(lambda: made.pop() if made else build(), batches, dtype, device, gradients=options.gradients)
    named, served = [(data, dataset.manifest)], None if is_function(model) else model
    subject = Subject(
        model=model,
        model_type=kind or type(first.model).__name__,
        layers=0 if inner is None else inner.config.text_config.num_hidden_layers,
        of_layers=of_layers,
        weights=weights,
        dtype=options.dtype,
        device=options.device,
        data=data,
        samples=tuple(each.rows[0].key for each in batches.alone),
        tokens=batches.packs[0].batch.total_tokens,
        notes=(*image_notes(named, served), *video_notes(named, served)),
    )
    return subject, result


def _refuse(options: Options) -> None:
    """Refuses options that have no effect on a model of the user's."""
    given = [name for name, value in (("--full", options.full), ("--attention", options.attention)) if value]
    if given:
        raise UsageError(f"check-model: {given[0]} has no effect on the model of a function. Let the function set it.")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"check-model: --device {name!r} cannot be used: {reason}") from error
    return device
