"""From a Hugging Face folder straight into a model: each rank reads what it holds, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from model.architecture import Architecture
from model.families import spec_of
from model.network.settings import vocabulary_rows
from model.weights.hf_files import HfTensors, differences, require_none
from model.weights.mapping import ParameterMap, hf_names, load_from_hf

#: Tensors that some tools write and nobody needs.
_IGNORED = ("rotary_emb.inv_freq",)
#: How the tensors of multi-token prediction begin.
_PREDICTION = "mtp."


@dataclass(frozen=True)
class ModelPart:
    """Which part of the weights a rank holds.

    Attributes:
        tensor_rank: Tensor-parallel rank.
        tensor_parallel: Tensor-parallel size.
        vision_parallel: That of the vision tower: the same (None), or 1.
        predicts: Whether multi-token prediction is loaded; without it the folder need not have it, and the model keeps
            what it has.
    """

    tensor_rank: int
    tensor_parallel: int
    vision_parallel: int | None
    predicts: bool


def holds_prediction(files: HfTensors) -> bool:
    """Whether a checkpoint has weights of multi-token prediction; those that transformers wrote have none."""
    return any(name.startswith(_PREDICTION) for name in files.tensors)


def table_of(files: HfTensors, architecture: Architecture, *, mtp: bool, rows: int) -> dict[str, ParameterMap]:
    """The table of weight names for a checkpoint, which must hold all its tensors and no others.

    Args:
        files: The checkpoint.
        architecture: Of its model.
        mtp: Whether multi-token prediction is part of it.
        rows: Rows of the embedding table.

    Raises:
        WeightsError: If tensors are missing, unexpected or of another shape, all of them listed.
    """
    maps = spec_of(architecture).parameter_maps(architecture, mtp=mtp, vocab_rows=rows, checkpoint_names=files.tensors)
    have = {
        name: tensor.shape
        for name, tensor in files.tensors.items()
        # A tied output layer is written by some tools all the same; it is the embedding.
        if not name.endswith(_IGNORED) and not (architecture.tie_embeddings and name == "lm_head.weight")
    }
    require_none(differences(hf_names(maps), have), files.folder)
    return maps


def fill_from_folder(model: nn.Module, folder: Path, architecture: Architecture, part: ModelPart) -> int:
    """Fills this rank's parameters from a folder's ``*.safetensors``.

    Memory: the files are mapped, and one parameter at a time is put together and cut. No collectives.

    Args:
        model: A model of any layout and back end, unwrapped.
        folder: The checkpoint.
        architecture: Of the model.
        part: What this rank holds.

    Returns:
        Bytes of the checkpoint's tensors.

    Raises:
        WeightsError: If the files hold another model, or cannot be read.
    """
    files = HfTensors(folder)
    rows = vocabulary_rows(architecture.language.vocab_size, part.tensor_parallel)
    table_of(files, architecture, mtp=holds_prediction(files), rows=rows)
    maps = spec_of(architecture).parameter_maps(architecture, vocab_rows=rows, checkpoint_names=files.tensors)
    load_from_hf(
        model,
        maps,
        lambda source: files.read(source.name, source.index),
        tensor_rank=part.tensor_rank,
        tensor_parallel=part.tensor_parallel,
        vision_parallel=part.vision_parallel,
        leave=() if part.predicts else ("language.predictor.",),
    )
    return sum(files.bytes(name) for name in files.tensors)
