"""Converts weights between Hugging Face files and megatron-core's distributed checkpoint, one tensor at a time.

A distributed checkpoint does not depend on the layout that wrote it. The model is built on the ``meta`` device to find
megatron-core's keys, shapes and shards. Values move through the family's name table
(:mod:`vlmdata.model.weight_names.table`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader

from vlmdata.model.architecture import Architecture
from vlmdata.model.families import architecture_to_hf, spec_of
from vlmdata.model.network.settings import ModelSettings, vocabulary_rows
from vlmdata.model.weight_names.table import ParameterMap, canonical_names, hf_names
from vlmdata.model.weight_names.vision import VISUAL
from vlmdata.model.weights.checksums import require_sound, write_checksums
from vlmdata.model.weights.hf_files import (
    HfTensors,
    PlannedTensor,
    WeightsError,
    differences,
    require_none,
    write_tensors,
)
from vlmdata.model.weights.hf_folder import CONFIG, architecture_in, config_for, read_json, read_run, with_dtypes
from vlmdata.model.weights.hf_load import TOWER, holds_prediction, table_of, tower_of
from vlmdata.model.weights.hf_processor import choose_dataset, complete
from vlmdata.model.weights.output import reading_from, writing_to
from vlmdata.model.weights.store import StreamingSave

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    tensors: int  # Hugging Face tensors read or written
    bytes: int  # their size in bytes
    mtp: bool  # whether they include multi-token prediction
    unchecked: int = 0  # number of files read without a checksum to compare with
    data: str | None = None  # the dataset that supplied tokenizer and processor
    notes: tuple[str, ...] = ()  # notes for the user, one line each


def to_megatron(
    source: Path, out: Path, progress: Progress = lambda count: None, ignore: Collection[str] = ()
) -> Converted:
    """Writes a distributed checkpoint from a Hugging Face folder.

    Needs process groups of one process (:func:`vlmdata.model.parallel.groups.initialize`), and CPU mode without CUDA.
    ``out`` must be empty or absent. Fields of ``config.json`` to ignore are not written. ``progress`` gets numbers of
    bytes written.

    Raises:
        WeightsError: If tensors are missing, unexpected or of the wrong shape; lists all of them.
        ResourceError: If the files cannot be written. Nothing is left of them.
    """
    architecture = read_architecture(source, ignore)
    files = HfTensors(source)
    mtp = holds_prediction(files)
    maps = table_of(files, architecture, mtp=mtp, rows=vocabulary_rows(architecture.language.vocab_size, 1))
    wanted = hf_names(maps)
    pieces = _pieces(meta_model(architecture, mtp))

    @functools.lru_cache(maxsize=1)  # the pieces of a parameter are consecutive
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

    for ours, canonical in pieces.canonical.items():
        dtypes = (files.dtype(source.name) for source in maps[canonical].sources)
        pieces.set_dtype(ours, functools.reduce(torch.promote_types, dtypes))
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

    Of a Hugging Face folder ``like`` of the same model, other files (tokenizer, processor) are copied, and
    ``config.json`` is kept except for dtypes. Its unknown fields to ignore are kept. Without ``like``, ``config.json``
    has the architecture only. For a checkpoint of the language model alone, the folder supplies the vision tower too.
    ``data`` is a training dataset that supplies tokenizer, processor and generation settings. None means those of
    ``like``, or else of the run's own dataset. Without ``dtype``, weights keep theirs. A file has at most
    ``file_bytes`` bytes, unless one tensor is larger. ``progress`` gets numbers of bytes written. ``out`` must be empty
    or absent.

    Raises:
        WeightsError: If the checkpoint is damaged or removed, or it or ``like`` is of another architecture.
        ResourceError: If the files cannot be written. Nothing is left of them.
    """
    architecture = read_architecture(source)
    unchecked = files_without_checksum(source)
    config = config_for(architecture, like, ignore)
    chosen, notes = choose_dataset(source, like, data, architecture)
    reader, stored = opened_checkpoint(source)
    mtp = any(key.startswith("language.predictor.") for key in stored)
    alone = not any(key.startswith(TOWER) for key in stored)
    pieces = _pieces(meta_model(architecture, mtp, language_only=alone))
    rows = vocabulary_rows(architecture.language.vocab_size, 1)
    maps = spec_of(architecture).parameter_maps(architecture, mtp=mtp, vocab_rows=rows)
    tower: HfTensors | None = None
    if alone:
        tower = tower_of(source, like, maps)
        maps = {name: entry for name, entry in maps.items() if not name.startswith(TOWER)}
    require_none(_key_differences(pieces, {key: tuple(each.size) for key, each in stored.items()}), source)
    by_canonical = {canonical: ours for ours, canonical in pieces.canonical.items()}

    @functools.lru_cache(maxsize=1)  # q, k and v are one parameter and are consecutive
    def parameter(canonical: str) -> list[Tensor]:
        with reading_from(source):
            loaded = pieces.load(by_canonical[canonical], reader, stored)
        return maps[canonical].to_hf(loaded)

    owners = _owners(maps)
    first_keys = {owner: key for (key, _), (owner, number) in pieces.where.items() if number == 0}
    keys = {name: first_keys[by_canonical[found[0][0]]] for name, found in owners.items()}
    planned = {
        name: PlannedTensor(shape, dtype or stored[keys[name]].properties.dtype)
        for name, shape in hf_names(maps).items()
    }

    if tower is not None:
        names = [name for name in tower.tensors if name not in planned and name.startswith(VISUAL)]
        of_tower = {name: PlannedTensor(tower.tensors[name].shape, dtype or tower.dtype(name)) for name in names}
        planned = of_tower | planned

    def tensor(name: str) -> Tensor:
        if name not in owners:
            assert tower is not None
            return tower.read(name, None)
        parts = [parameter(canonical)[position] for canonical, position, _ in owners[name]]
        whole = owners[name][0][2] is None
        return parts[0] if whole else torch.stack(parts)

    with writing_to(out) as folder:
        notes += complete(folder, like, chosen, architecture)
        write_tensors(folder, planned, tensor, file_bytes, progress)
        (folder / CONFIG).write_text(json.dumps(with_dtypes(config, planned), indent=2) + "\n")
    total = sum(each.bytes for each in planned.values())
    return Converted(len(planned), total, mtp, unchecked, chosen, tuple(notes))


