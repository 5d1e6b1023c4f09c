"""Checkpoints of fully sharded runs: each rank writes and reads its own rows, under the keys of the other layouts.

megatron-core's model says where each whole parameter lies in a checkpoint, and cuts some into parts. These are cut
again to the rows of this rank. So any layout can load what a sharded run saves, and the reverse.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor, nn

from vlmdata.model.parallel.sharding import ParameterRows, release_parameters
from vlmdata.model.training.checkpoints.model_state import OPTIMIZER_FORMAT, sharded_model
from vlmdata.model.training.optimizer.compact_adam import MOMENTS
from vlmdata.model.training.optimizer.sharded_model import ShardedModel

#: Prefixes of the keys of float32 weights that a run in bfloat16 has in addition, by the form of the optimizer's state.
_FULL_WEIGHTS = {"distributed": "param", "plain": "fp32_param"}


@dataclass(frozen=True)
class Piece:
    """Some of the rows of a parameter that this rank holds, which are contiguous in a tensor of the checkpoint."""

    own: ParameterRows  # the parameter and its rows on this rank
    first: int  # first row of the piece, counted from the first row of this rank
    count: int  # number of rows
    place: ShardedTensor  # their place in the checkpoint, without data

    def entry(self, rows: Tensor, prefix: str = "", dtype: torch.dtype | None = None) -> ShardedTensor:
        """Returns these rows of a tensor like this rank's rows as an entry of a state, in another dtype if given."""
        data = rows.detach().narrow(0, self.first, self.count).view(self.place.local_shape).to(dtype or rows.dtype)
        return replace(self.place, key=f"{prefix}{self.place.key}", data=data, dtype=data.dtype)


def pieces_of(model: ShardedModel, whole: bool = False) -> dict[str, Piece]:
    """Returns the places of this rank's rows in a checkpoint, by name of the parameter and a number.

    ``whole`` is as in :func:`vlmdata.model.training.checkpoints.model_state.sharded_model`.
    """
    by_storage = {}
    with _whole_without_memory(model.module) as stand_ins:
        state = sharded_model(model.module, whole)
        apply_factories(state)
        for own in model.held:
            by_storage[stand_ins[own.name].untyped_storage()._cdata] = own
        found: dict[str, Piece] = {}
        for place in nested_values(state):
            own = by_storage[place.data.untyped_storage()._cdata]
            piece = _piece(own, place)
            if piece is not None:
                found[f"{own.name}/{len(found)}"] = piece
    return found


def sharded_weights(model: ShardedModel, pieces: Mapping[str, Piece], saved: bool) -> dict[str, ShardedTensor]:
    """Returns the weights as a state: to be saved, in the dtype of computation, or to be loaded into the rows."""
    return {name: piece.entry(piece.own.rows, dtype=model.compute if saved else None) for name, piece in pieces.items()}


def saved_state(model: ShardedModel, optimizer: ChainedOptimizer) -> dict[str, Any]:
    """Returns model and optimizer as a state to be saved. Forgets the gradients, whose place weights take."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    pieces, parts = pieces_of(model), optimizer.chained_optimizers
    common = [_common(part, model.form["state"]) for part in parts]
    return {
        "model": sharded_weights(model, pieces, saved=True),
        "optimizer": common[0] if len(common) == 1 else dict(enumerate(common)),
        "rows": _rows_of_optimizer(pieces, _states(parts), model.form),
    }


def loading_state(model: ShardedModel, optimizer: ChainedOptimizer, form: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a sharded run loads from a checkpoint of any layout; tensors are loaded in place.

    ``form`` is that of the checkpoint's optimizer state, see
    :func:`vlmdata.model.training.checkpoints.run_state.optimizer_form`.
    """
    pieces, parts = pieces_of(model), optimizer.chained_optimizers
    _begin_states(parts)
    # Rows that are trained in bfloat16 come from the optimizer's weights, which have all digits.
    twice = {name for name, piece in pieces.items() if form["weights"] == "bf16" and piece.own.rows.requires_grad}
    kept = {name: piece for name, piece in pieces.items() if name not in twice}
    return {
        "model": sharded_weights(model, kept, saved=False),
        "rows": _rows_of_optimizer(pieces, _states(parts), form),
    }


def restore_steps(loaded: Mapping[Any, Any], optimizer: ChainedOptimizer) -> None:
    """Sets the number of steps that Adam has done, from a checkpoint's optimizer state. Settings stay the run's."""
    steps = _steps_in(loaded)
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            if "step" in group or part.optimizer.__module__.startswith("transformer_engine"):
                group["step"] = steps
            else:
                for rows in group["params"]:
                    part.optimizer.state[rows]["step"] = torch.tensor(float(steps))


