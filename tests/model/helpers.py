"""What the model's tests share: small models, random weights that keep numbers tame, packs, a measure of closeness."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vlmdata.batch import IGNORE_INDEX, PackedBatch, SampleOrigin
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.model.architecture import MoeArchitecture, VisionArchitecture
from vlmdata.model.families import architecture_to_hf, spec_of
from vlmdata.model.families.qwen3_5.architecture import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen35Architecture,
    Qwen35LanguageArchitecture,
)
from vlmdata.model.families.qwen3_5.presets import pattern
from vlmdata.model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture

IMAGE, VIDEO, VISION_START, VISION_END = 250, 251, 248, 249


def small_architecture(family: str = "qwen3_5", **options: Any) -> Any:
    """A small model of a family; all widths differ, so that a mix-up of axes cannot go unseen."""
    return {"qwen3_5": _small_qwen3_5, "qwen3_vl": _small_qwen3_vl}[family](**options)


def _small_qwen3_vl(*, moe: bool = False, tied: bool = False, deepstack: tuple[int, ...] = (0, 1, 3)) -> Any:
    """Three features of blocks that are not neighbours, for the first three of four layers."""
    language = Qwen3VLLanguageArchitecture(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=0 if moe else 96,
        layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        mrope_section=(6, 5, 5),
        moe=MoeArchitecture(4, 2, 40, router_aux_loss_coef=0.01) if moe else None,
    )
    vision = VisionArchitecture(
        depth=4,
        hidden_size=48,
        intermediate_size=80,
        num_heads=4,
        out_hidden_size=64,
        num_position_embeddings=36,
        deepstack_layers=deepstack,
    )
    return Qwen3VLArchitecture(vision, language, IMAGE, VIDEO, VISION_START, VISION_END, tie_embeddings=tied)


def _small_qwen3_5(*, moe: bool = False, tied: bool = False, mtp: int = 1, layers: int = 2) -> Qwen35Architecture:
    """Every kind of layer: one of each, or as in the published sizes."""
    language = Qwen35LanguageArchitecture(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=0 if moe else 96,
        layer_types=(LINEAR_ATTENTION, FULL_ATTENTION) if layers == 2 else pattern(layers),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        mrope_section=(2, 1, 1),
        moe=MoeArchitecture(4, 2, 40, 48, 0.01) if moe else None,
    )
    vision = VisionArchitecture(
        depth=2, hidden_size=48, intermediate_size=80, num_heads=4, out_hidden_size=64, num_position_embeddings=36
    )
    return Qwen35Architecture(
        vision, language, IMAGE, VIDEO, VISION_START, VISION_END, tie_embeddings=tied, mtp_layers=mtp
    )


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error: Euclidean norm of the difference over that of what is wanted.

    Infinite, not NaN, if anything is not finite: ``max`` of several errors would ignore a NaN.
    """
    error = float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())
    return math.inf if math.isnan(error) else error


