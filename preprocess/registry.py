"""Finding a recipe or an engine by its registered name or as ``module:attribute``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from vlmdata.errors import SourceError


def find(option: str, name: str, registry: Mapping[str, str]) -> Any:
    """What a name stands for.

    Args:
        option: The option that gives the name, for messages: ``--recipe``.
        name: A name in the registry, or ``module:attribute``.
        registry: ``module:attribute`` by name.

    Raises:
        SourceError: If there is none.
    """
    target = registry.get(name, name)
    module, separator, attribute = target.partition(":")
    known, kind = ", ".join(registry), option.removeprefix("--")
    if not separator:
        raise SourceError(f"{option} {name}: no such {kind}. Known: {known}; or module:attribute of your own.")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"{option} {name}: cannot load {target}: {error}. Built in: {known}.") from error
