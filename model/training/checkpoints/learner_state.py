"""Model, optimizer and schedule as a checkpoint has them, for whole and for fully sharded parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from vlmdata.model.training.checkpoints.model_state import content, sharded_model
from vlmdata.model.training.checkpoints.run_state import RunState, form_of, keep_settings
from vlmdata.model.training.checkpoints.sharded_state import loading_state, restore_steps, saved_state
from vlmdata.model.training.optimizer.learner import Learner, unwrapped


def state_to_save(learner: Learner) -> dict[str, Any]:
    """Returns the state of this rank for megatron-core's distributed checkpoint."""
    if learner.sharded is not None:
        return {**saved_state(learner.sharded, learner.optimizer), "schedule": learner.schedule.state_dict()}
    return _state_of_whole(learner, loading=False)


def load_state(path: Path, state: RunState, learner: Learner) -> None:
    """Loads this rank's part of a checkpoint. Fully sharded parameters and their moments are read in place."""
    load = partial(dist_checkpointing.load, checkpoint_dir=str(path), strict="raise_unexpected")
    if learner.sharded is not None:
        wanted = loading_state(learner.sharded, learner.optimizer, form_of(path, state))
        loaded = load({**wanted, "schedule": learner.schedule.state_dict()})
        restore_steps(loaded["optimizer"], learner.optimizer)
    else:
        loaded = load(_state_of_whole(learner, loading=True))
        unwrapped(learner.model[0]).load_state_dict(loaded["model"], strict=False)
        keep_settings(loaded["optimizer"], learner.optimizer)
        learner.optimizer.load_state_dict(loaded["optimizer"])
    learner.schedule.load_state_dict(loaded["schedule"])


def gather_weights(learner: Learner) -> None:
    """Completes the weights on every rank if the distributed optimizer leaves that to the next forward pass.

    After a step, a rank has new weights only for its share of the optimizer's state. With ``overlap_param_gather``, the
    others arrive during the next forward pass. This function gathers them now, like megatron-core's
    ``force_param_sync``; the next forward pass then sends nothing.
    """
    learner.optimizer.prepare_model_params_for_param_sync()
    for chunk in learner.model:
        if chunk.ddp_config.overlap_param_gather:
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)


def _state_of_whole(learner: Learner, loading: bool) -> dict[str, Any]:
    model = sharded_model(unwrapped(learner.model[0]))
    optimizer = learner.optimizer.sharded_state_dict(model, is_loading=loading, metadata=content())
    return {"model": model, "optimizer": optimizer, "schedule": learner.schedule.state_dict()}
