"""Finds recipes and engines by registered name, as ``module:attribute`` or as ``file.py:attribute``."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from vlmdata.errors import SourceError
from vlmdata.wording import with_article

#: Names of the files that were loaded as modules, by the name of the module, which depends on the folder.
_STEMS: dict[str, str] = {}


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
        loaded = module_named(module)
    except Exception as error:  # the module is the user's: its top level may raise anything
        problem, remedy = problem_of(error), _remedy(error, module, attribute)
        raise SourceError(f"{option} {name}: cannot load {target}: {problem}. {remedy}Built in: {known}.") from error
    try:
        found = getattr(loaded, attribute)
    except AttributeError as error:
        raise SourceError(
            f"{option} {name}: cannot load {target}: {module} has no attribute {attribute!r}. Built in: {known}."
        ) from error
    if not callable(found):
        raise SourceError(f"{option} {name}: it is {with_article(type(found).__name__)}, not a class.")
    return found


def problem_of(error: Exception) -> str:
    """Describes an error of the user's code, with file and line, in a sentence without its end."""
    if isinstance(error, ImportError | OSError):
        return str(error)
    if isinstance(error, SyntaxError):  # its text has them
        return f"{type(error).__name__}: {error}"
    last = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def shown_name(module: str) -> str:
    """Returns a module's name for messages: of one loaded from a file, the file's, which is equal in any folder."""
    return _STEMS.get(module, module)


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
    _STEMS[own_name] = path.stem
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    return module


def is_file(name: str) -> bool:
    """True if a module is named by its file."""
    return name.endswith(".py")
