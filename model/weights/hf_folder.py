"""Files of a Hugging Face folder other than weights: ``config.json``, tokenizer, processor, generation settings."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vlmdata.differences import differing
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import architecture_from_hf, architecture_to_hf
from vlmdata.model.weight_names.vision import VISUAL
from vlmdata.model.weights.checksums import require_unchanged
from vlmdata.model.weights.hf_files import PlannedTensor, WeightsError

#: The architecture, as a Hugging Face config.
CONFIG = "config.json"
#: Suffixes of files that hold weights.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
#: Name of the dtype field in transformers, now and before version 5.
_DTYPE_FIELDS = ("dtype", "torch_dtype")


def config_for(architecture: Architecture, like: Path | None, ignore: Collection[str] = ()) -> dict[str, Any]:
    """Returns the content of a ``config.json`` without dtypes.

    With a folder ``like``, it is that folder's, with all that an :class:`Architecture` does not hold (ids of other
    tokens, versions, notes). A WeightsError if the folder holds another model, or one of no known family.
    """
    ours = architecture_to_hf(architecture)
    if like is None:
        return ours
    config = read_json(like / CONFIG)
    theirs = architecture_to_hf(architecture_in(like / CONFIG, config, ignore))
    lines = [f"{name}: {given!r}, but the weights have {wanted!r}" for name, given, wanted in differing(theirs, ours)]
    if lines:
        raise WeightsError(
            f"--like {like} is another model: {'; '.join(lines)}. Give the folder of the checkpoint that these weights "
            "started from, or omit --like"
        )
    return config


def architecture_in(path: Path, config: Mapping[str, Any], ignore: Collection[str] = ()) -> Architecture:
    """Reads the architecture from a config; a WeightsError with the path if no family has such models."""
    try:
        return architecture_from_hf(config, ignore=ignore)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; a WeightsError if there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(
            f"{path.parent}: no readable {path.name}, which describes the model of the weights: {error}"
        ) from error


def read_run(checkpoint: Path) -> dict[str, Any]:
    """Reads the ``run.json`` of a training run's checkpoint; a WeightsError if there is none, or it changed."""
    values = read_json(checkpoint / "run.json")
    try:
        require_unchanged(values)
    except ValueError as error:
        raise WeightsError(
            f"{checkpoint / 'run.json'}: {error}. Use another checkpoint, or restore this one"
        ) from error
    return values


def with_dtypes(config: Mapping[str, Any], planned: Mapping[str, PlannedTensor]) -> dict[str, Any]:
    """Returns a config with the dtypes of written weights, in its existing dtype fields or else in one new field.

    A section's dtype is the one of most of its bytes.
    """
    vision = {name: tensor for name, tensor in planned.items() if name.startswith(VISUAL)}
    text = {name: tensor for name, tensor in planned.items() if name not in vision}
    out = {"text_config": dict(config["text_config"]), "vision_config": dict(config.get("vision_config") or {})}
    found = False
    whole = dict(config)
    for section, tensors in ((whole, planned), (out["text_config"], text), (out["vision_config"], vision)):
        for field in _DTYPE_FIELDS:
            if section.get(field) is not None:
                section[field], found = _main_dtype(tensors), True
    whole |= {name: section for name, section in out.items() if name in config}
    return whole if found else whole | {"dtype": _main_dtype(planned)}


def copy_small_files(like: Path, out: Path) -> list[str]:
    """Copies the files of a folder except weights, config, code, hidden files and links to other folders.

    In a hub's cache, the files of a folder are links to the ``blobs`` of their model, and are copied.

    Returns:
        Notes for the user: what else was left out.
    """
    home, left_out = like.resolve(), list[str]()
    homes = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}
    for file in sorted(like.iterdir()):
        weights = file.suffix in _WEIGHTS or "safetensors" in file.name
        if not file.is_file() or weights or file.name == CONFIG or file.name.startswith("."):
            continue
        if file.suffix == ".py" or file.resolve().parent not in homes:
            left_out.append(file.name)
        else:
            shutil.copy(file, out / file.name)
    return [f"not copied from {like}, as code or a link to elsewhere: {', '.join(left_out)}"] if left_out else []


def _main_dtype(tensors: Mapping[str, PlannedTensor]) -> str:
    count: Counter[str] = Counter()
    for tensor in tensors.values():
        count[str(tensor.dtype).removeprefix("torch.")] += tensor.bytes
    return count.most_common(1)[0][0]
