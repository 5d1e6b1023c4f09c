"""The loader of one rank: which packs, which slice of them, which of their parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from model.architecture import Architecture
from model.families import spec_of
from model.training.config import ConfigError, TrainConfig
from model.training.early_checks import require_data_named
from vlmdata import Blend, LoaderConfig, PackedBatch, StreamingLoader
from vlmdata.errors import UsageError
from vlmdata.format.manifest import Manifest
from vlmdata.loader.config import Packing, Parallelism, Reading
from vlmdata.loader.open import DEFAULT_CACHE_BYTES, open_for_loading


@dataclass(frozen=True)
class RankPlace:
    """Where a process stands in the parallel layout.

    Attributes:
        rank: Global rank.
        world: Processes in all.
        dp_rank: Data-parallel rank (context parallelism not counted).
        dp_size: Data-parallel ranks.
        cp_rank: Context-parallel rank.
        cp_size: Context-parallel ranks.
        tp_rank: Tensor-parallel rank.
        first_stage: Whether it holds the embeddings.
        last_stage: Whether it holds the loss.
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

    @classmethod
    def here(cls) -> RankPlace:
        """The place of this process, once the process groups exist."""
        from megatron.core import parallel_state as groups

        return cls(
            rank=torch.distributed.get_rank(),
            world=torch.distributed.get_world_size(),
            dp_rank=groups.get_data_parallel_rank(),
            dp_size=groups.get_data_parallel_world_size(),
            cp_rank=groups.get_context_parallel_rank(),
            cp_size=groups.get_context_parallel_world_size(),
            tp_rank=groups.get_tensor_model_parallel_rank(),
            first_stage=groups.is_pipeline_first_stage(),
            last_stage=groups.is_pipeline_last_stage(),
        )

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for its part of the data: one a data-parallel and context-parallel rank does."""
        return self.last_stage and self.tp_rank == 0


def parts_needed(first_stage: bool, last_stage: bool, every_stage_weighs: bool) -> tuple[str, ...]:
    """What a pipeline stage reads.

    Args:
        first_stage: It embeds tokens and images.
        last_stage: It compares with labels.
        every_stage_weighs: Whether a load-balancing loss is trained: routers on all stages weigh it by the targets.
    """
    parts = ["tokens", "pixels"] if first_stage else []
    return (*parts, "labels") if last_stage or every_stage_weighs else tuple(parts)


def open_loader(
    config: TrainConfig, place: RankPlace, architecture: Architecture, device: torch.device
) -> StreamingLoader:
    """The loader of this rank; packs are spread over ranks by what they cost this model, frozen parts considered.

    Raises:
        ConfigError: If no data is named, or sizes do not fit together.
    """
    data, parallel, model = config.data, config.parallel, config.model
    require_data_named(data)
    weighs = architecture.language.moe is not None and model.moe_aux_loss != 0
    try:
        options = LoaderConfig(
            Packing(
                capacity=data.capacity,
                global_batch=data.global_batch,
                max_patches=data.max_patches,
                pad_to_capacity=device.type == "cuda" if data.pad_to_capacity is None else data.pad_to_capacity,
                pad_multiple=math.lcm(data.pad_multiple, 16 if config.run.fp8 else 1),
                shuffle_window=data.shuffle_window,
                seed=data.seed,
                blend=Blend(data.blend_by, data.blend) if data.blend else None,
                balance=data.balance,
                cost=spec_of(architecture).step_flops(architecture, model.mtp is not False, model.freeze).cost_model(),
            ),
            Parallelism(
                dp_rank=place.dp_rank,
                dp_size=place.dp_size,
                context_parallel=parallel.cp,
                context_parallel_rank=place.cp_rank if parallel.cp > 1 else None,
                tensor_parallel=parallel.tp,
                sequence_parallel=parallel.sp,
            ),
            Reading(
                parts=parts_needed(place.first_stage, place.last_stage, weighs),
                num_workers=data.workers,
                timeout=data.timeout,
                verify=data.verify,
                device=device if device.type == "cuda" else None,
                cache_dir=data.cache_dir,
            ),
        )
        return StreamingLoader(data.paths, options)
    except UsageError as error:
        raise ConfigError(str(error)) from error


def manifest_of(config: TrainConfig) -> Manifest:
    """Manifest of the first dataset; all datasets of a run have one tokenizer and one family.

    Raises:
        ConfigError: If no data is named.
        DatasetFormatError: If there is no finished dataset.
    """
    data = config.data
    require_data_named(data)
    cache = None if data.cache_dir is None else Path(data.cache_dir)
    dataset, _ = open_for_loading(data.paths[0], cache, DEFAULT_CACHE_BYTES)
    return dataset.manifest


def endless(loader: StreamingLoader) -> Iterator[PackedBatch]:
    """Batches epoch after epoch."""
    while True:
        yield from loader
