"""One training step of a small model in any layout, and its gradients under canonical names.

Runs in the test's own process for the reference, and in four by :func:`tests.model.workers.run_in_all` for a layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.loader.synthetic import write_dataset
from tests.model.helpers import small_architecture, unsharded, weights_of
from tests.model.workers import meet_again
from vlmdata import StreamingLoader
from vlmdata.batch import PackedBatch

#: The same packing in every layout: a multiple of 16 suits all of them.
LOADING: dict[str, Any] = {
    "capacity": 448,
    "max_patches": 160,
    "pad_multiple": 16,
    "num_workers": 0,
    "seed": 0,
}


@dataclass(frozen=True)
class Case:
    """A model and a layout.

    Attributes:
        name: For messages.
        groups: Arguments of :func:`vlmdata.model.parallel.groups.initialize`.
        settings: Further arguments of :class:`ModelSettings`.
        model: Arguments of :func:`small_architecture`.
        vocab_size: Rows of the embedding table; the tokenizer's if None.
        sharded: Whether parameters are fully sharded.
        videos: Whether it trains on the dataset of videos, which stands beside the other one.
        packs: Of a step, whoever computes them.
    """

    name: str
    groups: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    sharded: bool = False
    videos: bool = False
    packs: int = 4

    @property
    def loading(self) -> dict[str, Any]:
        """How its dataset is packed."""
        return LOADING | {"global_batch": self.packs} | ({"max_patches": None} if self.videos else {})


def write_videos(data: Path) -> None:
    """Writes the dataset of videos beside another one: samples of images, videos, both or neither."""
    write_dataset(videos_beside(data), 2, 10, videos=True, longest_text=40, largest_image=3)


def videos_beside(data: Path) -> Path:
    """Where :func:`write_videos` writes."""
    return data.parent / "videos"


@dataclass(frozen=True)
class StepOutcome:
    """What a rank knows after a step.

    Attributes:
        place: tensor, context, pipeline, expert and data rank.
        loss: Mean over the targets of the step by their weights, on all ranks alike.
        gradients: By canonical name, this rank's part, divided by the sum of the weights.
        metrics: Means of the losses beside the main one.
        images_held: Images this rank encoded in each of its micro-batches.
        videos_held: The same of temporal patches of videos.
    """

    place: dict[str, int]
    loss: float
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, float]
    images_held: tuple[int, ...]
    videos_held: tuple[int, ...] = ()


def architecture_of(case: Case, data: Path) -> Any:
    """The case's architecture, for the dataset's tokenizer."""
    from vlmdata.format.dataset import VlmDataset

    tokenizer = VlmDataset(videos_beside(data) if case.videos else data).manifest.tokenizer
    return small_architecture(**case.model).with_vocabulary(tokenizer, case.vocab_size)


def settings_of(case: Case) -> Any:
    """The case's settings."""
    from vlmdata.model.network.settings import ModelSettings

    return ModelSettings(**{f"{name}_parallel": size for name, size in case.groups.items()}, **case.settings)


