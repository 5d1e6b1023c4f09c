"""Identifies the frozen weights that adapters belong to, in any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch import Tensor

from vlmdata.model.lora.digest import counts, formatted, share
from vlmdata.model.network.quantized import device_of, value_of
from vlmdata.model.network.wrapping import is_of_wrapper
from vlmdata.model.training.checkpoints.model_state import sharded_model
from vlmdata.model.training.checkpoints.run_state import RunState
from vlmdata.model.training.checkpoints.sharded_state import pieces_of
from vlmdata.model.training.optimizer.learner import Learner, unwrapped
from vlmdata.model.training.settings.config import ConfigError
from vlmdata.model.weight_names.table import canonical_names


def base_digest(learner: Learner) -> str:
    """Returns the digest of a model's frozen weights (:mod:`vlmdata.model.lora.digest`). A collective."""
    total = sum(share(name, values) for name, values in _frozen(learner) if counts(name))
    device = device_of(learner.model[0])
    # Halves, since their sums over all ranks must not overflow.
    halves = torch.tensor([total % 2**32, (total >> 32) % 2**32], dtype=torch.int64, device=device)
    dist.all_reduce(halves)
    low, high = halves.tolist()
    return formatted(low + (high << 32))


def require_same_base(path: Path, state: RunState, base: str, source: str | None) -> None:
    """Raises a ConfigError if a checkpoint's adapters were trained on other weights."""
    if state.base != base:
        raise ConfigError(
            f"{path} holds adapters of other weights ({state.base}) than those of this run ({base}), which come from "
            f"{source or 'the seed, run.seed'}. Give the weights that the run began with, with --hf or --weights, in "
            "the same precision"
        )


def _frozen(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yields parts of the frozen weights, each on one rank only, with their canonical names."""
    model = unwrapped(learner.model[0])
    names = canonical_names(model)
    if learner.sharded is not None:
        for piece in pieces_of(learner.sharded, whole=True).values():
            own = piece.own
            if not own.rows.requires_grad and not is_of_wrapper(own.name) and is_main_replica(piece.place.replica_id):
                yield names[own.name], own.rows.detach().narrow(0, piece.first, piece.count)
        return
    state = sharded_model(model, whole=True)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not is_of_wrapper(name) and is_main_replica(state[name].replica_id):
            yield names[name], value_of(parameter)
