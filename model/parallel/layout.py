"""Which numbers of processes a parallel layout can use. Nothing here needs torch."""

from __future__ import annotations


def require_layout(world: int, *, tensor: int, context: int, pipeline: int, expert: int) -> None:
    """Refuses a number of processes that cannot be laid out.

    Args:
        world: Processes.
        tensor: Tensor-parallel size.
        context: Context-parallel size.
        pipeline: Pipeline stages.
        expert: Expert-parallel size; divides data x context x tensor.

    Raises:
        ValueError: If the processes are no multiple of the layout's, or the experts cannot be spread over them.
    """
    need = tensor * context * pipeline
    if world % need:
        raise ValueError(
            f"{world} processes are no multiple of tensor {tensor} x context {context} x pipeline {pipeline} = {need}; "
            "start a multiple of that, or choose smaller sizes"
        )
    if (world // pipeline) % expert:
        raise ValueError(
            f"expert-parallel size {expert} does not divide the {world // pipeline} processes of a pipeline stage"
        )
