"""One training step with the vision tower on processes of its own, and its gradients under canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.model.helpers import unsharded, weights_of
from tests.model.layouts import Case, StepOutcome, architecture_of, videos_beside, whole_gradients
from tests.model.workers import meet_again
from vlmdata import StreamingLoader
from vlmdata.batch import PackedBatch


@dataclass(frozen=True)
class SideCase:
    """A model and a layout of two sides.

    Attributes:
        vision: Processes of the tower.
        language: Processes of the language model.
        groups: Further arguments of :func:`vlmdata.model.parallel.groups.initialize`.
        settings: Further arguments of :class:`ModelSettings`.
        model: Arguments of :func:`small_architecture`.
        ahead: ``parallel.vision_ahead``.
        videos: Whether it trains on the dataset of videos.
    """

    vision: int
    language: int
    groups: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ahead: int = 1
    videos: bool = False

    @property
    def world(self) -> int:
        """Processes of both sides."""
        return self.vision + self.language

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.vision} + {self.language} {self.groups} {self.model}{' videos' * self.videos}"

    @property
    def alone(self) -> Case:
        """The same model in one process, or on the language model's side without the tower."""
        sizes = {name: size for name, size in self.groups.items() if name != "vision_tensor"}
        return Case(self.name, sizes, {**self.settings, "language_only": True}, self.model, videos=self.videos)


def run_sides(cases: Sequence[SideCase], data: Path) -> list[StepOutcome | None]:
    """:func:`side_step` for one case after another in the same processes; None for those that it does not need."""
    from vlmdata.model.parallel import groups

    outcomes: list[StepOutcome | None] = []
    for case in cases:
        if not meet_again(case.world):
            outcomes.append(None)
            continue
        groups.initialize(backend="gloo", vision=case.vision, **case.groups)
        try:
            outcomes.append(side_step(case, data))
        except Exception as error:
            error.add_note(f"in the case {case.name!r}")
            raise
    return outcomes


