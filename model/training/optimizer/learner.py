"""Gradients and weights: megatron-core's data-parallel wrapper, AdamW and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from vlmdata import PackedBatch
from vlmdata.model.network.grouped import lay_out_experts
from vlmdata.model.network.wrapping import sum_wrapper_gradients
from vlmdata.model.parallel.separation import separation
from vlmdata.model.training.optimizer.compact_adam import CompactAdamW
from vlmdata.model.training.optimizer.sharded_model import ShardedModel
from vlmdata.model.training.optimizer.small_gradients import GradientBuffers
from vlmdata.model.training.optimizer.sums_optimizer import SumsOptimizer
from vlmdata.model.training.optimizer.weight_copies import copy_weights_at_once
from vlmdata.model.training.settings.config import ConfigError, TrainConfig


@dataclass(frozen=True)
class Learner:
    """Model, optimizer and schedule."""

    #: The wrapped model with gradient buffers or shards; a list of one chunk, as megatron-core's schedules expect.
    model: list[DistributedDataParallel] | list[ShardedModel]
    #: AdamW, which also divides and clips gradients; on each rank's share of the state if distributed.
    optimizer: SumsOptimizer
    schedule: OptimizerParamScheduler  # learning rate by step

    @property
    def sharded(self) -> ShardedModel | None:
        """The wrapped model if its parameters are fully sharded."""
        (chunk,) = self.model
        return chunk if isinstance(chunk, ShardedModel) else None


def freeze(model: torch.nn.Module, parts: tuple[str, ...]) -> int:
    """Freezes parts of the model: "vision" (the encoder without its mergers), "merger" (with deepstack's), "language".

    Returns the number of trained parameters (elements) on this rank. A ConfigError if there are none. With the tower on
    ranks of its own, one side may be frozen.
    """
    for name, parameter in model.named_parameters():
        if part_of(name) in parts:
            parameter.requires_grad_(False)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    sides, adapted = separation(), getattr(model, "adapted", False)
    nothing = {"vision", "merger", "language"} <= set(parts)
    if not trained and (sides is None or nothing or (adapted and not sides.holds_tower)):
        stage = parallel_state.get_pipeline_model_parallel_rank() + 1
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if adapted:
            raise ConfigError(
                f"lora.targets leave nothing to train on pipeline stage {stage} of {stages}: adapt more layers, or use "
                "fewer stages (--pp)"
            )
        raise ConfigError(
            f"model.freeze {list(parts)} leaves nothing to train on pipeline stage {stage} of {stages}; freeze fewer "
            "parts" + (", or use fewer stages (--pp)" if stages > 1 else "")
        )
    return trained


def part_of(name: str) -> str:
    """Returns the part that a parameter belongs to, from its name in the model."""
    if not name.startswith("vision."):
        return "language"
    return "merger" if name.startswith(("vision.merger.", "vision.deepstack_mergers.")) else "vision"


def build_learner(model: torch.nn.Module, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> Learner:
    """Wraps a model for training, with parameters of ``dtype``. Gradients and optimizer state are always fp32."""
    if config.parallel.fsdp:
        return _build_sharded(model, config, device, dtype)
    settings, sides = config.optimizer, separation()
    on_gpu = device.type == "cuda"
    distributed = on_gpu if settings.distributed is None else settings.distributed
    overlap = on_gpu and _has_replicas(model) if settings.overlap is None else settings.overlap
    if sides is not None and sides.holds_tower:
        overlap = False  # a rank of the tower may have no image in a micro-batch, or in a step, and then no pass
    if distributed and not on_gpu:
        raise ConfigError(
            "optimizer.distributed needs CUDA: megatron-core restores its state only with fused Adam. Omit it."
        )
    gather = overlap and distributed
    lay_out_experts(model)
    wrapped = GradientBuffers(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=gather,
            use_distributed_optimizer=distributed,
        ),
        model,
    )
    if getattr(model, "vision", None) is not None:
        model.vision.take_first_weights()  # type: ignore[union-attr, operator]
    wrapped.broadcast_params()
    plain = get_megatron_optimizer(_optimizer_config(config, distributed, gather, dtype), [wrapped])
    optimizer = SumsOptimizer(plain, settings.clip_grad or float("inf"), sides)
    copy_weights_at_once(optimizer)
    model_config: Any = model.config
    _connect(model_config, optimizer)
    if overlap:
        model_config.no_sync_func = wrapped.no_sync
    if gather:
        model_config.param_sync_func = wrapped.start_param_sync
    return Learner([wrapped], optimizer, build_schedule(optimizer, config))


def _has_replicas(model: torch.nn.Module) -> bool:
    """Whether gradients are summed over ranks. If not, overlap would only add hooks to each parameter."""
    ranks = int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    config: Any = model.config
    if config.num_moe_experts is not None:
        ranks = max(ranks, int(parallel_state.get_expert_data_parallel_world_size()))
    return ranks > 1


def _build_sharded(model: torch.nn.Module, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> Learner:
    """Wraps a model for training with fully sharded parameters. Each rank's optimizer has its rows, in float32."""
    wrapped = ShardedModel(model, dtype, device)
    optimizer = SumsOptimizer(
        get_megatron_optimizer(_optimizer_config(config, False, False, torch.float32), [wrapped]),
        config.optimizer.clip_grad or float("inf"),
    )
    for part in optimizer.chained_optimizers:
        # All ranks together hold each row once, or mark it as a copy.
        part.grad_stats_parallel_group = torch.distributed.group.WORLD
        if part.optimizer is not None and (config.optimizer.moments != "fp32" or config.optimizer.offload):
            moments = torch.bfloat16 if config.optimizer.moments == "bf16" else torch.float32
            part.optimizer = CompactAdamW(part.optimizer.param_groups, moments, config.optimizer.offload)
    _connect(model.config, optimizer)
    return Learner([wrapped], optimizer, build_schedule(optimizer, config))


def build_schedule(optimizer: SumsOptimizer, config: TrainConfig) -> OptimizerParamScheduler:
    """Returns the learning-rate schedule for peak p, minimum m, W warm-up steps and D steps in total.

    Step k, from 1, trains with p k / (W + 1) during warm-up, and then with m + (p - m) f(r), where
    r = (k - 1 - W) / (D - W) and f(r) is (1 + cos(pi r)) / 2, 1 - r or 1 for cosine, linear or constant.
    """
    settings, steps, warmup = config.optimizer, config.decay_steps, config.warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        # megatron-core uses this rate for the first step; with 0 that step would train nothing.
        init_lr=settings.lr / (warmup + 1),
        max_lr=settings.lr,
        min_lr=settings.last_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # A resumed run takes only the step from the checkpoint; its settings come from its configuration.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _optimizer_config(
    config: TrainConfig, distributed: bool, overlap_gather: bool, dtype: torch.dtype
) -> MegatronOptimizerConfig:
    settings = config.optimizer
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.last_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlap_gather,
    )


