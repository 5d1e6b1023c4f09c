"""Weights between Hugging Face's files and megatron-core's distributed checkpoint, one tensor in memory at a time.

A distributed checkpoint knows nothing of the layout that wrote it, so one conversion serves every TP, PP and EP. The
model is built without memory (on the ``meta`` device) to learn which keys, shapes and cuts megatron-core has; values
move through the model family's table of names (:mod:`model.weights.mapping`). Both directions are exact: values only
change places.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader

from model.architecture import Architecture
from model.families import architecture_to_hf, spec_of
from model.network.settings import ModelSettings, vocabulary_rows
from model.weights.checksums import damaged_files, unchecked_files, write_checksums
from model.weights.hf_files import (
    HfTensors,
    PlannedTensor,
    WeightsError,
    differences,
    require_none,
    write_tensors,
)
from model.weights.hf_folder import CONFIG, architecture_in, config_for, copy_small_files, read_json, with_dtypes
from model.weights.hf_load import holds_prediction, table_of
from model.weights.hf_processor import choose_dataset, opened, write_processor
from model.weights.mapping import ParameterMap, canonical_names, hf_names

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes:
        tensors: Hugging Face tensors read or written.
        bytes: Their bytes.
        mtp: Whether multi-token prediction is among them.
        unchecked: Files of a distributed checkpoint that was read without checksums to compare them with.
        data: The dataset that tokenizer and processor were made from.
        notes: Lines on what is worth knowing.
    """

    tensors: int
    bytes: int
    mtp: bool
    unchecked: int = 0
    data: str | None = None
    notes: tuple[str, ...] = ()


def to_megatron(
    source: Path, out: Path, progress: Progress = lambda count: None, ignore: Collection[str] = ()
) -> Converted:
    """Writes a distributed checkpoint from a Hugging Face folder.

    The process groups of one process must exist (:func:`model.parallel.groups.initialize`), in CPU mode without CUDA.

    Args:
        source: Folder with ``config.json`` and ``*.safetensors``.
        out: An empty or absent folder.
        progress: Called with bytes as they are written.
        ignore: Fields of ``config.json`` that are unknown and harmless; the one written has the known ones only.

    Raises:
        WeightsError: If tensors are missing, unexpected or mis-shaped, all of them listed.
    """
    architecture = read_architecture(source, ignore)
    files = HfTensors(source)
    mtp = holds_prediction(files)
    maps = table_of(files, architecture, mtp=mtp, rows=vocabulary_rows(architecture.language.vocab_size, 1))
    wanted = hf_names(maps)
    pieces = _pieces(_meta_model(architecture, mtp))

    @lru_cache(maxsize=1)  # the pieces of a parameter follow one another
    def parameter(name: str) -> Tensor:
        entry = maps[name]
        return entry.to_mcore([files.read(each.name, each.index) for each in entry.sources])

    def resolve(index: MetadataIndex) -> Tensor:
        name, number = pieces.where[(index.fqn, tuple(index.offset or ()))]
        piece = pieces.cut(name, parameter(pieces.canonical[name]))[number]
        assert piece.data is not None
        progress(piece.data.nbytes)
        data: Tensor = piece.data.reshape(_stored_shape(piece))
        return data

    pieces.set_dtypes({ours: _dtype(files, maps[canonical]) for ours, canonical in pieces.canonical.items()})
    out.mkdir(parents=True, exist_ok=True)
    # Copies: saving changes what it is given.
    state = {name: copy.copy(entry) for name, entry in pieces.state.items()}
    dist_checkpointing.save(state, str(out), sharded_strategy=_StreamingSave(resolve))
    (out / CONFIG).write_text(json.dumps(architecture_to_hf(architecture), indent=2) + "\n")
    write_checksums(out)
    return Converted(len(wanted), sum(files.bytes(name) for name in wanted), mtp)


