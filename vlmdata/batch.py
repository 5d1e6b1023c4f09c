"""A packed (THD) batch, which the loader yields for a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.context_parallel import Slice as Slice  # modules that must not import torch have them from there
from vlmdata.context_parallel import partition_indices
from vlmdata.families import DEFAULT_FAMILY, Family, family
from vlmdata.families.processor import PER_TOKEN, ProcessorFamily
from vlmdata.families.tensors import Records, joined, restored
from vlmdata.format.schema import IGNORE_INDEX as IGNORE_INDEX
from vlmdata.packing.item_runs import ItemRuns, pack_runs


@dataclass(frozen=True)
class SampleOrigin:
    """The origin of a sample in a batch.

    Attributes:
        dataset: Number of the dataset in the loader's list.
        shard: Number of the shard in the dataset.
        row: Source row of the sample.
        index: Position in the dataset: ``dataset[index]`` is the sample.
    """

    dataset: int
    shard: int
    row: int
    index: int


def _no_numbers() -> npt.NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class PackItems:
    """The N images and videos of a pack together, in order of their tokens."""

    grids: npt.NDArray[np.int64]  # int64 (N, 3), patches of each along t, h, w
    starts: npt.NDArray[np.int64]  # int64 (N,), first token of each in the pack
    are_videos: npt.NDArray[np.bool_]  # bool (N,), which are videos
    numbers: npt.NDArray[np.int64]  # int64 (N,), number of each among the images, or among the videos

    def held(self, runs: ItemRuns) -> HeldItems:
        """Returns which images, and what of the videos, some runs are."""
        of_videos = self.are_videos[runs.items]
        numbers = self.numbers[runs.items]
        videos = np.stack([numbers, runs.begins, runs.counts], axis=1)[of_videos]
        return HeldItems(numbers[~of_videos], videos)


@dataclass(frozen=True, eq=False)
class HeldItems:
    """The images and videos that a batch holds patches of."""

    images: npt.NDArray[np.int64]  # int64 (M,), their ascending numbers
    videos: npt.NDArray[np.int64]  # int64 (W, 3), video, first temporal patch, temporal patches; ascending


@dataclass(frozen=True, eq=False)
class HostArrays:
    """Boundaries, images and videos of a pack as host arrays: to read them never waits for a device."""

    cu_seqlens: npt.NDArray[np.int64]  # int64 (segments + 1,), running sum of true lengths
    cu_seqlens_padded: npt.NDArray[np.int64]  # int64 (segments + 1,), start of each segment
    image_grid_thw: npt.NDArray[np.int64]  # int64 (N, 3), patches per image along t, h, w
    image_starts: npt.NDArray[np.int64]  # int64 (N,), first token of each image in the pack
    #: int64 (M,), which of the images ``patches`` holds. A model checks that they are those it encodes.
    image_indices: npt.NDArray[np.int64]
    #: int64 (V, 3), patches per video along t, h, w
    video_grid_thw: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    #: int64 (V,), first token of each video in the pack
    video_starts: npt.NDArray[np.int64] = field(default_factory=_no_numbers)
    #: int64 (B,), first token of each block of the videos
    video_block_starts: npt.NDArray[np.int64] = field(default_factory=_no_numbers)
    #: int64 (W, 3), what of the videos ``video_patches`` holds: video, first temporal patch, temporal patches
    video_runs: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))

    @property
    def image_grids_held(self) -> npt.NDArray[np.int64]:
        """Grids of the images that ``patches`` holds, int64 (M, 3)."""
        return self.image_grid_thw[self.image_indices]

    @property
    def video_grids_held(self) -> npt.NDArray[np.int64]:
        """Grids of the runs of temporal patches that ``video_patches`` holds, int64 (W, 3)."""
        grids = self.video_grid_thw[self.video_runs[:, 0]]
        grids[:, 0] = self.video_runs[:, 2]
        return grids

    @property
    def items(self) -> PackItems:
        """The images and videos in order of their tokens: the order in which ranks are assigned to them."""
        starts = np.concatenate([self.image_starts, self.video_starts])
        order = np.argsort(starts, kind="stable")
        grids = np.concatenate([self.image_grid_thw.reshape(-1, 3), self.video_grid_thw.reshape(-1, 3)])
        images = len(self.image_starts)
        are_videos = order >= images
        return PackItems(grids[order], starts[order], are_videos, order - images * are_videos)


#: Fields of a batch that are arrays of its videos on the host, too. All are None in a pack without videos.
VIDEO_ARRAYS = ("video_grid_thw", "video_starts", "video_block_starts", "video_runs")


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """One pack: n samples one after another, each padded to the alignment, and optionally a padded tail.

    T is the number of tokens in the pack, t the tokens held here (T, or T / size for a context-parallel slice), N the
    images of the pack, P the patches held here. V, B, W and Q are the videos of the pack, their blocks, the runs and
    the patches of videos held here, T the frames per patch where it is a factor of columns. Images and videos stand
    apart, each in order of their tokens, as transformers' models take them (``pixel_values``, ``pixel_values_videos``);
    ``host.items`` has the order of both together. Segments are the samples and, with ``pad_to_capacity`` or in an empty
    pack, a final segment of padding. Fields of parts that were not requested are None (:meth:`holds`), though their
    type is a tensor: most loaders request all. The loader reuses the memory of
    tensors after the last reference is gone: keep them as long as you like, but do not write to them.

    Attributes:
        input_ids: int64 (1, t), token ids; padding holds the pad id.
        labels: int64 (1, t), the next token if it is a target, else -100; never across samples.
        loss_mask: float32 (1, t), 1 where ``labels`` is a target.
        loss_weights: float32 (1, t), weight of each target in the loss, which is sum(weight x loss) / sum(weight); 0
            off target. If not given or if all targets of the pack weigh 1, it is the tensor ``loss_mask`` itself.
        position_ids: int64 (k, 1, T), rows of the family's axes, such as t, h, w, from 0 in every sample; 0 on padding.
            Never sliced. (k, 1, 0) on ranks of a vision tower of its own.
        padding_mask: bool (1, t), True on padding (the convention of megatron-core's router).
        cu_seqlens: int32 (segments + 1,), running sum of true lengths.
        cu_seqlens_padded: int32 (segments + 1,), start of each segment; the last entry is T. Always of the whole pack.
        max_seqlen: Longest segment in tokens, padding included.
        total_tokens: T.
        true_tokens: Tokens of the whole pack that are not padding.
        image_grid_thw: int64 (N, 3), patches per image along t, h, w. Always of the whole pack.
        image_starts: int64 (N,), first token of each image in the pack.
        image_indices: int64 (M,), ascending indices of the images in ``patches``; all N unless sliced.
        patches: Pixels of those images: uint8 (P, bytes per patch); with the loader's option ``pixels``, their
            ``pixel_values``, (P, T * bytes per patch) of that dtype, for T frames per patch.
        video_grid_thw: int64 (V, 3), patches per video along t, h, w. Always of the whole pack. None in a pack without
            videos, as all fields of videos are: the batches of data without videos have no such tensors.
        video_starts: int64 (V,), first token of each video in the pack.
        video_block_starts: int64 (B,), first token of each block of the videos, one video after another. A block is a
            run of placeholders with other tokens around: one for each temporal patch in families that tell its time
            before it, else one for each video. (0,) on ranks of a vision tower of its own.
        video_runs: int64 (W, 3), what ``video_patches`` holds, in order: a row is the index of a video, the first
            temporal patch held of it, and how many. All of each video unless sliced: a slice may hold a part of one.
        video_patches: Pixels of those videos: uint8 (Q * T, bytes per patch), the T frames of a patch adjacent; with
            the loader's option ``pixels``, their ``pixel_values_videos``, (Q, T * bytes per patch).
        sample_keys: Keys of the samples.
        origins: Origins of the samples: dataset, shard and row.
        epoch: Epoch, from 0.
        step: Optimizer step within the epoch.
        micro_batch: Micro-batch within the step.
        pack: Pack number within the epoch, -1 for an empty pack.
        context_parallel: Which slice this is; None for a whole pack.
        host: Boundaries and images as host arrays; made from the tensors if it is not given.
        family: The model family the samples are made for, which knows how patches become ``pixel_values``.
        masked: Numbers of the samples that were damaged and stand without targets and pixels (``on_damage="mask"``).
        headers: int64 (N, tensors, 8) on the host, the headers of the records in ``patches``, in the family
            ``processor`` (:mod:`vlmdata.families.tensors`). None reads them from the device.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    max_seqlen: int
    total_tokens: int
    true_tokens: int
    image_grid_thw: torch.Tensor
    image_starts: torch.Tensor
    image_indices: torch.Tensor
    patches: torch.Tensor
    sample_keys: tuple[str, ...]
    origins: tuple[SampleOrigin, ...]
    epoch: int
    step: int
    micro_batch: int
    pack: int
    context_parallel: Slice | None = None
    host: HostArrays = None  # type: ignore[assignment]
    family: Family = field(default_factory=lambda: family(DEFAULT_FAMILY))
    loss_weights: torch.Tensor = None  # type: ignore[assignment]
    masked: tuple[int, ...] = ()
    video_grid_thw: torch.Tensor | None = None
    video_starts: torch.Tensor | None = None
    video_block_starts: torch.Tensor | None = None
    video_runs: torch.Tensor | None = None
    video_patches: torch.Tensor | None = None
    headers: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not self.holds("loss_weights"):
            object.__setattr__(self, "loss_weights", self.loss_mask)
        if cast(HostArrays | None, self.host) is None:
            tensors = {each.name: getattr(self, each.name) for each in dataclasses.fields(HostArrays)}
            arrays = {name: each.cpu().numpy().astype(np.int64) for name, each in tensors.items() if each is not None}
            object.__setattr__(self, "host", HostArrays(**arrays))

    def __repr__(self) -> str:
        held = (
            ""
            if self.context_parallel is None
            else f", slice {self.context_parallel.rank} of {self.context_parallel.size}"
        )
        videos = f", videos={len(self.host.video_starts)}" if len(self.host.video_starts) else ""
        return (
            f"PackedBatch(epoch={self.epoch}, step={self.step}, micro_batch={self.micro_batch}, pack={self.pack}, "
            f"samples={self.num_samples}, tokens={self.true_tokens} of {self.total_tokens}, "
            f"images={len(self.host.image_grid_thw)}{videos}{held}, device={str(self.position_ids.device)!r})"
        )

    def holds(self, field: str) -> bool:
        """Returns False for a field of a part that was not requested, and for videos in a pack without any."""
        return getattr(self, field) is not None

    @property
    def num_samples(self) -> int:
        """Number of samples in the pack."""
        return len(self.sample_keys)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all present tensors, by field name."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Returns the batch with its tensors on a device. Tensors already there are shared, not copied."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns the batch with its tensors in page-locked memory, for asynchronous copies."""
        return self._map(lambda tensor: tensor if tensor.is_pinned() else tensor.pin_memory())

    def clone(self) -> Self:
        """Returns a copy of the batch with its own tensors, which may be modified."""
        changed: dict[str, Any] = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **changed)

    def pixel_values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the values of the patches held here: exactly the ``pixel_values`` of transformers' Qwen processors.

        uint8 patches are expanded on their device, so only a quarter (bf16) or an eighth (fp32) of the bytes crosses
        the bus. Patches that the loader has expanded (``pixels``) are returned as they are.

        Args:
            dtype: Result dtype; by default that of expanded patches, else float32.

        Returns:
            (P, 2 * bytes per patch), columns (C, T, patch, patch).

        Raises:
            ValueError: If the batch was loaded without pixels, or expanded to a dtype that was already rounded.
        """
        return self._expanded(self.patches, dtype, copies=1)

    def model_inputs(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Returns what the forward of transformers' model of the family takes for the pack, by argument.

        There is no attention mask, since transformers would then not look for samples, and there are no labels, since
        the model would shift them again.

        Args:
            dtype: Dtype of pixels; by default that of expanded patches, else that of the processor, float32.

        Returns:
            ``input_ids`` (1, T), ``position_ids``, and what the model's processor makes of images and videos, as
            ``pixel_values``. Positions are (4, 1, T), whose first row counts from 0 in each segment; in families with
            one axis they are that row, (1, T).

        Raises:
            ValueError: If the batch is a slice, or was loaded without tokens or pixels.
        """
        if self.context_parallel is not None or not self.holds("input_ids"):
            raise ValueError("model_inputs needs a whole pack with the part 'tokens'")
        starts = self.cu_seqlens_padded.long()
        first = starts[:-1].repeat_interleave(starts.diff(), output_size=self.total_tokens)
        within = (torch.arange(self.total_tokens, device=starts.device) - first).view(1, -1)
        one_axis = len(self.family.position_axes) == 1
        inputs = {
            "input_ids": self.input_ids,
            "position_ids": within if one_axis else torch.cat([within[None], self.position_ids]),
        }
        if isinstance(self.family, ProcessorFamily):
            return inputs | self._processor_inputs(self.family, dtype)
        if len(self.host.image_grid_thw):
            inputs |= self.image_inputs(dtype)
        if self.video_grid_thw is not None:
            inputs |= {"pixel_values_videos": self.pixel_values_videos(dtype), "video_grid_thw": self.video_grid_thw}
        return inputs

    def _processor_inputs(self, family: ProcessorFamily, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Returns the tensors of the processor, joined by their rules."""
        if not self.holds("patches"):
            raise ValueError("model_inputs: the batch was loaded without the part 'pixels'")
        rows = self.host.image_grid_thw.prod(axis=1).tolist()
        values = restored(family, Records.of(family, self.patches, rows, self.headers))
        segments = np.diff(self.host.cu_seqlens_padded)
        lengths = np.diff(self.host.cu_seqlens)[: self.num_samples]
        of_sample = dict(
            zip(np.searchsorted(self.host.cu_seqlens_padded, self.host.image_starts).tolist(), values, strict=True)
        )
        inputs = {}
        for rule in family.tensors:
            parts = [of_sample.get(number, {}).get(rule.name) for number in range(self.num_samples)]
            value = joined(rule, parts, lengths.tolist(), segments.tolist())
            if value is None and rule.rule == PER_TOKEN:
                value = torch.zeros_like(self.input_ids, dtype=getattr(torch, rule.dtype))
            if value is not None:
                inputs[rule.name] = value if dtype is None or not value.is_floating_point() else value.to(dtype)
        return inputs

    def image_inputs(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Returns what transformers' model of the family takes for the images held here, by argument.

        Args:
            dtype: As for :meth:`pixel_values`.

        Returns:
            ``pixel_values`` as the family's processor makes them, and what goes with them, such as ``image_grid_thw``.

        Raises:
            ValueError: As :meth:`pixel_values`.
        """
        grids = self.image_grid_thw[self.image_indices]
        return self.family.image_inputs(self.pixel_values(dtype), grids)

    def pixel_values_videos(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns exactly the ``pixel_values_videos`` of transformers' processor for the videos held here.

        Expands ``video_patches`` as :meth:`pixel_values` does ``patches``; their frames are not repeated.

        Args:
            dtype: Result dtype; by default that of expanded patches, else float32.

        Returns:
            (Q, 2 * bytes per patch), columns (C, T, patch, patch).

        Raises:
            ValueError: If there are no videos in the pack, or see :meth:`pixel_values`.
        """
        if self.video_grid_thw is None:
            raise ValueError("the pack has no videos: its video_grid_thw is None")
        return self._expanded(self.video_patches, dtype, copies=self.family.temporal_patch_size)

    def _expanded(self, patches: torch.Tensor | None, dtype: torch.dtype | None, copies: int) -> torch.Tensor:
        if patches is None:
            raise ValueError("the batch has no patches: it was loaded without the part 'pixels'")
        held = patches.dtype
        if held == torch.uint8:
            return self.family.pixel_values(patches, dtype, copies=copies)
        if dtype not in (None, held) and held != torch.float32:
            raise ValueError(
                f"the loader rounded the pixels to {held}, so their values in {dtype} are lost: load with "
                f"pixels='float32' or 'uint8', or take pixel_values({held})"
            )
        return patches if dtype is None else patches.to(dtype)

    def context_parallel_shard(self, rank: int, size: int) -> Self:
        """Returns the part of a whole pack that a context-parallel rank computes.

        Per-token tensors are its two chunks of every segment, in the order of Transformer Engine's
        ``thd_get_partitioned_indices``. ``patches`` are those of the images that it encodes, ``video_patches`` those of
        the videos: :func:`pack_runs` assigns both together, and may split a video between its temporal patches.
        ``position_ids``, ``cu_seqlens`` and the grids stay whole.

        Args:
            rank: Context-parallel rank.
            size: Context-parallel size.

        Raises:
            ValueError: If the batch is already a slice, or a segment is not a multiple of ``2 * size``.
        """
        if self.context_parallel is not None:
            have = self.context_parallel
            raise ValueError(f"the batch is already slice {have.rank} of {have.size}")
        device = self.cu_seqlens_padded.device
        tokens = torch.from_numpy(partition_indices(self.host.cu_seqlens_padded, self.total_tokens, size, rank)).to(
            device
        )
        items = self.host.items
        held = items.held(pack_runs(items.grids, size).of(rank))
        grids = self.host.image_grid_thw
        images = np.stack([held.images, np.zeros_like(held.images), grids[held.images, 0]], axis=1)
        changed: dict[str, Any] = {}
        if len(self.host.video_starts):
            changed["video_runs"] = torch.from_numpy(held.videos).to(device)
            changed["video_patches"] = _take_runs(self.video_patches, self.host.video_grid_thw, held.videos)

        of_tokens = ("input_ids", "labels", "loss_mask", "loss_weights", "padding_mask")
        changed |= {name: getattr(self, name).index_select(1, tokens) for name in of_tokens if self.holds(name)}
        if self.loss_weights is self.loss_mask:
            changed["loss_weights"] = changed.get("loss_mask")
        if self.holds("patches"):
            changed["patches"] = _take_runs(self.patches, grids, images)
        return dataclasses.replace(
            self,
            image_indices=torch.from_numpy(held.images).to(device),
            context_parallel=Slice(rank, size),
            host=dataclasses.replace(self.host, image_indices=held.images, video_runs=held.videos),
            **changed,
        )

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        tensors = self.tensors()
        if self.loss_weights is self.loss_mask:
            tensors.pop("loss_weights", None)  # the shared tensor stays shared
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items()}
        return dataclasses.replace(self, **{"loss_weights": None} | changed)


def _take_runs(
    patches: torch.Tensor | None, grids: npt.NDArray[np.int64], runs: npt.NDArray[np.int64]
) -> torch.Tensor | None:
    """Takes the patches of some runs, as in ``video_runs``, from those of all images or videos."""
    if patches is None:
        return None
    counts = grids.prod(axis=1)
    frame = (
        grids[:, 1] * grids[:, 2] * (len(patches) // max(int(counts.sum()), 1))
    )  # a stored frame of a patch is a row
    starts = np.cumsum(frame * grids[:, 0]) - frame * grids[:, 0]
    pieces = [
        patches[starts[item] + begin * frame[item] : starts[item] + (begin + count) * frame[item]]
        for item, begin, count in runs.tolist()
    ]
    return torch.cat(pieces) if pieces else patches[:0]
