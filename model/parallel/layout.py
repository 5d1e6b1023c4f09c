"""Checks that a parallel layout fits the number of processes. Needs no torch."""

from __future__ import annotations


def require_layout(world: int, *, tensor: int, context: int, pipeline: int, expert: int) -> None:
    """Raises an error if the layout does not fit the number of processes.

    Args:
        world: Number of processes.
        tensor: Tensor-parallel size.
        context: Context-parallel size.
        pipeline: Number of pipeline stages.
        expert: Expert-parallel size; must divide data x context x tensor.

    Raises:
        ValueError: If the number of processes is not a multiple of the layout's, or experts cannot be split evenly.
    """
    need = tensor * context * pipeline
    if world % need:
        raise ValueError(
            f"world size {world} is not a multiple of tensor {tensor} x context {context} x pipeline {pipeline} = "
            f"{need}; start a multiple of that, or choose smaller sizes"
        )
    if (world // pipeline) % expert:
        raise ValueError(
            f"expert-parallel size {expert} does not divide the {world // pipeline} processes of a pipeline stage"
        )