def unsharded(entry: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """Joins the shards of all tensor-parallel ranks to a whole parameter: the inverse of ``ParameterMap.shard``."""
    if entry.shard_dim is None or len(parts) == 1:
        return parts[0]
    axis, size = entry.shard_dim, len(parts)
    lengths = [section // size for section in entry.sections] or [parts[0].shape[axis]]
    columns = zip(*(part.split(lengths, axis) for part in parts), strict=True)
    return torch.cat([piece for column in columns for piece in column], axis)


def weights_of(architecture: Any, **options: Any) -> dict[str, torch.Tensor]:
    """:func:`random_weights` for all tensors of a model; options are those of its name table."""
    from vlmdata.model.weight_names.table import hf_names

    shapes = hf_names(spec_of(architecture).parameter_maps(architecture, **options))
    return random_weights(shapes, plain_norms=architecture.family == "qwen3_vl")


def values_of(model: Any, architecture: Any) -> dict[str, torch.Tensor]:
    """Hugging Face tensors of a whole model; of quantized weights, what they stand for."""
    from vlmdata.model.network.quantized import value_of
    from vlmdata.model.weight_names.table import canonical_names

    maps = spec_of(architecture).parameter_maps(architecture)
    found: dict[str, torch.Tensor] = {}
    for name, canonical in canonical_names(model).items():
        entry = maps[canonical]
        values = entry.to_hf(value_of(model.get_parameter(name)).cpu())
        for source, value in zip(entry.sources, values, strict=True):
            if source.index is None:
                found[source.name] = value
            else:
                found.setdefault(source.name, value.new_empty(source.shape))[source.index] = value
    return found


def random_weights(
    shapes: dict[str, torch.Size | tuple[int, ...]], seed: int = 0, plain_norms: bool = False
) -> dict[str, torch.Tensor]:
    """Hugging Face tensors whose every entry matters, and small enough that float32 rounding stays small.

    Norms of the decoder scale by 1 + weight, or by the weight itself with ``plain_norms``.

    With matrices of twice this scale transformers' own gradients change by 4e-5 when every weight changes by half a
    unit in its last place: then no two orders of summation agree to 1e-5.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(tuple(shape), generator=generator)
        always_plain = name.endswith(("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight"))
        if always_plain or (plain_norms and name.endswith("norm.weight")):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("A_log"):
            weights[name] = noise.abs()
        elif len(shape) == 1:
            weights[name] = 0.1 * noise
        elif "embed" in name and "patch" not in name:
            weights[name] = 0.5 * noise
        else:
            fan_in = int(np.prod(shape[1:])) if "experts" not in name else min(shape[1:])
            weights[name] = 0.4 * noise * fan_in**-0.5
    return weights


def transformers_config(architecture: Any) -> Any:
    """The model's config in transformers."""
    import transformers

    fields = architecture_to_hf(architecture)
    (name,) = fields.pop("architectures")
    return getattr(transformers, name.replace("ForConditionalGeneration", "Config"))(**fields)


def transformers_model(architecture: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Transformers' model with these weights, in evaluation mode."""
    import transformers

    (name,) = architecture_to_hf(architecture)["architectures"]
    model = getattr(transformers, name)(transformers_config(architecture))
    missing, unexpected = model.load_state_dict(
        as_in_memory(architecture, {name: value for name, value in weights.items() if not name.startswith("mtp.")}),
        strict=False,
    )
    assert not unexpected
    assert not [name for name in missing if not (architecture.tie_embeddings and name == "lm_head.weight")]
    model.tie_weights()
    return model.eval()


def as_in_memory(architecture: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of files as transformers' model holds them, and back: Qwen3-VL's files have experts transposed."""
    if architecture.family != "qwen3_vl":
        return tensors
    return {name: each.transpose(1, 2) if ".experts." in name else each for name, each in tensors.items()}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample, not packed.

    Attributes:
        ids: int64 (L,).
        labels: int64 (L,), the next token or -100.
        weights: float32 (L,), what each label counts in the loss.
        positions: int64 (3, L).
        grids: int64 (N, 3).
        starts: int64 (N,), first token of every image.
        patches: uint8 (P, 768).
        video_grids: int64 (V, 3).
        video_starts: int64 (V,), first token of every video.
        block_starts: int64 (B,), first token of every temporal patch of the videos.
        video_patches: uint8 (Q * 2, 768), the two frames of a patch adjacent.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    grids: torch.Tensor
    starts: torch.Tensor
    patches: torch.Tensor
    video_grids: torch.Tensor
    video_starts: torch.Tensor
    block_starts: torch.Tensor
    video_patches: torch.Tensor

    def transformers_inputs(self) -> dict[str, Any]:
        """Arguments for transformers' model."""
        inputs: dict[str, Any] = {"input_ids": self.ids[None], "position_ids": self.positions[:, None]}
        if len(self.grids):
            inputs |= {"pixel_values": FAMILY.pixel_values(self.patches, torch.float32), "image_grid_thw": self.grids}
        if len(self.video_grids):
            pixels = FAMILY.pixel_values(self.video_patches, torch.float32, copies=2)
            inputs |= {"pixel_values_videos": pixels, "video_grid_thw": self.video_grids}
        return inputs


def make_sample(seed: int, grids: Sequence[tuple[int, ...]], text: int, weighted: bool = False) -> Sample:
    """A sample of images, videos and random text; the second half of the text is the answer.

    Args:
        seed: Of the text.
        grids: Height and width of the images in patches; of videos their temporal patches, height and width. Text
            stands before each temporal patch.
        text: Tokens of text.
        weighted: Whether the two halves of the answer weigh differently in the loss, and not 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(0, 240, (count,), generator=generator).tolist()

    ids, starts, video_starts, block_starts, blocks = words(3), [], [], [], []
    for *times, h, w in grids:
        for number in range(times[0] if times else 1):
            ids += words(2) if times else []
            blocks.append((len(ids) + 1, (1, h, w)))
            if times:
                block_starts.append(len(ids) + 1)
            if number == 0:
                (video_starts if times else starts).append(len(ids) + 1)
            ids += [VISION_START, *[VIDEO if times else IMAGE] * (h * w // 4), VISION_END]
    answer = len(ids) + text // 2
    ids += words(text)
    labels = torch.tensor([*ids[1:], IGNORE_INDEX])
    labels[: answer - 1] = IGNORE_INDEX
    weights = (labels != IGNORE_INDEX).float()
    if weighted:
        weights *= torch.where(torch.arange(len(ids)) < (answer + len(ids)) // 2, 0.125 * (1 + seed), 1.5 * seed)
    grid_thw = np.array([(1, *grid) for grid in grids if len(grid) == 2], dtype=np.int64).reshape(-1, 3)
    video_thw = np.array([grid for grid in grids if len(grid) == 3], dtype=np.int64).reshape(-1, 3)
    block_grids = np.array([grid for _, grid in blocks], dtype=np.int64).reshape(-1, 3)
    begins = np.array([start for start, _ in blocks], dtype=np.int64)
    positions = FAMILY.position_ids(len(ids), begins, block_grids).astype(np.int64)
    rows, video_rows = int(grid_thw.prod(1).sum()), 2 * int(video_thw.prod(1).sum())
    return Sample(
        ids=torch.tensor(ids),
        labels=labels,
        weights=weights,
        positions=torch.as_tensor(positions),
        grids=torch.from_numpy(grid_thw),
        starts=torch.tensor(starts, dtype=torch.int64),
        patches=torch.randint(0, 256, (rows, 768), dtype=torch.uint8, generator=generator),
        video_grids=torch.from_numpy(video_thw),
        video_starts=torch.tensor(video_starts, dtype=torch.int64),
        block_starts=torch.tensor(block_starts, dtype=torch.int64),
        video_patches=torch.randint(0, 256, (video_rows, 768), dtype=torch.uint8, generator=generator),
    )


def pack(samples: list[Sample], alignment: int = 8, tail: int = 0, padding_id: int = 0) -> PackedBatch:
    """Packs samples as the loader does; the padding's ids are as given, for tests that they do not matter."""
    padded = [-(-len(sample.ids) // alignment) * alignment for sample in samples]
    lengths = [len(sample.ids) for sample in samples]
    if tail:
        padded, lengths = [*padded, tail], [*lengths, 0]
    total = sum(padded)
    bounds, true = np.cumsum([0, *padded]), np.cumsum([0, *lengths])
    ids = torch.full((1, total), padding_id)
    labels, positions = torch.full((1, total), IGNORE_INDEX), torch.zeros(3, 1, total, dtype=torch.int64)
    weights = torch.zeros(1, total)
    padding = torch.ones(1, total, dtype=torch.bool)
    for sample, start in zip(samples, bounds.tolist(), strict=False):
        stop = start + len(sample.ids)
        ids[0, start:stop], labels[0, start:stop] = sample.ids, sample.labels
        weights[0, start:stop] = sample.weights
        positions[:, 0, start:stop], padding[0, start:stop] = sample.positions, False
    grids = torch.cat([sample.grids for sample in samples])
    videos: dict[str, Any] = {}
    if any(len(sample.video_grids) for sample in samples):
        videos["video_grid_thw"] = torch.cat([sample.video_grids for sample in samples])
        for name in ("video_starts", "block_starts"):
            of_pack = [getattr(s, name) + b for s, b in zip(samples, bounds.tolist(), strict=False)]
            videos["video_block_starts" if name == "block_starts" else name] = torch.cat(of_pack)
        counts = videos["video_grid_thw"][:, 0]
        videos["video_runs"] = torch.stack([torch.arange(len(counts)), torch.zeros_like(counts), counts], dim=1)
        videos["video_patches"] = torch.cat([sample.video_patches for sample in samples])
    return PackedBatch(
        input_ids=ids,
        labels=labels,
        loss_mask=(labels != IGNORE_INDEX).float(),
        loss_weights=weights,
        position_ids=positions,
        padding_mask=padding,
        cu_seqlens=torch.from_numpy(true.astype(np.int32)),
        cu_seqlens_padded=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(padded),
        total_tokens=total,
        true_tokens=int(true[-1]),
        image_grid_thw=grids,
        image_starts=torch.cat([s.starts + b for s, b in zip(samples, bounds.tolist(), strict=False)]),
        image_indices=torch.arange(len(grids)),
        patches=torch.cat([sample.patches for sample in samples]),
        sample_keys=tuple(str(number) for number in range(len(samples))),
        origins=tuple(SampleOrigin(0, 0, number, number) for number in range(len(samples))),
        epoch=0,
        step=0,
        micro_batch=0,
        pack=0,
        **videos,
    )


def mixed_samples(weighted: bool = False) -> list[Sample]:
    """One image, none, two side by side, and one of one token; lengths below and above a chunk of the delta net."""
    return [
        make_sample(1, [(4, 6)], 70, weighted),
        make_sample(2, [], 30, weighted),
        make_sample(3, [(6, 4), (2, 8)], 130, weighted),
        make_sample(4, [(2, 2)], 9, weighted),
    ]


def video_samples(weighted: bool = False) -> list[Sample]:
    """Images and videos in both orders, several videos, one of one temporal patch, and a sample of text."""
    return [
        make_sample(1, [(3, 4, 2), (4, 6)], 40, weighted),
        make_sample(2, [], 30, weighted),
        make_sample(3, [(2, 4), (2, 4, 4), (1, 2, 6), (2, 2)], 90, weighted),
        make_sample(4, [(3, 2, 2)], 9, weighted),
    ]
