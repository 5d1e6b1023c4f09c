"""Hashes the source code of what decides bytes of a dataset: its recipe, family and codec."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from preprocess.recipes.base import REGISTRY as RECIPES
from vlmdata.registry import module_named, shown_name

#: Packages whose modules hold rules that a family's or codec's module takes from elsewhere.
_PACKAGES = ("vlmdata.families", "vlmdata.media.codecs")
#: Folders of installed modules.
_INSTALLED = frozenset(Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib"))


def source_fingerprint(target: str, made: object) -> str:
    """Returns the sha256 of the source code of a family or codec.

    The source code is the module, the modules of the classes that ``made`` is derived from, and what these modules
    import by name from their own package, from :mod:`vlmdata.families` or from :mod:`vlmdata.media.codecs`. A module
    without a package has those in its folder, unless it is installed: that folder has the modules of others.

    Args:
        target: Its ``module:attribute`` or ``file.py:attribute``.
        made: The family or codec in it.
    """
    start = module_named(target.partition(":")[0])
    found: dict[str, ModuleType] = {}
    waiting = [start, *(module for module in _modules_of(type(made).__mro__) if not _is_pythons(module))]
    own = {*_PACKAGES, *(module.__package__ for module in waiting if module.__package__)}
    folders = {_folder(module) for module in waiting if not module.__package__} - {None, *_INSTALLED}
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found:
            found[module.__name__] = module
            waiting += [each for each in _modules_of(vars(module).values()) if _holds_rules(each, own, folders)]
    digest = hashlib.sha256()
    for module in sorted(found.values(), key=lambda each: shown_name(each.__name__)):
        source = _source(module)
        digest.update(f"{shown_name(module.__name__)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def recipe_fingerprint(name: str) -> str:
    """Returns the sha256 of a recipe's source code: of the file that defines it, or of all files of its package."""
    digest = hashlib.sha256(inspect.getsource(inspect.getmodule(RECIPES.find(name)) or object).encode())
    package = module_named(RECIPES.target(name).partition(":")[0])
    for folder in map(Path, getattr(package, "__path__", ())):
        for file in sorted(folder.rglob("*.py")):
            source = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _modules_of(values: Any) -> Iterator[ModuleType]:
    """Yields the modules among some values, and those that define classes and functions among them."""
    for value in tuple(values):
        module = value if isinstance(value, ModuleType) else inspect.getmodule(value) if callable(value) else None
        if module is not None:
            yield module


def _is_pythons(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in sys.stdlib_module_names


def _source(module: ModuleType) -> bytes:
    """Returns the source code of a module; of one that has none, such as a compiled one, its file."""
    try:
        return inspect.getsource(module).encode()
    except (OSError, TypeError):
        return Path(str(module.__file__)).read_bytes()


def _folder(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve().parent if file else None


def _holds_rules(module: ModuleType, packages: set[str], folders: set[Path | None]) -> bool:
    """True for modules of some packages or folders, except packages, whose registries list other modules."""
    beside = not module.__package__ and _folder(module) in folders
    return (beside or module.__package__ in packages) and not hasattr(module, "__path__")
