"""Loads a Hugging Face folder directly into a model: each rank reads its own part, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from vlmdata.model.architecture import Architecture
from vlmdata.model.families import spec_of
from vlmdata.model.network.settings import vocabulary_rows
from vlmdata.model.weight_names.table import ParameterMap, hf_names, load_from_hf
from vlmdata.model.weights.hf_files import HfTensors, WeightsError, differences, require_none

#: Tensors that some tools write and no model needs.
_IGNORED = ("rotary_emb.inv_freq",)
#: Name prefix of multi-token prediction tensors.
_PREDICTION = "mtp."
#: Prefix of the vision tower's canonical names, and of its keys in a distributed checkpoint.
TOWER = "vision."


def holds_prediction(files: HfTensors) -> bool:
    """True if a checkpoint has multi-token prediction weights. Checkpoints written by transformers have none."""
    return any(name.startswith(_PREDICTION) for name in files.tensors)


def table_of(files: HfTensors, architecture: Architecture, *, mtp: bool, rows: int) -> dict[str, ParameterMap]:
    """Returns the weight name table of a checkpoint, with ``rows`` rows of embeddings.

    A WeightsError lists all tensors that are missing, unexpected or of another shape.
    """
    maps = spec_of(architecture).parameter_maps(architecture, mtp=mtp, vocab_rows=rows, stored=files.shapes)
    have = {
        name: shape
        for name, shape in files.shapes.items()
        # Some tools write a tied output layer nevertheless. It equals the embedding.
        if not name.endswith(_IGNORED) and not (architecture.tie_embeddings and name == "lm_head.weight")
    }
    require_none(differences(hf_names(maps), have), files.folder)
    return maps


def fill_from_folder(
    model: nn.Module,
    folder: Path,
    architecture: Architecture,
    *,
    tensor_rank: int = 0,
    tensor_parallel: int = 1,
    vision_parallel: int | None = None,
    predicts: bool = False,
) -> int:
    """Fills this rank's parameters of an unwrapped model from a folder's ``*.safetensors``. Returns the tensors' bytes.

    The files are memory-mapped, and one parameter at a time is assembled and sharded. Sizes are those of
    :func:`load_from_hf`. Without ``predicts``, the folder need not contain multi-token prediction, and the model keeps
    its own values. Uses no collectives. A WeightsError if the files hold another model, or cannot be read.
    """
    files = HfTensors(folder)
    rows = vocabulary_rows(architecture.language.vocab_size, tensor_parallel)
    table_of(files, architecture, mtp=holds_prediction(files), rows=rows)
    maps = spec_of(architecture).parameter_maps(architecture, vocab_rows=rows, stored=files.shapes)
    load_from_hf(
        model,
        maps,
        lambda source: files.read(source.name, source.index),
        tensor_rank=tensor_rank,
        tensor_parallel=tensor_parallel,
        vision_parallel=vision_parallel,
        leave=() if predicts else ("language.predictor.",),
    )
    return sum(files.bytes(name) for name in files.tensors)


def tower_of(source: Path, like: Path | None, maps: Mapping[str, ParameterMap]) -> HfTensors:
    """Returns the files ``like`` that have the vision tower of ``source``, a checkpoint of the language model alone.

    A WeightsError if no folder is given, or it lacks tensors of the tower.
    """
    if like is None:
        raise WeightsError(
            f"{source} holds the language model alone: give the folder of the checkpoint that it started from with "
            "--like, which supplies the vision tower"
        )
    files = HfTensors(like)
    wanted = hf_names({name: entry for name, entry in maps.items() if name.startswith(TOWER)})
    have = {name: tensor.shape for name, tensor in files.tensors.items() if name in wanted}
    require_none(differences(wanted, have), like)
    return files
