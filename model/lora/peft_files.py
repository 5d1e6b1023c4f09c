"""PEFT's format of adapters: ``adapter_config.json`` and ``adapter_model.safetensors``.

A matrix has the tensors ``….lora_A.weight`` (r, k) and ``….lora_B.weight`` (n, r) after the name of its module. PEFT
adapts experts as parameters of their module (``target_parameters``) and stores all of a layer in two tensors: (e r, k),
expert by expert, and (n, r e), where neighbouring columns are of different experts. If both matrices of experts have
adapters, PEFT wraps the module twice, so that names of the inner one contain ``base_layer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vlmdata.model.lora.adapters import Factors
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.lora.sites import LoraError, LoraSite

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(
    folder: Path, factors: Mapping[str, Factors], sites: Mapping[str, LoraSite], options: LoraOptions, base: str | None
) -> int:
    """Writes an adapter. Returns the bytes of its tensors.

    Args:
        folder: An existing folder.
        factors: By name of the site. Those of multi-token prediction are left out, as transformers does not have it.
        sites: All sites of the model, from which the names of targets are made.
        options: The run's.
        base: Folder or hub id of the weights that the adapter was trained on, if known.
    """
    own = {name: sites[name] for name in factors if sites[name].group != "mtp"}
    tensors: dict[str, Tensor] = {}
    for name, site in own.items():
        a, b = factors[name]
        if site.experts:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        first, second = _keys(site, own)
        tensors |= {first: a.contiguous(), second: b.contiguous()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_config(own, sites, options, base), indent=2) + "\n")
    return sum(each.nbytes for each in tensors.values())


def read_adapter(folder: Path, wanted: Mapping[str, LoraSite], options: LoraOptions) -> dict[str, Factors]:
    """Reads the factors of an adapter by name of the site.

    Raises:
        LoraError: If the folder holds no adapter, or one with another rank, scale or other matrices than the run's.
    """
    config = _read_config(folder)
    _require_same_form(folder, config, options)
    wanted = {name: site for name, site in wanted.items() if site.group != "mtp"}
    keys = {name: _keys(site, wanted) for name, site in wanted.items()}
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            _require_same_tensors(folder, set(file.keys()), {key for both in keys.values() for key in both})
            return {
                name: _factors(folder, site, options, *(file.get_tensor(key) for key in keys[name]))
                for name, site in wanted.items()
            }
    except (OSError, SafetensorError) as error:
        raise LoraError(f"lora.weights {folder}: {TENSORS} cannot be read: {error}") from error


def _factors(folder: Path, site: LoraSite, options: LoraOptions, a: Tensor, b: Tensor) -> Factors:
    rank, count = options.rank, max(1, site.experts)
    assert rank is not None
    shapes = (count * rank, site.columns), (site.rows, rank * count)
    for found, shape, kind in zip((a, b), shapes, "AB", strict=True):
        if tuple(found.shape) != shape:
            raise LoraError(
                f"lora.weights {folder}: lora_{kind} of {site.name} is {tuple(found.shape)}, but this model needs "
                f"{shape}: the adapter is of another model"
            )
    if not site.experts:
        return a, b
    return a.unflatten(0, (count, rank)), b.unflatten(1, (rank, count)).permute(2, 0, 1)


def _keys(site: LoraSite, adapted: Mapping[str, LoraSite]) -> tuple[str, str]:
    """Returns the names of a site's two tensors."""
    place = site.name
    if site.experts:
        place, _, matrix = site.name.rpartition(".")
        if matrix == "gate_up_proj" and f"{place}.down_proj" in adapted:
            place += ".base_layer"
    return f"{_PREFIX}{place}.lora_A.weight", f"{_PREFIX}{place}.lora_B.weight"


def _config(
    adapted: Mapping[str, LoraSite], sites: Mapping[str, LoraSite], options: LoraOptions, base: str | None
) -> dict[str, Any]:
    single = {name: site for name, site in adapted.items() if not site.experts}
    spread = {name: site for name, site in adapted.items() if site.experts}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.used_alpha,
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": _short(single, {name: site for name, site in sites.items() if not site.experts}),
        "target_parameters": _short(spread, {name: site for name, site in sites.items() if site.experts}, parts=2)
        or None,
    }


def _short(adapted: Mapping[str, LoraSite], sites: Mapping[str, LoraSite], parts: int = 1) -> list[str]:
    """Returns the ends of names that mean exactly these sites, or whole names.

    In the tower, an end has two parts: transformers also has a convolution ``proj`` there.
    """

    def end(site: LoraSite) -> str:
        count = 2 if site.group in ("vision", "merger") else parts
        return ".".join(site.name.split(".")[-count:])

    in_transformers = [site for site in sites.values() if site.group != "mtp"]
    left_out = {end(site) for site in in_transformers if site.name not in adapted}
    names = (site.name if end(site) in left_out else end(site) for site in adapted.values())
    return list(dict.fromkeys(names))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / CONFIG).read_text()))
    except OSError as error:
        raise LoraError(
            f"lora.weights {folder} has no {CONFIG}: give a folder in PEFT's format, such as the output of "
            "`vlmdata convert` for a run with LoRA"
        ) from error
    except (ValueError, TypeError) as error:
        raise LoraError(f"lora.weights {folder}: {CONFIG} is not JSON: {error}") from error


def _require_same_form(folder: Path, config: Mapping[str, Any], options: LoraOptions) -> None:
    unknown = {
        "peft_type": ("LORA", config.get("peft_type", "LORA")),
        "use_dora": (False, bool(config.get("use_dora"))),
        "bias": ("none", config.get("bias", "none")),
        "fan_in_fan_out": (False, bool(config.get("fan_in_fan_out"))),
        "rank_pattern": ({}, config.get("rank_pattern") or {}),
        "alpha_pattern": ({}, config.get("alpha_pattern") or {}),
        "modules_to_save": (None, config.get("modules_to_save") or None),
        "lora_bias": (False, bool(config.get("lora_bias"))),
    }
    for name, (needed, found) in unknown.items():
        if needed != found:
            raise LoraError(
                f"lora.weights {folder}: {name} is {found!r}; this trainer has adapters with {needed!r} only"
            )
    settings = {
        "lora.rank": (options.rank, config.get("r", 8)),
        "lora.alpha": (options.used_alpha, config.get("lora_alpha", 8)),
        "lora.rslora": (options.rslora, bool(config.get("use_rslora"))),
    }
    changes = [f"--set {name}={str(found).lower()}" for name, (own, found) in settings.items() if own != found]
    if changes:
        raise LoraError(f"lora.weights {folder} was trained with other settings: give {' '.join(changes)}")


def _require_same_tensors(folder: Path, found: set[str], wanted: set[str]) -> None:
    lacking, further = sorted(wanted - found), sorted(found - wanted)
    if lacking or further:
        parts = [
            f"{len(names)} {what}, such as {names[0]}"
            for what, names in (("are missing", lacking), ("have no place in this run", further))
            if names
        ]
        raise LoraError(
            f"lora.weights {folder} adapts other matrices than this run: of its tensors {'; '.join(parts)}. Set "
            "lora.targets, lora.vision and lora.merger as the adapter was trained, and select its model"
        )