def to_hf(
    source: Path,
    out: Path,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5_000_000_000,
    progress: Progress = lambda count: None,
    ignore: Collection[str] = (),
    data: str | None = None,
) -> Converted:
    """Writes a Hugging Face folder from a distributed checkpoint: one of ``to_megatron``'s, or one of a training run.

    Args:
        source: The checkpoint.
        out: An empty or absent folder.
        like: A Hugging Face folder of the same model, whose other files (tokenizer, processor) are copied and whose
            ``config.json`` is kept but for dtypes; None writes a ``config.json`` with the architecture only.
        dtype: Of the weights; None for the dtypes of the checkpoint.
        file_bytes: Most bytes in a file, unless one tensor is larger.
        progress: Called with bytes as they are written.
        ignore: Fields of ``like``'s ``config.json`` that are unknown and harmless; they are kept.
        data: A dataset that the model was trained on, which tokenizer, processor and generation settings are made from;
            None for those of ``like``, or else of the run's own dataset.

    Raises:
        WeightsError: If the checkpoint is damaged or not of the architecture it names, or ``like`` is of another one.
    """
    architecture = read_architecture(source)
    unchecked = _check_files(source)
    config = config_for(architecture, like, ignore)
    chosen, notes = choose_dataset(source, like, data, architecture)
    reader = torch_strategies._get_filesystem_reader(str(source))
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    stored = {k: each for k, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
    mtp = any(key.startswith("language.predictor.") for key in stored)
    pieces = _pieces(_meta_model(architecture, mtp))
    rows = vocabulary_rows(architecture.language.vocab_size, 1)
    maps = spec_of(architecture).parameter_maps(architecture, mtp=mtp, vocab_rows=rows)
    require_none(_key_differences(pieces, {key: tuple(each.size) for key, each in stored.items()}), source)
    by_canonical = {canonical: ours for ours, canonical in pieces.canonical.items()}

    @lru_cache(maxsize=1)  # q, k and v are one parameter and follow one another
    def parameter(canonical: str) -> list[Tensor]:
        return maps[canonical].to_hf(pieces.load(by_canonical[canonical], reader, stored))

    owners = _owners(maps)
    first_keys = pieces.first_keys()
    keys = {name: first_keys[by_canonical[found[0][0]]] for name, found in owners.items()}
    planned = {
        name: PlannedTensor(shape, dtype or stored[keys[name]].properties.dtype)
        for name, shape in hf_names(maps).items()
    }

    def tensor(name: str) -> Tensor:
        parts = [parameter(canonical)[position] for canonical, position, _ in owners[name]]
        whole = owners[name][0][2] is None
        return parts[0] if whole else torch.stack(parts)

    out.mkdir(parents=True, exist_ok=True)
    if like is not None:
        copy_small_files(like, out)
    if chosen is not None:
        with opened(chosen) as dataset:
            write_processor(dataset, out)
    write_tensors(out, planned, tensor, file_bytes, progress)
    (out / CONFIG).write_text(json.dumps(with_dtypes(config, planned), indent=2) + "\n")
    total = sum(each.bytes for each in planned.values())
    return Converted(len(planned), total, mtp, unchecked, chosen, tuple(notes))


def _check_files(folder: Path) -> int:
    """Compares a checkpoint's files with their checksums; the number of those that have none."""
    try:
        damaged, unchecked = damaged_files(folder), unchecked_files(folder)
    except (OSError, ValueError) as error:
        damaged = [str(error)]
    if damaged:
        raise WeightsError(f"{folder}: {'; '.join(damaged)}. Take another checkpoint, or restore this one")
    return len(unchecked)


def read_architecture(folder: Path, ignore: Collection[str] = ()) -> Architecture:
    """The architecture beside some weights.

    Args:
        folder: Holds them.
        ignore: Fields of its ``config.json`` that are unknown and harmless.

    Raises:
        WeightsError: If there is none, or it is no Qwen3.5-VL.
    """
    return architecture_in(folder / CONFIG, read_config(folder), ignore)


def read_config(folder: Path) -> dict[str, Any]:
    """The architecture beside some weights: ``config.json``, or what a training run noted in ``run.json``.

    Raises:
        WeightsError: If there is neither.
    """
    if not (folder / "run.json").exists():
        return read_json(folder / CONFIG)
    state = read_json(folder / "run.json")
    try:
        return dict(state["architecture"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{folder / 'run.json'}: it does not say which model the weights are of") from error


@dataclass(frozen=True)
class _Pieces:
    """What megatron-core stores of every parameter.

    Attributes:
        state: The sharded state dict of a model without memory.
        canonical: From parameter names to canonical names.
        where: From key and offset of a piece to its parameter and number.
    """

    state: dict[str, Any]
    canonical: dict[str, str]
    where: dict[tuple[str, tuple[int, ...]], tuple[str, int]]

    def cut(self, name: str, parameter: Tensor) -> list[ShardedTensor]:
        """A parameter's pieces with their values."""
        entry = self.state[name]
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build_fn(entry.key, parameter, entry.replica_id, None)
            return [each for each in nested_values(built) if isinstance(each, ShardedTensor)]
        return [_with_data(entry, parameter)]

    def load(self, name: str, reader: StorageReader, stored: Mapping[str, TensorStorageMetadata]) -> Tensor:
        """A parameter, read from a checkpoint that may have cut it otherwise."""
        entry = self.state[name]
        if not isinstance(entry, ShardedTensorFactory):
            return _read(entry, reader, stored[entry.key])
        merged: Tensor = entry.merge_fn(_mapped(entry.build(), lambda piece: _read(piece, reader, stored[piece.key])))
        return merged

    def first_keys(self) -> dict[str, str]:
        """The key of every parameter's first piece."""
        return {owner: key for (key, _), (owner, number) in self.where.items() if number == 0}

    def set_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Lets every parameter be stored in the dtype it comes in."""
        for name, dtype in dtypes.items():
            entry = self.state[name]
            entry.data = entry.data.to(dtype)
            if isinstance(entry, ShardedTensor):
                entry.dtype = dtype


def _pieces(model: torch.nn.Module) -> _Pieces:
    state = model.sharded_state_dict()  # type: ignore[operator]
    canonical = canonical_names(model)
    where = {}
    for name in canonical:
        entry = state[name]
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        sharded = [each for each in nested_values(built) if isinstance(each, ShardedTensor)]
        for number, piece in enumerate(sharded):
            where[(piece.key, tuple(piece.global_offset))] = (name, number)
    return _Pieces(state, canonical, where)


def _meta_model(architecture: Architecture, mtp: bool) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = spec_of(architecture).build(
            architecture, ModelSettings(mtp_layers=architecture.mtp_layers if mtp else 0)
        )
    return model


def _owners(maps: Mapping[str, ParameterMap]) -> dict[str, list[tuple[str, int, int | None]]]:
    """For every Hugging Face tensor: the parameters that hold it, as which of their sources and which entry."""
    owners: dict[str, list[tuple[str, int, int | None]]] = {}
    for canonical, entry in maps.items():
        for position, source in enumerate(entry.sources):
            owners.setdefault(source.name, []).append((canonical, position, source.index))
    return {name: sorted(found, key=lambda each: each[2] or 0) for name, found in owners.items()}


def _dtype(files: HfTensors, entry: ParameterMap) -> torch.dtype:
    dtypes = [files.dtype(source.name) for source in entry.sources]
    for other in dtypes[1:]:
        dtypes[0] = torch.promote_types(dtypes[0], other)
    return dtypes[0]


def _key_differences(pieces: _Pieces, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
    wanted = {}
    for name in pieces.canonical:
        for piece in pieces.cut(name, pieces.state[name].data):
            if not piece.allow_shape_mismatch:
                wanted[piece.key] = tuple(piece.global_shape)
            elif piece.key in stored:  # the vocabulary, filled up differently for other layouts
                wanted[piece.key] = stored[piece.key]
    return differences(wanted, {key: shape for key, shape in stored.items() if not key.startswith("optimizer.")})


def _with_data(piece: ShardedTensor, data: Tensor) -> ShardedTensor:

    return dataclasses.replace(piece, data=data, dtype=data.dtype)


def _mapped(built: Any, function: Callable[[ShardedTensor], Tensor]) -> Any:
    if isinstance(built, ShardedTensor):
        return function(built)
    if isinstance(built, dict):
        return {key: _mapped(each, function) for key, each in built.items()}
    if isinstance(built, list | tuple):
        return type(built)(_mapped(each, function) for each in built)
    return built


def _read(piece: ShardedTensor, reader: StorageReader, stored: TensorStorageMetadata) -> Tensor:
    """A piece from whatever chunks of its tensor are stored."""
    assert piece.data is not None
    sizes = _stored_shape(piece)
    wanted = ChunkStorageMetadata(torch.Size(piece.global_offset), sizes)
    found = torch.empty(sizes, dtype=stored.properties.dtype, device="cpu")
    items = create_read_items_for_chunk_list(piece.key, stored, [wanted])
    reader.read_data(LoadPlan(items), _IntoTensor(found)).wait()
    return found.reshape(piece.data.shape)


def _stored_shape(piece: ShardedTensor) -> torch.Size:
    """Experts are entries of one tensor: each is stored with an axis before its own."""
    assert piece.data is not None
    return torch.Size([1] * piece.prepend_axis_num + list(piece.data.shape))


class _IntoTensor(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part: Tensor = narrow_tensor_by_index(self._tensor, read_item.dest_offsets, read_item.lengths)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


class _StreamingSave(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves a state dict without memory, asking for each piece when it is written."""

    def __init__(self, resolve: Callable[[MetadataIndex], Tensor]):
        super().__init__()
        self._resolve = resolve

    def save(self, sharded_state_dict: dict[str, ShardedBase], checkpoint_dir: Path | str) -> None:
        """Writes all pieces in one file."""
        by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, False)
        save(
            torch_strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1),
            planner=_StreamingPlanner(self._resolve),
        )


class _StreamingPlanner(torch_strategies.MCoreSavePlanner):
    def __init__(self, resolve: Callable[[MetadataIndex], Tensor]):
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False)
        self._resolve = resolve

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        if isinstance(found, Tensor):
            return self._resolve(write_item.index)
        return found
