"""Loads a run's settings from defaults, a TOML file and overrides, in that order. Errors name the setting."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from vlmdata.model.training.settings.config import (
    NO_WEIGHTS,
    ConfigError,
    DataConfig,
    RunConfig,
    TrainConfig,
    flattened,
)
from vlmdata.model.training.settings.name_hints import meant
from vlmdata.options import declared_fields
from vlmdata.wording import counted


def load_config(file: Path | None = None, overrides: Sequence[str | tuple[str, Any]] = ()) -> TrainConfig:
    """Loads the configuration: defaults, then a TOML file, then overrides.

    Args:
        file: TOML file with the groups as tables.
        overrides: Strings ``"group.name=value"`` with a TOML value or a bare word, or pairs ``("group.name", value)``.

    Raises:
        ConfigError: Naming the setting, or the nearest one for an unknown name.
    """
    config = TrainConfig()
    if file is not None:
        config = _merge(config, dict(_settings_of(file)), where=str(file))
    overridden = set()
    for override in overrides:
        name, value = _parse_override(override) if isinstance(override, str) else override
        config = _merge(config, {name: value}, where="--set" if isinstance(override, str) else "the command line")
        overridden.add(name)
    _check(config)
    if "model.preset" in overridden and config.model.hf is not None:
        source = "" if "model.hf" in overridden else f", from {file}: --set model.hf=none removes it"
        raise ConfigError(
            f"both model.preset ({config.model.preset}) and model.hf ({config.model.hf}{source}) select the model to "
            "build; give only one of --preset and --hf"
        )
    return config


def _settings_of(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        groups = tomllib.loads(file.read_text())
    except OSError as error:
        others = sorted(file.parent.parent.glob(f"step-*/{file.name}")) if file.parent.name.startswith("step-") else []
        newest = f". The newest checkpoint there has {others[-1]}" if others else ""
        raise ConfigError(f"{file}: cannot be read: {error.strerror}{newest}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    for group, settings in groups.items():
        if not isinstance(settings, dict):
            names = ", ".join(f"[{name}]" for name in _group_names())
            raise ConfigError(f"{file}: {group!r} is outside a table; settings belong in one of {names}")
        yield from ((f"{group}.{name}", value) for name, value in settings.items())


def _parse_override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: write it as group.name=value, such as optimizer.lr=1e-4")
    if value.strip().lower() == NO_WEIGHTS and name.strip() == "model.weights":
        return "model.weights", NO_WEIGHTS  # "none" is a value here; an empty string unsets it
    if value.strip().lower() in ("none", ""):
        return name.strip(), None
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value  # a bare word is a string


def _group_names() -> list[str]:
    return [each.name for each in dataclasses.fields(TrainConfig)]


def _merge(config: TrainConfig, settings: Mapping[str, Any], where: str) -> TrainConfig:
    for name, value in settings.items():
        group_name, _, key = name.partition(".")
        known = {f"{g}.{each.name}" for g in _group_names() for each in dataclasses.fields(getattr(config, g))}
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}; {meant(name, known)}")
        group = getattr(config, group_name)
        kind = typing.get_type_hints(type(group))[key]
        changed = dataclasses.replace(group, **{key: _as_type(kind, value, f"{where}: {name}")})
        config = dataclasses.replace(config, **{group_name: changed})
    return config


def _as_type(kind: Any, value: Any, what: str) -> Any:
    """Converts a value to the field's type. Only whole floats become ints, and ints become floats."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _as_type(arguments[0], value, what)  # the others are None, or what no file can hold
    if origin is Literal:
        if value is None and "none" in arguments:  # "--set model.recompute=none" is a choice, not an unset setting
            return "none"
        if value not in arguments:
            raise ConfigError(f"{what} is {value!r}; it must be one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        items = [value] if isinstance(value, str | int) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{what} is {value!r}; it must be a list")
        return tuple(_as_type(arguments[0], item, what) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{what} is {value!r} ({type(value).__name__}); it must be {kind.__name__}")
    return value


def _check(config: TrainConfig) -> None:
    _check_numbers(config)
    _check_blend(config.data)
    _check_profile(config.run)
    _check_evaluation(config)
    _check_lora(config)
    if config.warmup_steps >= config.decay_steps:
        raise ConfigError(
            f"optimizer.warmup_steps {config.warmup_steps} leaves none of the {config.decay_steps} steps for decay; "
            f"set it below {config.decay_steps}"
        )
    if config.optimizer.last_lr > config.optimizer.lr:
        raise ConfigError(f"optimizer.min_lr {config.optimizer.min_lr} is above optimizer.lr {config.optimizer.lr}")
    unknown = set(config.model.freeze) - {"vision", "merger", "language"}
    if unknown:
        raise ConfigError(
            f"model.freeze names {sorted(unknown)}; choose from vision, merger, language: --freeze vision,merger, or "
            """--set 'model.freeze=["vision", "merger"]'"""
        )


def _check_numbers(config: TrainConfig) -> None:
    values = dict(flattened({name: vars(getattr(config, name)) for name in _group_names()}))
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} is {value}; it must be a finite number")
    for group in _group_names():
        for declared in declared_fields(type(getattr(config, group))):
            name = f"{group}.{declared.name}"
            if values[name] is not None and (wanted := declared.option.outside(values[name])):
                raise ConfigError(f"{name} is {values[name]}; it must be {wanted}")