class TargetWeights:
    """Sums the weights of a step's targets on this rank, for training loops with megatron-core's schedules."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None

    def add(self, batch: PackedBatch) -> None:
        """Adds a batch without waiting for the device. A batch without labels adds nothing."""
        if batch.loss_weights is not None:
            own = batch.loss_weights.sum(dtype=torch.float64)
            self._sum = own if self._sum is None else self._sum + own

    def over_all_ranks(self, device: torch.device) -> torch.Tensor:
        """Returns the sum over all ranks, float64 (); see :func:`weight_of_all_ranks`. A collective."""
        own = torch.zeros((), dtype=torch.float64, device=device) if self._sum is None else self._sum
        return weight_of_all_ranks(own)


def weight_of_all_ranks(own: torch.Tensor) -> torch.Tensor:
    """Sums the weights of a step's targets over all data-parallel and context-parallel ranks. A collective.

    The last pipeline stage, which has all labels, sends the sum to the others, and the language model sends it to a
    tower on ranks of its own.

    Args:
        own: Sum over this rank's packs, float64 (). Only that of ranks with the loss counts.
    """
    total, sides = own.clone(), separation()
    if sides is None or not sides.holds_tower:
        # A group of one rank sends nothing, but NCCL would take memory for it, where a step may have left none.
        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() > 1:
            torch.distributed.broadcast(total, src=torch.distributed.get_process_group_ranks(stages)[-1], group=stages)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if replicas.size() > 1:
            torch.distributed.all_reduce(total, group=replicas)
    if sides is not None:
        torch.distributed.broadcast(total, src=sides.vision)
    return total


def sum_gradients(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Sums gradients over all ranks. Those of a tower whose images the ranks share are summed last.

    megatron-core's own reduction divides by an integer token count from its schedules (docs/decisions/0030), so this
    function ignores ``num_tokens``. :class:`SumsOptimizer` divides.
    """
    del num_tokens
    finalize_model_grads(model, None, **kwargs)
    for chunk in model:
        sum_wrapper_gradients(chunk.parameters())
        tower = getattr(unwrapped(chunk), "vision", None)
        if tower is not None:
            tower.sum_gradients()


def finalize_gradients(
    weights: TargetWeights, model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any
) -> None:
    """Sums gradients over all ranks and divides them by the sum of the weights of the step's targets.

    For training loops with another optimizer. The trainer calls :func:`sum_gradients`, and :class:`SumsOptimizer`
    divides. ``weights`` are those of all batches of the step on this rank; ``num_tokens`` only gives the device.
    """
    sum_gradients(model, num_tokens, **kwargs)
    assert num_tokens is not None, "the schedule does not count tokens: calculate_per_token_loss is off"
    total = weights.over_all_ranks(num_tokens.device)
    for chunk in model:
        # In a step without targets, all gradients are 0 and remain 0.
        chunk.scale_gradients(1.0 / torch.where(total > 0, total, 1.0).float())


def _connect(model_config: Any, optimizer: SumsOptimizer) -> None:
    """Sets the gradient reduction of megatron-core's schedules."""
    model_config.grad_scale_func, model_config.finalize_model_grads_func = optimizer.scale_loss, sum_gradients


def unwrapped(model: torch.nn.Module) -> Any:
    """Returns the model inside its gradient wrapper."""
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return inner
