"""Converts weights between Hugging Face files and megatron-core's distributed checkpoint, one tensor at a time.

A distributed checkpoint does not depend on the layout that wrote it, so one conversion serves every TP, PP and EP. The
model is built without memory (on the ``meta`` device) to find megatron-core's keys, shapes and shards. Values move
through the model family's name table (:mod:`model.weights.mapping`). Both directions only rearrange values, so they are
exact.
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
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
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
from model.weights.hf_load import TOWER, holds_prediction, table_of, tower_of
from model.weights.hf_processor import choose_dataset, opened, write_processor
from model.weights.mapping import ParameterMap, canonical_names, hf_names
from model.weights.output import reading_from, writing_to
from model.weights.streaming import StreamingSave
from model.weights.vision_names import VISUAL

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        tensors: Hugging Face tensors read or written.
        bytes: Their size in bytes.
        mtp: Whether they include multi-token prediction.
        unchecked: Number of files read without a checksum to compare with.
        data: The dataset that supplied tokenizer and processor.
        notes: Notes for the user, one line each.
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

    Needs process groups of one process (:func:`model.parallel.groups.initialize`), and CPU mode without CUDA.

    Args:
        source: Folder with ``config.json`` and ``*.safetensors``.
        out: Output folder; must be empty or absent.
        progress: Called with the number of bytes written.
        ignore: Unknown fields of ``config.json`` to ignore. The written file omits them.

    Raises:
        WeightsError: If tensors are missing, unexpected or of the wrong shape; lists all of them.
        ResourceError: If the files cannot be written. Nothing is left of them.
    """
    architecture = read_architecture(source, ignore)
    files = HfTensors(source)
    mtp = holds_prediction(files)
    maps = table_of(files, architecture, mtp=mtp, rows=vocabulary_rows(architecture.language.vocab_size, 1))
    wanted = hf_names(maps)
    pieces = _pieces(_meta_model(architecture, mtp))

    @lru_cache(maxsize=1)  # the pieces of a parameter are consecutive
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
    # Copies, because saving modifies its input.
    state = {name: copy.copy(entry) for name, entry in pieces.state.items()}
    with writing_to(out) as folder:
        dist_checkpointing.save(state, str(folder), sharded_strategy=StreamingSave(resolve))
        (folder / CONFIG).write_text(json.dumps(architecture_to_hf(architecture), indent=2) + "\n")
        write_checksums(folder)
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
    """Writes a Hugging Face folder from a distributed checkpoint of ``to_megatron`` or of a training run.

    Args:
        source: The checkpoint.
        out: Output folder; must be empty or absent.
        like: A Hugging Face folder of the same model. Its other files (tokenizer, processor) are copied, and its
            ``config.json`` is kept except for dtypes. None writes a ``config.json`` with the architecture only. For a
            checkpoint of the language model alone, the folder supplies the vision tower too.
        dtype: Dtype of the weights; None keeps the dtypes of the checkpoint.
        file_bytes: Largest file size in bytes, unless one tensor is larger.
        progress: Called with the number of bytes written.
        ignore: Unknown fields of ``like``'s ``config.json`` to ignore; they are kept.
        data: A training dataset that supplies tokenizer, processor and generation settings. None means those of
            ``like``, or else of the run's own dataset.

    Raises:
        WeightsError: If the checkpoint is damaged or was removed meanwhile, or it or ``like`` is of another
            architecture.
        ResourceError: If the files cannot be written. Nothing is left of them.
    """
    architecture = read_architecture(source)
    unchecked = _check_files(source)
    config = config_for(architecture, like, ignore)
    chosen, notes = choose_dataset(source, like, data, architecture)
    reader = torch_strategies._get_filesystem_reader(str(source))
    with reading_from(source):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
    stored = {k: each for k, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
    mtp = any(key.startswith("language.predictor.") for key in stored)
    alone = not any(key.startswith(TOWER) for key in stored)
    pieces = _pieces(_meta_model(architecture, mtp, language_only=alone))
    rows = vocabulary_rows(architecture.language.vocab_size, 1)
    maps = spec_of(architecture).parameter_maps(architecture, mtp=mtp, vocab_rows=rows)
    tower: HfTensors | None = None
    if alone:
        tower = tower_of(source, like, maps)
        maps = {name: entry for name, entry in maps.items() if not name.startswith(TOWER)}
    require_none(_key_differences(pieces, {key: tuple(each.size) for key, each in stored.items()}), source)
    by_canonical = {canonical: ours for ours, canonical in pieces.canonical.items()}

    @lru_cache(maxsize=1)  # q, k and v are one parameter and are consecutive
    def parameter(canonical: str) -> list[Tensor]:
        with reading_from(source):
            loaded = pieces.load(by_canonical[canonical], reader, stored)
        return maps[canonical].to_hf(loaded)

    owners = _owners(maps)
    first_keys = pieces.first_keys()
    keys = {name: first_keys[by_canonical[found[0][0]]] for name, found in owners.items()}
    planned = {
        name: PlannedTensor(shape, dtype or stored[keys[name]].properties.dtype)
        for name, shape in hf_names(maps).items()
    }

    if tower is not None:
        names = [name for name in tower.tensors if name not in planned and name.startswith(VISUAL)]
        planned = {
            name: PlannedTensor(tower.tensors[name].shape, dtype or tower.dtype(name)) for name in names
        } | planned

    def tensor(name: str) -> Tensor:
        if name not in owners:
            assert tower is not None
            return tower.read(name, None)
        parts = [parameter(canonical)[position] for canonical, position, _ in owners[name]]
        whole = owners[name][0][2] is None
        return parts[0] if whole else torch.stack(parts)

    with writing_to(out) as folder:
        if like is not None:
            copy_small_files(like, folder)
        if chosen is not None:
            with opened(chosen) as dataset:
                write_processor(dataset, folder)
        write_tensors(folder, planned, tensor, file_bytes, progress)
        (folder / CONFIG).write_text(json.dumps(with_dtypes(config, planned), indent=2) + "\n")
    total = sum(each.bytes for each in planned.values())
    return Converted(len(planned), total, mtp, unchecked, chosen, tuple(notes))


def _check_files(folder: Path) -> int:
    """Compares a checkpoint's files with their checksums. Returns the number of files without one."""
    try:
        damaged, unchecked = damaged_files(folder), unchecked_files(folder)
    except (OSError, ValueError) as error:
        damaged = [str(error)]
    if damaged:
        raise WeightsError(f"{folder}: {'; '.join(damaged)}. Use another checkpoint, or restore this one")
    return len(unchecked)


def read_architecture(folder: Path, ignore: Collection[str] = ()) -> Architecture:
    """Reads the architecture of a folder of weights.

    Args:
        folder: Folder with the weights.
        ignore: Unknown fields of its ``config.json`` to ignore.

    Raises:
        WeightsError: If it is missing, or no family has such models.
    """
    return architecture_in(folder / CONFIG, read_config(folder), ignore)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config of a folder of weights: ``config.json``, or a training run's ``run.json``.

    Raises:
        WeightsError: If both are missing.
    """
    if not (folder / "run.json").exists():
        return read_json(folder / CONFIG)
    state = read_json(folder / "run.json")
    try:
        return dict(state["architecture"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{folder / 'run.json'}: it does not describe the model of the weights") from error


@dataclass(frozen=True)
class _Pieces:
    """megatron-core's stored pieces of each parameter.

    Attributes:
        state: The sharded state dict of a model on the meta device.
        canonical: Canonical names by parameter name.
        where: Parameter and piece number by key and offset of a piece.
    """

    state: dict[str, Any]
    canonical: dict[str, str]
    where: dict[tuple[str, tuple[int, ...]], tuple[str, int]]

    def cut(self, name: str, parameter: Tensor) -> list[ShardedTensor]:
        """Splits a parameter into pieces with their values."""
        entry = self.state[name]
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build_fn(entry.key, parameter, entry.replica_id, None)
            return [each for each in nested_values(built) if isinstance(each, ShardedTensor)]
        return [_with_data(entry, parameter)]

    def load(self, name: str, reader: StorageReader, stored: Mapping[str, TensorStorageMetadata]) -> Tensor:
        """Reads a parameter from a checkpoint that may be sharded differently."""
        entry = self.state[name]
        if not isinstance(entry, ShardedTensorFactory):
            return _read(entry, reader, stored[entry.key])
        merged: Tensor = entry.merge_fn(_mapped(entry.build(), lambda piece: _read(piece, reader, stored[piece.key])))
        return merged

    def first_keys(self) -> dict[str, str]:
        """Returns the key of each parameter's first piece."""
        return {owner: key for (key, _), (owner, number) in self.where.items() if number == 0}

    def set_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Sets the dtype in which each parameter is stored."""
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


def _meta_model(architecture: Architecture, mtp: bool, language_only: bool = False) -> torch.nn.Module:
    settings = ModelSettings(mtp_layers=architecture.mtp_layers if mtp else 0, language_only=language_only)
    with torch.device("meta"):
        model: torch.nn.Module = spec_of(architecture).build(architecture, settings)
    return model


def _owners(maps: Mapping[str, ParameterMap]) -> dict[str, list[tuple[str, int, int | None]]]:
    """Maps each Hugging Face tensor to its parameters, with the source number and the entry in each."""
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
            elif piece.key in stored:  # the vocabulary, padded differently in other layouts
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
    """Reads a piece from the stored chunks of its tensor."""
    assert piece.data is not None
    sizes = _stored_shape(piece)
    wanted = ChunkStorageMetadata(torch.Size(piece.global_offset), sizes)
    found = torch.empty(sizes, dtype=stored.properties.dtype, device="cpu")
    items = create_read_items_for_chunk_list(piece.key, stored, [wanted])
    reader.read_data(LoadPlan(items), _IntoTensor(found)).wait()
    return found.reshape(piece.data.shape)


def _stored_shape(piece: ShardedTensor) -> torch.Size:
    """Returns the shape in storage. Experts are entries of one tensor, so each has one axis more in front."""
    assert piece.data is not None
    return torch.Size([1] * piece.prepend_axis_num + list(piece.data.shape))


class _IntoTensor(DefaultLoadPlanner):
    """Loads into one tensor."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part: Tensor = narrow_tensor_by_index(self._tensor, read_item.dest_offsets, read_item.lengths)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