def read_architecture(folder: Path, ignore: Collection[str] = ()) -> Architecture:
    """Reads the architecture of a folder of weights, from its ``config.json``, or a training run's ``run.json``.

    Fields of ``config.json`` to ignore are left out.
    """
    run = folder / "run.json"
    if not run.exists():
        return architecture_in(folder / CONFIG, read_json(folder / CONFIG), ignore)
    try:
        config = dict(read_run(folder)["architecture"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{run}: it does not describe the model of the weights") from error
    return architecture_in(folder / CONFIG, config, ignore)


@dataclass(frozen=True)
class _ParameterPieces:
    """megatron-core's stored pieces of each parameter: by key and offset, the parameter's name and the piece's number.

    ``state`` is the sharded state dict of a model on the meta device. ``canonical`` are names by parameter name.
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
        return [dataclasses.replace(entry, data=parameter, dtype=parameter.dtype)]

    def load(self, name: str, reader: StorageReader, stored: Mapping[str, TensorStorageMetadata]) -> Tensor:
        """Reads a parameter from a checkpoint that may be sharded differently."""
        entry = self.state[name]
        if not isinstance(entry, ShardedTensorFactory):
            return read_piece(entry, reader, stored[entry.key])
        read = dict_list_map_outplace(lambda piece: read_piece(piece, reader, stored[piece.key]), entry.build())
        merged: Tensor = entry.merge_fn(read)
        return merged

    def set_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Sets the dtype in which a parameter is stored."""
        entry = self.state[name]
        entry.data = entry.data.to(dtype)
        if isinstance(entry, ShardedTensor):
            entry.dtype = dtype


def _pieces(model: torch.nn.Module) -> _ParameterPieces:
    state = model.sharded_state_dict()  # type: ignore[operator]
    canonical = canonical_names(model)
    where = {}
    for name, _ in model.named_parameters():
        entry = state[name]
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        sharded = [each for each in nested_values(built) if isinstance(each, ShardedTensor)]
        for number, piece in enumerate(sharded):
            where[(piece.key, tuple(piece.global_offset))] = (name, number)
    return _ParameterPieces(state, canonical, where)


def files_without_checksum(source: Path) -> int:
    """Checks the files of a checkpoint against their checksums. Returns how many have none."""
    try:
        return len(require_sound(source))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{source}: {error}. Use another checkpoint, or restore this one") from error


def opened_checkpoint(source: Path) -> tuple[StorageReader, dict[str, TensorStorageMetadata]]:
    """Opens a distributed checkpoint. Returns its reader and where its tensors are."""
    reader = torch_strategies._get_filesystem_reader(str(source))
    with reading_from(source):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
    found = metadata.state_dict_metadata
    return reader, {key: each for key, each in found.items() if isinstance(each, TensorStorageMetadata)}


def meta_model(architecture: Architecture, mtp: bool, language_only: bool = False) -> torch.nn.Module:
    """Builds a model of one process without memory."""
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


def _key_differences(pieces: _ParameterPieces, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
    wanted = {}
    for name in dict.fromkeys(owner for owner, _ in pieces.where.values()):
        for piece in pieces.cut(name, pieces.state[name].data):
            if not piece.allow_shape_mismatch:
                wanted[piece.key] = tuple(piece.global_shape)
            elif piece.key in stored:  # the vocabulary, padded differently in other layouts
                wanted[piece.key] = stored[piece.key]
    return differences(wanted, {key: shape for key, shape in stored.items() if not key.startswith("optimizer.")})


def read_piece(piece: ShardedTensor, reader: StorageReader, stored: TensorStorageMetadata) -> Tensor:
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
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._tensor[tuple(slice(start, start + length) for start, length in places)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