def side_step(case: SideCase, data: Path) -> StepOutcome:
    """Forward, backward and reduction of one step on this side."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from vlmdata.model.parallel.separation import separation
    from vlmdata.model.training.optimizer.learner import TargetWeights, finalize_gradients
    from vlmdata.model.training.optimizer.small_gradients import GradientBuffers
    from vlmdata.model.training.settings.config_loading import load_config
    from vlmdata.model.training.vision_side import VisionSide
    from vlmdata.model.weight_names.table import canonical_names

    sides = separation()
    assert sides is not None
    model, weights = _build(case, data, sides.holds_tower), TargetWeights()
    model.config.finalize_model_grads_func = partial(finalize_gradients, weights)
    wrapped = GradientBuffers(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model
    )
    config = load_config(None, [("parallel.vision_ahead", case.ahead)])
    learner: Any = SimpleNamespace(model=[wrapped])
    side = VisionSide(sides, learner, config, architecture_of(case.alone, data), torch.device("cpu"), torch.float32)
    sums = torch.zeros(2, dtype=torch.float64)

    def forward(iterator: Iterator[PackedBatch], network: Any) -> Any:
        batch = next(iterator)
        weights.add(batch)

        def total(losses: torch.Tensor) -> Any:
            sums.add_(torch.stack([losses.detach().sum(), batch.loss_weights.sum()]))  # type: ignore[union-attr]
            return losses.sum(), torch.tensor(1, dtype=torch.int), {}

        return network(batch), total

    wrapped.zero_grad_buffer()
    with _loader(case, data) as loader:
        images, mine = loader.images(0, 0), _first_step(loader)
        compute = partial(
            get_forward_backward_func(),
            forward_step_func=forward,
            data_iterator=iter(mine),
            model=[wrapped],
            num_microbatches=len(images),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        side.run(images, iter(mine), compute, forward_only=False)
    sums /= state.get_tensor_model_parallel_world_size()
    dist.all_reduce(sums)
    names = canonical_names(model)
    return StepOutcome(
        place={"tower": int(sides.holds_tower), "tensor": state.get_tensor_model_parallel_rank()},
        loss=float(sums[0] / sums[1]),
        gradients={names[name]: p.main_grad.clone() for name, p in model.named_parameters()},
        metrics=model.metrics.pop(("moe_aux_loss", "mtp_loss")),
        images_held=tuple(len(batch.image_indices) if batch.patches is not None else 0 for batch in mine),
        videos_held=tuple(int(batch.host.video_runs[:, 2].sum()) if batch.patches is not None else 0 for batch in mine),
    )


def gradients_of_sides(case: SideCase, data: Path, outcomes: list[StepOutcome]) -> dict[str, torch.Tensor]:
    """Gradients of all parameters from the parts of both sides; replicas must agree."""
    from vlmdata.model.families import spec_of

    language = [each for each in outcomes if not each.place["tower"]]
    whole = whole_gradients(case.alone, data, language)
    maps = spec_of(architecture_of(case.alone, data)).parameter_maps(architecture_of(case.alone, data))
    size = case.groups.get("vision_tensor", 1)
    towers = [each.gradients for each in outcomes if each.place["tower"]]
    assert all(set(each) == {name for name in maps if name.startswith("vision.")} for each in towers)
    for name in towers[0]:
        for rank, each in enumerate(towers):
            torch.testing.assert_close(each[name], towers[rank % size][name], rtol=1e-6, atol=0, msg=name)
        whole[name] = unsharded(maps[name], [each[name] for each in towers[:size]])
    return whole


def _build(case: SideCase, data: Path, tower: bool) -> Any:
    """This rank's part of the model, with weights that do not depend on the layout."""
    from megatron.core import parallel_state as state

    from vlmdata.model.families import spec_of
    from vlmdata.model.network.settings import ModelSettings, vocabulary_rows
    from vlmdata.model.network.vision_model import build_vision_model
    from vlmdata.model.weight_names.table import load_from_hf

    sizes = {f"{name}_parallel": size for name, size in case.alone.groups.items()}
    vision = case.groups.get("vision_tensor", 1)
    settings = ModelSettings(**sizes, **case.settings, separate_vision=True, vision_tensor_parallel=vision)
    architecture = architecture_of(case.alone, data)
    spec = spec_of(architecture)
    if tower:
        model: Any = build_vision_model(architecture, settings)
    else:
        ends = {"pre_process": state.is_pipeline_first_stage(), "post_process": state.is_pipeline_last_stage()}
        model = spec.build(architecture, settings, **ends)
    size = vision if tower else settings.tensor_parallel
    rows = vocabulary_rows(architecture.language.vocab_size, settings.tensor_parallel)
    weights = weights_of(architecture)
    load_from_hf(
        model,
        spec.parameter_maps(architecture, vocab_rows=rows),
        lambda source: source.take(weights[source.name]),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_parallel=size,
    )
    return model.train()


def _loader(case: SideCase, data: Path) -> StreamingLoader:
    """The loader of this rank, with what its side needs and no more."""
    from vlmdata.model.training.data import RankPlace

    place = RankPlace.here()
    weighs = place.last_stage or case.model.get("moe")
    parts = [*(["tokens"] if place.first_stage else []), *(["labels"] if weighs else [])]
    tower = place.vision_rank is not None
    return StreamingLoader(
        str(videos_beside(data) if case.videos else data),
        dp_rank=max(place.dp_rank, 0),
        dp_size=place.dp_size,
        context_parallel=place.cp_size,
        context_parallel_rank=place.cp_rank if place.cp_size > 1 and not tower else None,
        tensor_parallel=case.groups.get("tensor", 1),
        sequence_parallel=True,
        vision_ranks=place.vision_size,
        vision_rank=place.vision_rank,
        parts=("pixels",) if tower else tuple(parts),
        **case.alone.loading,
    )


def _first_step(loader: StreamingLoader) -> list[PackedBatch]:
    found = []
    for batch in loader:
        if batch.step:
            break
        found.append(batch.clone())
    return found
