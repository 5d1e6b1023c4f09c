"""Fully sharded parameters: each data-parallel rank holds some rows of every parameter, with torch's FSDP2.

A *unit* is a module whose parameters are gathered right before its forward or backward pass and released after it. All
modules of a unit then see whole parameters, whether or not they are called. Ranks that hold the same parameters share
the rows: those of the data- and context-parallel group, and for spread experts those of the experts' own group. Each
tensor-parallel rank shards its own part (docs/decisions/0064).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ParameterRows:
    """A parameter of which this rank holds some rows."""

    name: str
    parameter: nn.Parameter  # the model's parameter, a ``DTensor``
    rows: nn.Parameter  # the rows of this rank as a parameter of their own, in the same memory, for the optimizer
    start: int  # the first of these rows; of the parameter that the tensor-parallel rank holds
    group: dist.ProcessGroup  # the ranks that hold the other rows

    @property
    def stop(self) -> int:
        """The row after the last one of this rank."""
        return self.start + self.rows.shape[0]


def shard_parameters(model: Any, compute: torch.dtype, device: torch.device) -> list[ParameterRows]:
    """Shards a model's parameters in place, one unit after another. Returns all, in the order of ``named_parameters``.

    Trained parameters become float32 and are computed with in ``compute``. Gradients are summed in float32. The model,
    a :class:`vlmdata.model.network.vision_language.VisionLanguageModel`, is equal on all replicas.
    """
    marks = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    spread = parallel_state.get_expert_data_parallel_group()
    meshes = {group: DeviceMesh.from_group(group, device.type) for group in (dense, spread)}
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    )
    for module in _units(model):
        own = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
        for parameter in own:
            if parameter.requires_grad:  # frozen ones need no more digits than they are computed with
                parameter.data = parameter.data.float()
        # Gathered parameters of the whole model stay until its backward pass, which begins with them.
        unit: FSDPModule = fully_shard(
            module,
            mesh=meshes[spread if own and all(_is_spread(each) for each in own) else dense],
            reshard_after_forward=module is not model,
            mp_policy=policy,
        )
        # Sums: the step divides by the weights of all its targets.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # The gradient of a table of embeddings does not depend on it.
        unit.set_unshard_in_backward(module is not model.language.embedding)
    _gather_ahead(model)
    return [
        _rows_of(name, parameter, marks[name], spread if _marks_spread(marks[name]) else dense)
        for name, parameter in model.named_parameters()
    ]


def _gather_ahead(model: Any) -> None:
    """Lets each unit of the forward pass gather the next one before it computes.

    Otherwise a unit is gathered when the host calls it, and the device waits where the host is not ahead. Units that
    the backward pass computes again must not do so: it needs the previous unit next, and gathers that one itself.
    """
    chains = [list(model.language.decoder.layers)]
    if model.vision is not None:
        chains.append([model.vision, *model.vision.blocks])
    pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]

    def switch(on: bool) -> None:
        for unit, following in pairs:
            unit.set_modules_to_forward_prefetch([following] if on else [])

    model.register_forward_pre_hook(lambda *_: switch(True))
    model.register_forward_hook(lambda *_: switch(False))


def release_parameters(model: nn.Module) -> None:
    """Releases gathered parameters of all units, such as those that an evaluation leaves without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(model: Any) -> Iterator[nn.Module]:
    """Yields the modules that become units, inner ones first."""
    language = model.language
    if model.vision is not None:
        yield from model.vision.blocks
        yield model.vision
    layers = list(language.decoder.layers)
    predictor = getattr(language, "predictor", None)
    for layer in layers if predictor is None else [*layers, predictor.layer]:
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None and any(_is_spread(parameter) for parameter in experts.parameters()):
            yield experts
        if predictor is None or layer is not predictor.layer:
            yield layer
    if predictor is not None:
        yield predictor
    if not language.share_embeddings_and_output_weights:  # a shared table is used at both ends: it is the model's
        yield language.embedding
        yield language.output_layer
    yield model


def _is_spread(parameter: nn.Parameter) -> bool:
    """True for a parameter of an expert that only some ranks hold: megatron-core's mark."""
    return _marks_spread(vars(parameter))


def _marks_spread(marks: dict[str, Any]) -> bool:
    return not marks.get("allreduce", True)


def _rows_of(name: str, parameter: nn.Parameter, marks: dict[str, Any], group: dist.ProcessGroup) -> ParameterRows:
    """Keeps what megatron-core has noted on the parameter, such as whether tensor parallelism has cut it."""
    assert isinstance(parameter, DTensor)
    rows = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    total: int = parameter.shape[0]
    start = min(dist.get_rank(group) * -(-total // group.size()), total)
    for mark, value in (marks | {"first_row": start}).items():
        setattr(parameter, mark, value)
        setattr(rows, mark, value)
    return ParameterRows(name, parameter, rows, start, group)
