"""Exports of runs with adapters: PEFT's format, or a Hugging Face folder whose weights have the adapters merged.

A run's checkpoint holds its adapters, not the weights that they belong to. These are read from the folder that the run
began with.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmdata.model.families import spec_of
from vlmdata.model.lora.adapters import Factors, LinearAdapter
from vlmdata.model.lora.attach import Plan, adapters_of, attach, plan_of
from vlmdata.model.lora.digest import counts, formatted, share
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.lora.peft_files import write_adapter
from vlmdata.model.lora.sites import sites_of
from vlmdata.model.network.settings import vocabulary_rows
from vlmdata.model.weight_names.table import ParameterMap
from vlmdata.model.weights.convert import (
    Converted,
    Progress,
    files_without_checksum,
    meta_model,
    opened_checkpoint,
    read_architecture,
    read_piece,
)
from vlmdata.model.weights.hf_files import HfTensors, PlannedTensor, WeightsError, write_tensors
from vlmdata.model.weights.hf_folder import CONFIG, config_for, read_run, with_dtypes
from vlmdata.model.weights.hf_load import holds_prediction, table_of
from vlmdata.model.weights.hf_processor import choose_dataset, complete
from vlmdata.model.weights.output import reading_from, writing_to


def adapted_in(source: Path) -> LoraOptions | None:
    """Returns the options of the adapters that a run's checkpoint holds; None if it holds a model's weights."""
    try:
        found = read_run(source)["config"].get("lora") or {}
    except (OSError, KeyError, ValueError, TypeError, AttributeError, WeightsError):
        return None
    if found.get("rank") is None:
        return None
    known = {each.name for each in dataclasses.fields(LoraOptions)}
    return LoraOptions(**{name: value for name, value in found.items() if name in known})


def to_peft(source: Path, out: Path, base: str | None = None) -> Converted:
    """Writes the adapters of a run's checkpoint in PEFT's format. Needs the process groups of ``to_hf``.

    Args:
        source: The checkpoint.
        out: Output folder, empty or absent.
        base: Folder or hub id of the weights that they belong to, for ``adapter_config.json``; None for the run's.

    Raises:
        WeightsError: If the checkpoint is damaged, or the run trained weights of the tower too.
        ResourceError: If the files cannot be written. Nothing is left of them.
    """
    options = adapted_in(source)
    assert options is not None
    if options.full_parts:
        raise WeightsError(
            f"{source} holds trained weights of the part {options.full_parts[0]!r} beside its adapters, for which "
            "PEFT's format has no place: merge them into a full checkpoint with --merge"
        )
    unchecked = files_without_checksum(source)
    plan, factors = _read(source, options)
    mtp = [name for name, site in plan.sites.items() if site.group == "mtp"]
    notes = [f"{len(mtp)} adapters of multi-token prediction are left out, which transformers does not have"]
    with writing_to(out) as folder:
        size = write_adapter(folder, factors, sites_of(plan.maps), options, base or _base_of(source))
    return Converted(2 * (len(factors) - len(mtp)), size, bool(mtp), unchecked, None, tuple(notes if mtp else ()))


def merge(
    source: Path,
    out: Path,
    base: Path,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5_000_000_000,
    progress: Progress = lambda count: None,
    ignore: Collection[str] = (),
    data: str | None = None,
) -> Converted:
    """Writes a Hugging Face folder like ``base`` with the adapters of a run's checkpoint merged into its weights.

    Sums are computed in float32. The other arguments, and what is written beside the weights, are those of
    :func:`vlmdata.model.weights.convert.to_hf` with ``like``.

    Raises:
        WeightsError: If the checkpoint is damaged, ``base`` is of another architecture, or the run quantized it.
        ResourceError: If the files cannot be written. Nothing is left of them.
    """
    options = adapted_in(source)
    assert options is not None
    _require_mergeable(source, options)
    architecture, unchecked = read_architecture(source), files_without_checksum(source)
    config = config_for(architecture, base, ignore)
    chosen, notes = choose_dataset(source, base, data, architecture)
    files = HfTensors(base)
    mtp = holds_prediction(files)
    table_of(files, architecture, mtp=mtp, rows=vocabulary_rows(architecture.language.vocab_size, 1))
    maps = spec_of(architecture).parameter_maps(architecture, mtp=mtp, stored=files.shapes)
    # An error for quantized weights.
    planned = {name: PlannedTensor(shape, files.dtype(name)) for name, shape in files.shapes.items()}
    if dtype is not None:
        planned = {name: PlannedTensor(each.shape, dtype) for name, each in planned.items()}
    added, trained, plan = _changes(source, options)
    _require_same_base(source, base, files, {name: maps[name] for name in plan.maps if name in maps}, set(trained))
    owners: dict[str, list[str]] = {}
    for canonical in sorted({*added, *trained} & set(maps)):
        for each in maps[canonical].sources:
            owners.setdefault(each.name, []).append(canonical)

    @functools.lru_cache(maxsize=1)  # queries, keys and values are one parameter and are consecutive
    def parameter(canonical: str) -> list[Tensor]:
        entry = maps[canonical]
        if canonical in trained:
            return entry.to_hf(trained[canonical]())
        whole = entry.to_mcore([files.read(each.name, each.index) for each in entry.sources])
        return entry.to_hf((whole.float() + added[canonical]()).to(whole.dtype))

    def tensor(name: str) -> Tensor:
        if name not in owners:
            return files.read(name, None)
        parts = [_part(maps[canonical], parameter(canonical), name) for canonical in owners[name]]
        if parts[0][0] is None:
            return parts[0][1]
        whole = files.read(name, None).clone()  # experts, some or all of which are adapted
        for number, value in parts:
            whole[number] = value
        return whole

    with writing_to(out) as folder:
        notes += complete(folder, base, chosen, architecture)
        write_tensors(folder, planned, tensor, file_bytes, progress)
        (folder / CONFIG).write_text(json.dumps(with_dtypes(config, planned), indent=2) + "\n")
    total = sum(each.bytes for each in planned.values())
    return Converted(len(planned), total, mtp, unchecked, chosen, tuple(notes))


def _part(entry: ParameterMap, parts: list[Tensor], name: str) -> tuple[int | None, Tensor]:
    """Returns the part of a parameter that belongs to a tensor, and its number in it."""
    (position,) = (number for number, source in enumerate(entry.sources) if source.name == name)
    return entry.sources[position].index, parts[position]


def base_folder(source: Path) -> Path:
    """Returns the folder of the weights that a run with adapters began with.

    Raises:
        WeightsError: If it is not a Hugging Face folder on this machine, or the run quantized it.
    """
    options = adapted_in(source)
    assert options is not None
    _require_mergeable(source, options)
    found = _base_of(source)
    if found is None or not any(Path(found).glob("*.safetensors")):
        where = "none is recorded" if found is None else f"the run began with {found}"
        raise WeightsError(
            f"--merge needs the weights that the adapters of {source} belong to, and {where}: give their Hugging Face "
            "folder with --like"
        )
    return Path(found)


def _require_mergeable(source: Path, options: LoraOptions) -> None:
    """Raises an error for adapters of quantized weights."""
    if options.base != "plain":
        raise WeightsError(
            f"{source} holds adapters of weights quantized to {options.base.upper()} (lora.base). Merging them is not "
            "supported: added to the weights in full precision, they make another model than the one trained. Leave "
            "out --merge, and load the adapter with PEFT on the base quantized in the same way (docs/lora.md)"
        )


def _base_of(source: Path) -> str | None:
    model = read_run(source)["config"]["model"]
    weights = model.get("weights") or model.get("hf")
    return None if weights in (None, "none") else str(weights)


def _read(source: Path, options: LoraOptions) -> tuple[Plan, dict[str, Factors]]:
    """Reads all adapters of a checkpoint by name of the site."""
    plan, model, load = _opened(source, options)
    factors: dict[str, Factors] = {}
    for name, adapter in adapters_of(model):
        if isinstance(adapter, LinearAdapter):
            factors |= adapter.split(load(f"{name}.a"), load(f"{name}.b"))
        else:
            factors |= {
                site.name: (load(f"{name}.{layer}_a"), load(f"{name}.{layer}_b"))
                for layer, site in adapter.sites.items()
            }
    return plan, {name: factors[name] for name in plan.sites}


def _changes(
    source: Path, options: LoraOptions
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Callable[[], Tensor]], Plan]:
    """Returns what adapters add to weights, and weights that were trained, by canonical name; and the plan."""
    plan, model, load = _opened(source, options)
    added: dict[str, Callable[[], Tensor]] = {}
    for name, adapter in adapters_of(model):
        place = name.removesuffix(".wrapper")
        if isinstance(adapter, LinearAdapter):
            added[f"{place}.weight"] = functools.partial(_linear, adapter, load, name)
            continue
        for layer in adapter.sites:
            read = functools.cache(functools.partial(_experts, load, f"{name}.{layer}"))
            for number in range(*adapter.experts):
                added[f"{place}.local_experts.{number}.{layer}.weight"] = functools.partial(
                    _expert, read, number, adapter.form.scale
                )
    trained: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(load, name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name in plan.maps
    }
    return added, trained, plan


def _require_same_base(
    source: Path, base: Path, files: HfTensors, maps: Mapping[str, ParameterMap], trained: set[str]
) -> None:
    """Raises an error if the adapters were trained on other weights than those of a folder."""
    run = read_run(source)
    dtype = torch.bfloat16 if run["optimizer"]["weights"] == "bf16" else torch.float32
    total = 0
    for name, entry in maps.items():
        if counts(name) and name not in trained:
            value = entry.to_mcore([files.read(each.name, each.index) for each in entry.sources])
            total += share(name, value.to(dtype))
    if formatted(total) != run["base"]:
        raise WeightsError(
            f"{base} holds other weights ({formatted(total)}) than those that the adapters of {source} belong to "
            f"({run['base']}): give the folder that the run began with, {_base_of(source) or 'if any'}, with --like"
        )


def _linear(adapter: LinearAdapter, load: Callable[[str], Tensor], name: str) -> Tensor:
    return adapter.added(load(f"{name}.a"), load(f"{name}.b"))


def _experts(load: Callable[[str], Tensor], name: str) -> Factors:
    return load(f"{name}_a").float(), load(f"{name}_b").float()


def _expert(read: Callable[[], Factors], number: int, scale: float) -> Tensor:
    a, b = read()
    return scale * (b[number] @ a[number])


def _opened(source: Path, options: LoraOptions) -> tuple[Plan, Any, Callable[[str], Tensor]]:
    """Opens a checkpoint. Returns its plan, the model without memory, and what reads a parameter by name."""
    architecture, config = read_architecture(source), read_run(source)["config"]
    mtp = config["model"].get("mtp") is not False and architecture.mtp_layers > 0
    alone = bool(config["model"].get("language_only"))
    plan = plan_of(architecture, options, mtp=mtp, language_only=alone)
    model: Any = meta_model(architecture, mtp, language_only=alone)
    attach(model, plan)
    reader, stored = opened_checkpoint(source)
    state: Mapping[str, Any] = model.sharded_state_dict()

    def load(name: str) -> Tensor:
        entry = state[name]
        if entry.key not in stored:
            raise WeightsError(f"{source} lacks {entry.key}, which its run.json promises; use another checkpoint")
        with reading_from(source):
            return read_piece(entry, reader, stored[entry.key])

    return plan, model, load
