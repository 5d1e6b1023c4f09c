"""The loader of one rank: its packs, its slice of them, and the parts that it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmdata import Blend, LoaderConfig, PackedBatch, StreamingLoader
from vlmdata.errors import UsageError
from vlmdata.format.manifest import Manifest
from vlmdata.loader.data import open_data
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import spec_of
from vlmdata.model.training.settings.config import ConfigError, TrainConfig
from vlmdata.model.training.settings.early_checks import require_data_family, require_data_named
from vlmdata.wording import counted


@dataclass(frozen=True)
class RankPlace:
    """The place of a process in the parallel layout.

    Attributes:
        rank: Global rank.
        world: Number of processes.
        dp_rank: Data-parallel rank (without context parallelism); -1 on ranks of a separate vision tower, which have
            images of the packs of all.
        dp_size: Data-parallel size.
        cp_rank: Context-parallel rank.
        cp_size: Context-parallel size.
        tp_rank: Tensor-parallel rank.
        first_stage: Whether the process holds the embeddings.
        last_stage: Whether the process computes the loss.
        vision_rank: Data-parallel rank of a vision tower on processes of its own; None if this is not one of them. The
            sizes above are those of the language model.
        vision_size: Its data-parallel size; 0 if the tower is not separate.
    """

    rank: int
    world: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    tp_rank: int
    first_stage: bool
    last_stage: bool
    vision_rank: int | None = None
    vision_size: int = 0

    @classmethod
    def here(cls) -> RankPlace:
        """Returns the place of this process. The process groups must exist."""
        from megatron.core import parallel_state as groups

        from vlmdata.model.parallel.separation import separation

        sides = separation()
        of_all = {
            "rank": torch.distributed.get_rank(),
            "world": torch.distributed.get_world_size(),
            "tp_rank": groups.get_tensor_model_parallel_rank(),
            "vision_size": 0 if sides is None else sides.replicas,
        }
        if sides is not None and sides.holds_tower:
            return cls(
                **of_all,
                dp_rank=-1,
                dp_size=sides.data,
                cp_rank=0,
                cp_size=sides.context,
                first_stage=False,
                last_stage=False,
                vision_rank=groups.get_data_parallel_rank(),
            )
        return cls(
            **of_all,
            dp_rank=groups.get_data_parallel_rank(),
            dp_size=groups.get_data_parallel_world_size(),
            cp_rank=groups.get_context_parallel_rank(),
            cp_size=groups.get_context_parallel_world_size(),
            first_stage=groups.is_pipeline_first_stage(),
            last_stage=groups.is_pipeline_last_stage(),
        )

    @property
    def speaks(self) -> bool:
        """Whether this process reports its data: true for one process per data- and context-parallel rank."""
        return self.last_stage and self.tp_rank == 0


def open_loader(
    config: TrainConfig, place: RankPlace, architecture: Architecture, device: torch.device
) -> StreamingLoader:
    """Opens the loader of this rank. Packs are balanced over ranks by this model's cost, given its frozen parts.

    Raises:
        ConfigError: If no data is given, sizes are incompatible, or data has images or videos and the model no vision
            tower.
    """
    data, parallel, model = config.data, config.parallel, config.model
    require_data_named(data)
    of_tower, shared, on_gpu = place.vision_rank is not None, place.vision_size == 0, device.type == "cuda"
    # Routers on all stages weight a load-balancing loss by the targets.
    weighs = architecture.language.moe is not None and model.moe_aux_loss != 0
    needed = {
        "tokens": place.first_stage,
        "pixels": of_tower or (place.first_stage and shared and not model.language_only),
        "labels": not of_tower and (place.last_stage or weighs),
    }
    parts = config.frozen_parts, config.adapted_parts
    flops = spec_of(architecture).step_flops(architecture, model.mtp is not False, *parts)
    try:
        options = LoaderConfig.of(
            **data.loader_options
            | {
                "capacity": data.capacity,
                "global_batch": data.global_batch,
                "pad_to_capacity": on_gpu if data.pad_to_capacity is None else data.pad_to_capacity,
                "pad_multiple": math.lcm(data.loader_options["pad_multiple"], 16 if config.run.fp8 else 1),
                "blend": Blend(data.blend_by, data.blend) if data.blend else None,
                "cost": (flops if shared else flops.without_vision()).cost_model(),
                "dp_rank": max(place.dp_rank, 0),
                "dp_size": place.dp_size,
                "context_parallel": parallel.cp,
                "context_parallel_rank": place.cp_rank if parallel.cp > 1 and not of_tower else None,
                "tensor_parallel": parallel.tp,
                "sequence_parallel": parallel.sp,
                "vision_ranks": place.vision_size,
                "vision_rank": place.vision_rank,
                "parts": tuple(part for part, is_needed in needed.items() if is_needed),
                "num_workers": data.workers,
                "device": device if on_gpu else None,
            }
        )
        loader = StreamingLoader(data.paths, options)
    except UsageError as error:
        raise ConfigError(str(error)) from error
    for dataset in loader.datasets:
        require_data_family(architecture, dataset.manifest, dataset.name)
    if model.language_only:
        _require_no_items(loader)
    return loader


def _require_no_items(loader: StreamingLoader) -> None:
    """Raises an error if a dataset that the run reads has images or videos."""
    plan = loader.plan_config
    blends = [plan.blend, *(change.blend for change in plan.schedule)]
    for number, dataset in enumerate(loader.datasets):
        items = dataset.manifest.totals.items
        if items and any(blend is None or blend.weights[number] > 0 for blend in blends):
            raise ConfigError(
                f"{dataset.name} has {counted(items, 'image or video', 'images and videos')}, but model.language_only "
                "builds no vision tower: give data without them, or leave model.language_only out"
            )


def manifest_of(config: TrainConfig) -> Manifest:
    """Reads the manifest of the first dataset. All datasets of a run share one tokenizer and one family.

    Raises:
        ConfigError: If no data is given.
        DatasetFormatError: If the dataset is missing or unfinished.
        UsageError: If options of a service are incompatible.
    """
    data = config.data
    require_data_named(data)
    given = LoaderConfig.of(capacity=data.capacity, global_batch=data.global_batch, **data.loader_options)
    cache = None if given.reading.cache_dir is None else Path(given.reading.cache_dir)
    opened = open_data(data.paths[:1], cache, given.reading.cache_bytes, given.service, given.reading.timeout)
    return opened.datasets[0].manifest


def endless(loader: StreamingLoader) -> Iterator[PackedBatch]:
    """Yields batches, epoch after epoch."""
    while True:
        yield from loader