def _check_blend(data: DataConfig) -> None:
    weights, paths = data.blend, data.paths
    if weights and len(weights) != len(paths):
        given, named = counted(len(paths), "dataset"), f": {', '.join(paths)}" if paths else ""
        raise ConfigError(
            f"data.blend has {counted(len(weights), 'weight')} for {given}{named}; give one for each --data, in their "
            "order"
        )
    if weights and (not min(weights) >= 0 or not 0 < sum(weights) < float("inf")):
        raise ConfigError(f"data.blend is {list(weights)}; weights must be finite, at least 0, and not all 0")


def _check_profile(run: RunConfig) -> None:
    profile = run.profile
    if profile and (len(profile) != 2 or not 1 <= profile[0] <= profile[1]):
        raise ConfigError(f"run.profile is {list(profile)}; give the first and last step, counted from 1")
    if profile and profile[0] > run.steps:
        raise ConfigError(
            f"run.profile {list(profile)} starts after the last step, run.steps {run.steps}; profile earlier"
        )


def _check_lora(config: TrainConfig) -> None:
    lora = config.lora
    if lora.rank is None:
        given = [each.name for each in dataclasses.fields(lora) if getattr(lora, each.name) != each.default]
        if given:
            raise ConfigError(f"lora.{given[0]} has no effect without adapters: give --lora-rank, such as 16")
        return
    if config.model.freeze:
        raise ConfigError(
            f"model.freeze {list(config.model.freeze)} does not go together with lora.rank {lora.rank}, which freezes "
            "all weights but those of lora.vision=full and lora.merger=full; leave it out"
        )
    if lora.alpha is not None and lora.alpha <= 0:
        raise ConfigError(f"lora.alpha is {lora.alpha:g}; it must be above 0. Unset, it is {2 * lora.rank}")
    if lora.dropout >= 1:
        raise ConfigError(f"lora.dropout is {lora.dropout:g}; it must be below 1")
    tower = [f"lora.{part}={getattr(lora, part)}" for part in ("vision", "merger") if getattr(lora, part) != "frozen"]
    if config.model.language_only and tower:
        raise ConfigError(
            f"{tower[0]} needs the vision tower, but model.language_only trains without it; leave out one"
        )


def _check_evaluation(config: TrainConfig) -> None:
    settings = {"run.eval_every": config.run.eval_every, "run.keep_best": config.run.keep_best}
    idle = [name for name, value in settings.items() if value]
    paths = [path.rstrip("/") for path in config.data.eval_paths]
    if idle and not paths:
        raise ConfigError(f"{' and '.join(idle)} without evaluation data: give a dataset directory with --eval-data")
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ConfigError(f"data.eval_paths lists {', '.join(twice)} twice; list each evaluation set once")
