"""Finds recipes and engines by registered name, as ``module:attribute`` or as ``file.py:attribute``."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmdata.errors import SourceError


def find(option: str, name: str, registry: Mapping[str, str]) -> Any:
    """Returns the object for a name.

    Args:
        option: The option that gives the name, for messages: ``--recipe``.
        name: A name in the registry, ``module:attribute`` or ``file.py:attribute``.
        registry: ``module:attribute`` by name.

    Raises:
        SourceError: If the name is unknown or cannot be loaded.
    """
    target = registry.get(name, name)
    module, separator, attribute = target.partition(":")
    known, kind = ", ".join(registry), option.removeprefix("--")
    if not separator:
        raise SourceError(
            f"{option} {name}: unknown {kind}. Known: {known}; or your own as module:attribute or file.py:attribute."
        )
    try:
        return getattr(module_named(module), attribute)
    except (ImportError, AttributeError, OSError) as error:
        remedy = _remedy(error, module, attribute)
        raise SourceError(f"{option} {name}: cannot load {target}: {error}. {remedy}Built in: {known}.") from error


def _remedy(error: Exception, module: str, attribute: str) -> str:
    """Returns what to do if Python does not find a module itself; empty for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in (module, module.partition(".")[0]):
        return ""
    file = f"{module.replace('.', '/')}.py"
    if Path(file).exists():
        return f"To use {file} of this folder, set PYTHONPATH=. or write {file}:{attribute}. "
    return f"Set PYTHONPATH to the module's folder, or write path/to/{file}:{attribute}. "


def module_named(name: str) -> ModuleType:
    """A module by its dotted name, or by the path of its file, ``path/to/file.py``.

    A file is loaded once per process, as a module that no dotted name finds.

    Raises:
        ImportError: If there is no such module.
        OSError: If the file cannot be read.
    """
    if not is_file(name):
        return import_module(name)
    path = Path(name).resolve()
    own_name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if own_name in sys.modules:
        return sys.modules[own_name]
    spec = spec_from_file_location(own_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own_name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    return module


def is_file(name: str) -> bool:
    """True if a module is named by its file."""
    return name.endswith(".py")
