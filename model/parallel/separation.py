"""Process groups for a vision tower on processes of its own: ranks [0, N). The others hold the language model.

Each side has a grid of megatron-core's groups, which a process sees in ``megatron.core.parallel_state`` as if the other
side did not exist. The sides meet in the default group and in two groups of the ranks that exchange image rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

#: Blocks of threads that move rows on a GPU. While a rank waits for rows, these occupy as many multiprocessors; two of
#: them move the rows of a pack over NVLink in about a millisecond.
_BLOCKS = 2


@dataclass(frozen=True)
class Separation:
    """Sizes of both sides, and the groups in which they exchange image rows."""

    vision: int  # ranks that hold the tower: the first ones
    vision_tensor: int  # tensor-parallel size of the tower
    data: int  # data-parallel size of the language model
    context: int  # its context-parallel size
    tensor: int  # its tensor-parallel size
    pipeline: int  # its number of pipeline stages
    rows_group: Any = None  # ranks of the tower and of the first pipeline stage; rows of images travel here
    #: The same ranks; gradients travel here, so that neither direction waits for the other.
    gradients_group: Any = None

    @property
    def replicas(self) -> int:
        """Data-parallel size of the tower."""
        return self.vision // self.vision_tensor

    @property
    def first_stage(self) -> range:
        """Global ranks of the language model's first pipeline stage, in the order of megatron-core's grid."""
        return range(self.vision, self.vision + self.data * self.context * self.tensor)

    @property
    def exchanging(self) -> range:
        """Global ranks that exchange rows. Their ranks in both groups are the same numbers."""
        return range(self.first_stage.stop)

    @property
    def holds_tower(self) -> bool:
        """Whether this process is one of the tower's."""
        return bool(dist.get_rank() < self.vision)

    @property
    def receives_rows(self) -> bool:
        """Whether this process is on the language model's first pipeline stage."""
        return dist.get_rank() in self.first_stage

    def place(self, rank: int) -> tuple[int, int, int]:
        """Returns data-, context- and tensor-parallel rank of a rank of the first stage."""
        outer, tensor = divmod(rank - self.vision, self.tensor)
        data, context = divmod(outer, self.context)
        return data, context, tensor


_current: Separation | None = None


def separation() -> Separation | None:
    """Returns the sides; None if the ranks that hold the language model also hold the tower."""
    return _current


def forget_separation() -> None:
    """Forgets the sides."""
    global _current
    _current = None


def initialize_sides(vision: int, vision_tensor: int, language: dict[str, int], timeout_minutes: int) -> None:
    """Creates the groups of both sides, with ``vision`` ranks for the tower. All processes must call it.

    ``language`` are arguments of megatron-core's ``initialize_model_parallel``.
    """
    global _current
    make = partial(
        parallel_state.initialize_model_parallel,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout_minutes,
    )
    others = dist.get_world_size() - vision
    none_yet = _state()
    # Creating a group is a collective of all processes, so each of them creates those of both sides, in one order.
    make(vision_tensor, rank_offset=0, local_world_size=vision)
    of_tower = _state()
    vars(parallel_state).update(none_yet)
    make(**language, rank_offset=vision, local_world_size=others)
    if dist.get_rank() < vision:
        vars(parallel_state).update(of_tower)
    tensor, context, pipeline = (language[f"{x}_parallel_size"] for x in ("tensor_model", "context", "pipeline_model"))
    sizes = Separation(vision, vision_tensor, others // (tensor * context * pipeline), context, tensor, pipeline)
    rows, gradients = (_exchange_group(sizes, timedelta(minutes=timeout_minutes)) for _ in range(2))
    _current = replace(sizes, rows_group=rows, gradients_group=gradients)
    if dist.get_backend() == "nccl" and dist.get_rank() in sizes.exchanging:
        _connect(sizes, rows, to_language=True)
        _connect(sizes, gradients, to_language=False)


def _exchange_group(sizes: Separation, timeout: timedelta) -> Any:
    """Creates a group of the ranks that exchange rows."""
    options: Any = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas, options.config.max_ctas = 1, _BLOCKS
        options._timeout = timeout
    return dist.new_group(list(sizes.exchanging), timeout, pg_options=options)


def _connect(sizes: Separation, group: Any, to_language: bool) -> None:
    """Sends a number from each rank of one side to each of the other.

    NCCL connects ranks at their first message, and needs an idle GPU for that. Later, a message of one group may be
    waiting for a rank that makes the first connection of the other.
    """
    towers, others = sizes.vision, len(sizes.exchanging) - sizes.vision
    to_towers, to_others = [1] * towers + [0] * others, [0] * towers + [1] * others
    nothing = [0] * (towers + others)
    sends = sizes.holds_tower == to_language
    sent = (to_others if to_language else to_towers) if sends else nothing
    received = nothing if sends else (to_towers if to_language else to_others)
    device = torch.device("cuda", torch.cuda.current_device())
    into, values = torch.empty(sum(received), device=device), torch.zeros(sum(sent), device=device)
    dist.all_to_all_single(into, values, received, sent, group=group)
    torch.cuda.synchronize(device)


def _state() -> dict[str, Any]:
    """Returns megatron-core's groups and sizes, which it keeps in variables of a module."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
