"""Hugging Face checkpoints on disk, one tensor at a time.

The safetensors library reads the files by memory mapping. To write, it would want all tensors of a file in memory. The
format is an 8-byte little-endian header length, a JSON header with the dtype, shape and byte range of each tensor, and
the bytes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlmdata.errors import VlmdataError
from vlmdata.format.atomic import atomic_path, write_atomically

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: Supported data types of weights, as safetensors spells them.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class WeightsError(VlmdataError):
    """A checkpoint does not match the model."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint's files, with the dtype as safetensors spells it, such as ``BF16``."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class HfTensors:
    """The tensors of a folder's ``*.safetensors``, by name; a WeightsError if there are none, or one cannot be read."""

    def __init__(self, folder: Path):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{folder}: no *.safetensors files; give the folder of a Hugging Face checkpoint")
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in _contents(file):
                if name in self.tensors:
                    raise WeightsError(f"{name} is in both {self.tensors[name].file} and {file}; remove one")
                self.tensors[name] = tensor
        self._require_all_files()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, entry: int | None = None) -> Tensor:
        """Reads a tensor, or one entry of its first axis (an expert), into its own memory. Reads nothing else."""
        with _readable(self.tensors[name].file), safe_open(self.tensors[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name) if entry is None else file.get_slice(name)[entry]
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Returns a tensor's dtype; a WeightsError if it is not supported for weights."""
        stored = self.tensors[name]
        for dtype, spelled in DTYPES.items():
            if spelled == stored.dtype:
                return dtype
        known = ", ".join(DTYPES.values())
        raise WeightsError(f"{stored.file}: {name} is {stored.dtype}, not one of {known}: convert a checkpoint in bf16")

    def bytes(self, name: str) -> int:
        """Returns a tensor's size in bytes."""
        return PlannedTensor(self.tensors[name].shape, self.dtype(name)).bytes

    def _require_all_files(self) -> None:
        path = self.folder / _INDEX
        if not path.exists():
            return
        try:
            listed = dict(json.loads(path.read_text())["weight_map"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise WeightsError(f"{path} is no index of tensors: {error}. Download it again") from error
        gone = sorted({file for name, file in listed.items() if name not in self.tensors})
        if gone:
            raise WeightsError(
                f"{path} lists tensors that are not in the folder's files; missing or truncated: {', '.join(gone[:5])}"
                f"{' …' if len(gone) > 5 else ''}. Download the files again."
            )


def _contents(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    with _readable(file), safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            part = opened.get_slice(name)
            yield name, StoredTensor(file, tuple(part.get_shape()), part.get_dtype())


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file}: cannot be read: {error}; download it again") from error


def differences(wanted: Mapping[str, tuple[int, ...]], have: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns a line for each tensor that is missing, unexpected or of another shape."""
    lines = [f"missing: {name} {list(wanted[name])}" for name in wanted if name not in have]
    lines += [f"unexpected: {name} {list(have[name])}" for name in have if name not in wanted]
    lines += [
        f"shape: {name} is {list(have[name])}, but the model needs {list(wanted[name])}"
        for name in wanted
        if name in have and wanted[name] != have[name]
    ]
    return lines


def require_none(lines: Sequence[str], source: Path) -> None:
    """Raises a :class:`WeightsError` with the first 40 :func:`differences` of the weights in a folder, if any."""
    if lines:
        shown = "\n  ".join(lines[:40])
        more = f"\n  … and {len(lines) - 40} more" if len(lines) > 40 else ""
        raise WeightsError(f"{source} and its config.json disagree in {len(lines)} tensors:\n  {shown}{more}")


def write_tensors(
    folder: Path,
    planned: Mapping[str, PlannedTensor],
    tensors: Callable[[str], Tensor],
    file_bytes: int,
    wrote: Callable[[int], None] = lambda count: None,
) -> list[Path]:
    """Writes a checkpoint's tensors, in the order of ``planned``, with one in memory at a time.

    A file has at most ``file_bytes`` bytes, or one larger tensor. ``wrote`` gets the bytes of each. Several files get
    an index.
    """
    groups = _groups(planned, file_bytes)
    names = [_SINGLE]
    if len(groups) > 1:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        with atomic_path(folder / name) as path, path.open("wb") as file:
            file.write(_header(group, planned))
            for tensor_name in group:
                data = _bytes(tensors(tensor_name), planned[tensor_name], tensor_name)
                file.write(data)
                wrote(len(data))
    if len(groups) > 1:
        total = sum(tensor.bytes for tensor in planned.values())
        where = {each: name for name, group in zip(names, groups, strict=True) for each in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_atomically(folder / _INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return [folder / name for name in names]


def _groups(planned: Mapping[str, PlannedTensor], file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in planned.items():
        if groups[-1] and filled + tensor.bytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.bytes
    return groups


def _header(names: Sequence[str], planned: Mapping[str, PlannedTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        tensor = planned[name]
        span = [at, at + tensor.bytes]
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor, planned: PlannedTensor, name: str) -> memoryview:
    if tuple(tensor.shape) != planned.shape:
        raise WeightsError(f"{name} is {list(tensor.shape)}, but the model needs {list(planned.shape)}")
    flat = tensor.detach().to("cpu", planned.dtype).contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