def _rows_of_optimizer(
    pieces: Mapping[str, Piece], states: Mapping[Tensor, Any], form: Mapping[str, str]
) -> dict[str, ShardedTensor]:
    trained = {name: piece for name, piece in pieces.items() if piece.own.rows.requires_grad}
    found: dict[str, ShardedTensor] = {}
    for name, piece in trained.items():
        for moment in MOMENTS:
            found[f"{moment}/{name}"] = piece.entry(states[piece.own.rows][moment], f"optimizer.state.{moment}.")
        if form["state"] == "distributed" or form["weights"] == "bf16":
            prefix = f"optimizer.state.{_FULL_WEIGHTS[form['state']]}."
            found[f"weights/{name}"] = piece.entry(piece.own.rows, prefix)
    return found


def _common(part: Any, state: str) -> dict[str, Any]:
    """Returns an optimizer's settings and number of steps in megatron-core's form."""
    groups = [] if part.optimizer is None else part.optimizer.param_groups
    groups = [{name: deepcopy(value) for name, value in group.items() if name != "params"} for group in groups]
    steps = _steps_of(part)
    if state == "plain":
        return {"state": {"common_step": torch.tensor(float(steps))}, "param_groups": groups}
    for group in groups:
        group["step"] = steps
    return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": OPTIMIZER_FORMAT}


def _steps_of(part: Any) -> int:
    """Returns the number of steps of an optimizer, which may have no rows on this rank."""
    if part.optimizer is None:
        return 0
    in_groups = [int(group["step"]) for group in part.optimizer.param_groups if "step" in group]
    return max(
        [*in_groups, *(int(each["step"]) for each in part.optimizer.state.values() if "step" in each)], default=0
    )


def _steps_in(loaded: Mapping[Any, Any]) -> int:
    found = loaded.get(0, loaded)  # with several optimizers in a chain, the first
    inner = found.get("optimizer", found)
    common = inner.get("state", {}).get("common_step")
    return int(common) if common is not None else max(int(group.get("step", 0)) for group in inner["param_groups"])


def _begin_states(parts: list[Any]) -> None:
    """Creates the moments of an optimizer that has done no step."""
    for optimizer in (part.optimizer for part in parts if part.optimizer is not None):
        for rows in (rows for group in optimizer.param_groups for rows in group["params"]):
            if optimizer.state[rows]:
                continue
            if hasattr(optimizer, "initialize_state"):  # it chooses their type and place
                optimizer.initialize_state(rows, False)
            else:
                optimizer.state[rows] |= {moment: torch.zeros_like(rows) for moment in MOMENTS}


def _states(parts: list[Any]) -> dict[Tensor, Any]:
    return {rows: state for part in parts if part.optimizer is not None for rows, state in part.optimizer.state.items()}


@contextlib.contextmanager
def _whole_without_memory(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Replaces sharded parameters by whole ones on the meta device. Yields these by name."""
    release_parameters(model)
    stand_ins = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and hasattr(parameter, "first_row"):
                    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    stand_in = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                    marks = {mark: value for mark, value in vars(parameter).items() if not mark.startswith("_")}
                    vars(stand_in).update(marks)
                    replaced.append((module, name, parameter))
                    stand_ins[f"{prefix}.{name}" if prefix else name] = stand_in
                    module._parameters[name] = stand_in
        yield stand_ins
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


def _piece(own: ParameterRows, place: ShardedTensor) -> Piece | None:
    """Cuts a part of a whole parameter to the rows of this rank; None if it has none of them."""
    data = place.data
    assert data is not None
    start, odd = divmod(int(data.storage_offset()), math.prod(own.parameter.shape[1:]))
    assert data.is_contiguous()
    assert odd == 0, f"{place.key} is no range of rows of {own.name}"
    first, stop = max(start, own.start), min(start + data.shape[0], own.stop)
    if first >= stop:
        return None
    pipeline, tensor, _ = place.replica_id
    axis, ahead = place.prepend_axis_num, (1,) * place.prepend_axis_num
    offset = list(place.global_offset)
    offset[axis] += first - start
    cut = replace(
        place,
        data=None,
        local_shape=(*ahead, stop - first, *data.shape[1:]),
        global_offset=tuple(offset),
        axis_fragmentations=None,
        replica_id=(pipeline, tensor, 0),
        prepend_axis_num=0,
    )
    return Piece(own, first - own.start, stop - first, cut)