def build(case: Case, data: Path) -> Any:
    """This rank's part of the model, with weights that do not depend on the layout."""
    from megatron.core import parallel_state

    from vlmdata.model.families import spec_of
    from vlmdata.model.network.settings import vocabulary_rows
    from vlmdata.model.weight_names.table import load_from_hf

    architecture, settings = architecture_of(case, data), settings_of(case)
    spec = spec_of(architecture)
    model: Any = spec.build(
        architecture,
        settings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    rows = vocabulary_rows(architecture.language.vocab_size, settings.tensor_parallel)
    maps = spec.parameter_maps(architecture, vocab_rows=rows)
    weights = weights_of(architecture)
    load_from_hf(
        model,
        maps,
        lambda source: source.take(weights[source.name]),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_parallel=settings.tensor_parallel,
        vision_parallel=settings.vision_parallel,
    )
    return model.train()


def batches(case: Case, data: Path) -> Iterator[PackedBatch]:
    """This rank's micro-batches of the first step, with what its stage needs and no more."""
    from megatron.core import parallel_state as state

    first, last = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
    parts = [*(["tokens", "pixels"] if first else []), *(["labels"] if last or case.model.get("moe") else [])]
    context = state.get_context_parallel_world_size()
    loader = StreamingLoader(
        str(videos_beside(data) if case.videos else data),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        context_parallel=context,
        context_parallel_rank=state.get_context_parallel_rank() if context > 1 else None,
        tensor_parallel=state.get_tensor_model_parallel_world_size(),
        sequence_parallel=True,
        parts=tuple(parts),
        **case.loading,
    )
    with loader:
        for batch in loader:
            if batch.step == 0:
                yield batch.clone()
            else:
                break


def train_step(case: Case, data: Path, weight: float = 1.0, by_count: bool = False) -> StepOutcome:
    """Forward, backward and reduction of one step by megatron-core's schedule, gradient buffers and reduction.

    Args:
        case: Model and layout.
        data: The dataset.
        weight: Factor on all loss weights.
        by_count: Whether megatron-core divides the gradients by the number of targets, as it does by itself.
    """
    from megatron.core import parallel_state as state
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from vlmdata.model.training.optimizer.learner import TargetWeights, finalize_gradients
    from vlmdata.model.training.optimizer.sharded_model import ShardedModel
    from vlmdata.model.training.optimizer.small_gradients import GradientBuffers
    from vlmdata.model.weight_names.table import canonical_names

    model = build(case, data)
    weights = TargetWeights()
    model.config.finalize_model_grads_func = finalize_model_grads if by_count else partial(finalize_gradients, weights)
    names = canonical_names(model)
    wrapped: Any = (
        ShardedModel(model, torch.float32, torch.device("cpu"))
        if case.sharded
        else GradientBuffers(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model
        )
    )
    mine = [_times(batch, weight) for batch in batches(case, data)]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(iterator: Iterator[PackedBatch], network: Any) -> Any:
        batch = next(iterator)
        weights.add(batch)

        def total(losses: torch.Tensor) -> Any:
            count = (batch.labels != -100).sum().int()  # type: ignore[union-attr]
            seen.append((losses.detach().sum(), batch.loss_weights.sum()))  # type: ignore[union-attr]
            return losses.sum(), count, {}

        return network(batch), total

    wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(mine),
        model=[wrapped],
        num_microbatches=len(mine),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    sums = torch.stack([sum((s for s, _ in seen), torch.tensor(0.0)), sum((w for _, w in seen), torch.tensor(0.0))])
    sums = sums.double() / state.get_tensor_model_parallel_world_size()
    dist.all_reduce(sums)
    return StepOutcome(
        place={
            "tensor": state.get_tensor_model_parallel_rank(),
            "context": state.get_context_parallel_rank(),
            "pipeline": state.get_pipeline_model_parallel_rank(),
            "expert": state.get_expert_model_parallel_rank(),
            "data": state.get_data_parallel_rank(),
        },
        loss=float(sums[0] / sums[1]),
        gradients={names[name]: gradient for name, gradient in whole_gradients_of(wrapped).items()},
        metrics=model.metrics.pop(model.metric_names),
        images_held=tuple(len(batch.image_indices) for batch in mine),
        videos_held=tuple(int(batch.host.video_runs[:, 2].sum()) for batch in mine),
    )


def whole_gradients_of(wrapped: Any) -> dict[str, torch.Tensor]:
    """The gradient of each parameter, of sharded ones from all ranks that hold rows of it."""
    if not hasattr(wrapped, "held"):
        return {name: parameter.main_grad.clone() for name, parameter in wrapped.module.named_parameters()}
    found = {}
    for own in wrapped.held:
        parts: list[Any] = [None] * own.group.size()
        dist.all_gather_object(parts, own.rows.main_grad, group=own.group)
        found[own.name] = torch.cat(parts)
        assert found[own.name].shape == own.parameter.shape
    return found


def _times(batch: PackedBatch, factor: float) -> PackedBatch:
    if factor == 1 or batch.loss_weights is None:
        return batch
    return dataclasses.replace(batch, loss_weights=batch.loss_weights * factor)


def run_case(case: Case, data: Path) -> StepOutcome:
    """:func:`train_step` in the case's groups, in every process."""
    from vlmdata.model.parallel import groups

    groups.initialize(backend="gloo", **case.groups)
    return train_step(case, data)


def run_cases(cases: Sequence[Case], data: Path) -> list[StepOutcome]:
    """:func:`run_case` for one case after another in the same processes, whose start is what costs."""
    outcomes = []
    for case in cases:
        try:
            outcomes.append(run_case(case, data))
        except Exception as error:
            error.add_note(f"in the case {case.name!r}")
            raise
        meet_again()
    return outcomes


def refusal_of_split_experts() -> str:
    """What is said where megatron-core's groups were made by its own defaults, with experts as tensor parallel."""
    from megatron.core import parallel_state

    from vlmdata.model.families.qwen3_5.build import build_model
    from vlmdata.model.network.settings import ModelSettings
    from vlmdata.model.parallel import groups

    groups.initialize(backend="gloo")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    try:
        build_model(small_architecture(), ModelSettings(tensor_parallel=2))
    except ValueError as error:
        return str(error)
    return ""


def fresh_tower(case: Case, data: Path) -> dict[str, torch.Tensor]:
    """This rank's weights of the vision tower as training begins; every process draws others."""
    from vlmdata.model.families.qwen3_5.build import build_model
    from vlmdata.model.parallel import groups
    from vlmdata.model.training.optimizer.learner import build_learner
    from vlmdata.model.training.settings.config_loading import load_config

    groups.initialize(backend="gloo", **case.groups)
    torch.manual_seed(dist.get_rank())  # as megatron-core's stream for cut layers is seeded, which fills them on CUDA
    model = build_model(architecture_of(case, data), settings_of(case))
    drawn = model.vision.blocks[0].qkv.weight.detach().clone()
    build_learner(model, load_config(None, [("run.steps", 2)]), torch.device("cpu"), torch.float32)
    tower = {name: parameter.detach().clone() for name, parameter in model.vision.named_parameters()}
    return tower | {"drawn": drawn}


def whole_gradients(case: Case, data: Path, outcomes: list[StepOutcome]) -> dict[str, torch.Tensor]:
    """Gradients of all parameters from the ranks' parts; replicas must agree.

    A tied output layer on a stage of its own comes under its own name, and must equal the embedding's.
    """
    from vlmdata.model.families import spec_of
    from vlmdata.model.network.settings import vocabulary_rows

    architecture, size = architecture_of(case, data), case.groups.get("tensor", 1)
    rows = vocabulary_rows(architecture.language.vocab_size, size)
    maps = spec_of(architecture).parameter_maps(architecture, vocab_rows=rows)
    if settings_of(case).language_only:
        maps = {name: entry for name, entry in maps.items() if not name.startswith("vision.")}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for outcome in outcomes:
        rank = outcome.place["tensor"]
        for name, gradient in outcome.gradients.items():
            mine = parts.setdefault(name, {})
            if rank in mine:
                torch.testing.assert_close(mine[rank], gradient, rtol=1e-6, atol=0, msg=f"{case.name}: {name}")
            mine[rank] = gradient
    tied = parts.pop("language.output_layer.weight", None) if architecture.tie_embeddings else None
    if tied is not None:
        for rank, gradient in tied.items():
            assert torch.equal(gradient, parts["language.embedding.word_embeddings.weight"][rank])
    assert set(parts) == set(maps), set(parts) ^ set(maps)
    whole = {}
    whole_tower = settings_of(case).vision_parallel == 1
    for name, entry in maps.items():
        if entry.shard_dim is None or (whole_tower and name.startswith("vision.")):
            # Every tensor-parallel rank holds all of it; experts are on the ranks of one expert group only.
            copies = list(parts[name].values())
            for other in copies[1:]:
                torch.testing.assert_close(other, copies[0], rtol=1e-6, atol=0, msg=f"{case.name}: {name}")
            whole[name] = copies[0]
        else:
            whole[name] = unsharded(entry, [parts[name][rank] for rank in range(size)])
    return whole


def save_checkpoint(case: Case, data: Path, folder: Path) -> dict[str, tuple[int, ...]]:
    """Saves the case's model through megatron-core's distributed checkpoint.

    Returns:
        Keys of this rank's entries, with their global shapes.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from vlmdata.model.parallel import groups
    from vlmdata.model.weights.store import save_strategy

    if case.groups:
        groups.initialize(backend="gloo", **case.groups)
    state = build(case, data).sharded_state_dict()
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(state, folder, sharded_strategy=save_strategy(0))
    apply_factories(state)
    tensors = [entry for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
    return {entry.key: tuple(entry.global_shape) for entry in tensors}


def travel(cases: list[Case], data: Path, folder: Path) -> tuple[list[str], list[dict[str, tuple[int, ...]]]]:
    """Saves each case's model, and loads in each case what the one before it has saved, all in the same processes.

    In the first, that is what one process has saved as ``alone``.

    Returns:
        Parameters of this rank that do not arrive to the last bit, with the layouts; and by case what
        :func:`save_checkpoint` returns.
    """
    wrong, keys = [], []
    for number, case in enumerate(cases):
        keys.append(save_checkpoint(case, data, folder / str(number)))
        meet_again()
    for case, source in zip(cases, ("alone", *map(str, range(len(cases)))), strict=False):
        wrong += [f"{source} to {case.name}: {name}" for name in load_checkpoint(case, data, folder / source)]
        meet_again()
    return wrong, keys


def load_checkpoint(case: Case, data: Path, folder: Path) -> list[str]:
    """Loads a checkpoint of any layout into this case's model.

    Returns:
        Parameters of this rank that do not hold the weights of :func:`build` to the last bit.
    """
    from megatron.core import dist_checkpointing

    from vlmdata.model.parallel import groups

    if case.groups:
        groups.initialize(backend="gloo", **case.groups)
    model = build(case, data)
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter, wanted[name])]
