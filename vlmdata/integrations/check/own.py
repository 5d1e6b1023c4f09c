"""The model under test: what a user's own forward takes and returns, and how it is found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vlmdata.batch import IGNORE_INDEX, PackedBatch
from vlmdata.errors import UsageError
from vlmdata.registry import module_named, problem_of


@dataclass(frozen=True, eq=False)
class Checked:
    """A model with its forward pass for packs: what a user's function returns to ``vlmdata check-model``.

    Attributes:
        model: The model. Its parameters are moved to the dtype and device of the check.
        forward: Computes a :class:`PackedBatch` on the model's device. Returns the loss as a tensor, or a mapping or
            object with ``loss``, ``logits`` and ``mtp_losses``, of which one is enough. ``loss`` is (T,) or (1, T), the
            unweighted loss of each token, or a scalar, sum(weight x loss) / sum(weight) with ``batch.loss_weights``.
            ``logits`` are those of all T tokens or of targets alone, (1, T, V) or (T, V). ``mtp_losses`` is one
            (T,) or (1, T) tensor per depth of multi-token prediction.
        alone: Computes a batch of one sample. None: the plain forward of transformers for the models that it has,
            else ``forward``.
    """

    model: torch.nn.Module
    forward: Callable[[PackedBatch], Any]
    alone: Callable[[PackedBatch], Any] | None = None


@dataclass(frozen=True, eq=False)
class Computed:
    """What a forward pass computed of a batch, in one form.

    Attributes:
        losses: float32 (T,), the loss of each token, or (), the weighted mean.
        logits: (targets, V), or None.
        mtp: float32 (T,) per depth of multi-token prediction.
        full: (T, V), the logits of all tokens, if the forward pass returned them.
    """

    losses: torch.Tensor
    logits: torch.Tensor | None
    mtp: tuple[torch.Tensor, ...] = ()
    full: torch.Tensor | None = None

    def detached(self) -> Computed:
        """The same numbers, without what computes gradients."""
        parts = (self.losses.detach(), None if self.logits is None else self.logits.detach())
        full = None if self.full is None else self.full.detach()
        return Computed(*parts, tuple(each.detach() for each in self.mtp), full)

    def averaged(self, batch: PackedBatch) -> Computed:
        """The same with the weighted mean loss alone."""
        return Computed(Computed(self.losses, None).objective(batch), None)

    def objective(self, batch: PackedBatch) -> torch.Tensor:
        """The weighted mean loss of the batch plus that of each depth: float32 ()."""
        assert batch.loss_weights is not None
        weights = batch.loss_weights[0].to(self.losses.device)
        total = weights.sum().clamp(min=1e-6)
        loss = self.losses if self.losses.ndim == 0 else (self.losses * weights).sum() / total
        for each in self.mtp:
            loss = loss + each.sum() / total
        return loss


def targets_of(batch: PackedBatch) -> torch.Tensor:
    """int64 (targets,), the tokens of a batch that have a label."""
    assert batch.labels is not None
    return (batch.labels[0] != IGNORE_INDEX).nonzero().flatten()


def token_losses(logits: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The loss of each token, float32 (T,), from the logits of targets (targets, V)."""
    assert batch.labels is not None
    targets = targets_of(batch).to(logits.device)
    labels = batch.labels[0].to(logits.device)[targets]
    losses = logits.new_zeros(batch.total_tokens, dtype=torch.float32)
    return losses.index_copy(0, targets, cross_entropy(logits.float(), labels, reduction="none"))


def outcome_of(found: Any, batch: PackedBatch) -> Computed:
    """Brings what a forward pass returned into one form.

    Raises:
        UsageError: If it has neither loss nor logits, or one of another shape.
    """
    total = batch.total_tokens
    if isinstance(found, torch.Tensor):
        found = {"loss": found}
    names = ("loss", "logits", "mtp_losses")
    mapped = isinstance(found, Mapping)
    loss, logits, mtp = (found.get(name) if mapped else getattr(found, name, None) for name in names)
    if loss is None and logits is None:
        raise UsageError(
            f"check-model: the forward returned {type(found).__name__} with neither 'loss' nor 'logits'. Return one of "
            "them: docs/check-model.md says in which shapes."
        )
    full = None
    if logits is not None:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets_of(batch)
        if len(logits) == total:
            full, logits = logits, logits[targets.to(logits.device)]
        elif len(logits) != len(targets):
            raise UsageError(
                f"check-model: the forward returned logits of {len(logits)} tokens. Return those of all {total} tokens "
                f"of the batch, or of its {len(targets)} targets."
            )
    if loss is None:
        assert logits is not None
        loss = token_losses(logits, batch)
    return Computed(
        _per_token(loss, total, "loss") if loss.numel() > 1 or total == 1 else loss.float().reshape(()),
        logits,
        tuple(_per_token(each, total, "mtp_losses") for each in (mtp if mtp is not None else ())),
        full,
    )


def _per_token(losses: torch.Tensor, total: int, name: str) -> torch.Tensor:
    if losses.numel() != total:
        raise UsageError(
            f"check-model: the forward returned {name} of shape {tuple(losses.shape)}. Return one number per token of "
            f"the batch ({total})" + (", or a scalar." if name == "loss" else ".")
        )
    return losses.float().reshape(total)


def is_function(name: str) -> bool:
    """Whether a model is named as ``module:function`` or ``file.py:function``."""
    return ":" in name and "://" not in name and not Path(name).exists()


def builder_of(name: str) -> Callable[[], Checked]:
    """Finds a user's function, which makes the model under test.

    Args:
        name: ``module:function`` or ``file.py:function``.

    Raises:
        UsageError: If there is no such module, file or function, or it returns something else.
    """
    place, _, function = name.rpartition(":")
    try:
        module = module_named(place)
    except Exception as error:  # the module is the user's: its top level may raise anything
        raise UsageError(
            f"check-model: cannot load {name}: {problem_of(error, place)}. Give MODEL as a folder, a hub id, "
            "module:function or file.py:function. PYTHONPATH=. finds modules of this folder."
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"check-model: {place} has no function {function!r}. Give MODEL as module:function.")

    def build() -> Checked:
        torch.manual_seed(0)
        made = found()
        if isinstance(made, tuple) and len(made) in (2, 3):
            made = Checked(*made)
        if not isinstance(made, Checked) or not isinstance(made.model, torch.nn.Module) or not callable(made.forward):
            raise UsageError(
                f"check-model: {name} returned {type(made).__name__}. Return (model, forward), a torch module and a "
                "function of a PackedBatch, or a vlmdata.integrations.check.Checked."
            )
        return made

    return build
