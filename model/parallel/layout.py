"""Checks that a parallel layout fits the number of processes. Needs no torch."""

from __future__ import annotations

from vlmdata.wording import counted


def require_layout(
    world: int, *, tensor: int, context: int, pipeline: int, expert: int, vision: int = 0, vision_tensor: int = 1
) -> None:
    """Raises an error if the layout does not fit the number of processes.

    ``vision`` processes hold the vision tower and nothing else; ``expert`` must divide data x context x tensor. A
    ValueError if the number of processes is not a multiple of the layout's, or experts cannot be split evenly.
    """
    need = tensor * context * pipeline
    if vision:
        _require_sides(world, vision, vision_tensor, need)
    others = world - vision
    if others % need:
        of = f"world size {world}" if not vision else f"world size {world} less {vision} for vision, {others},"
        raise ValueError(
            f"{of} is not a multiple of tensor {tensor} x context {context} x pipeline {pipeline} = "
            f"{need}; start a multiple of that, or choose smaller sizes"
        )
    if (others // pipeline) % expert:
        raise ValueError(
            f"expert-parallel size {expert} does not divide the {others // pipeline} processes of a pipeline stage"
        )


def _require_sides(world: int, vision: int, vision_tensor: int, need: int) -> None:
    """Raises an error if both sides cannot have whole layouts, naming the sizes that fit."""
    if vision >= 0 and vision < world and vision % vision_tensor == 0 and (world - vision) % need == 0:
        return
    fitting = [size for size in range(vision_tensor, world, vision_tensor) if (world - size) % need == 0]
    instead = (
        f"sizes that do: {', '.join(map(str, fitting[:8]))}{', …' if len(fitting) > 8 else ''}"
        if fitting
        else f"start at least {counted(vision_tensor + need, 'process', 'processes')}"
    )
    raise ValueError(
        f"parallel.vision_gpus {vision} does not fit world size {world}: it must be a multiple of parallel.vision_tp "
        f"{vision_tensor} and leave a multiple of tensor x context x pipeline = {need}; {instead}"
    )
