"""Finds recipes, engines, codecs and families: built in, installed, or in the user's own modules and files."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from vlmdata.errors import UsageError, VlmdataError
from vlmdata.wording import with_article

#: Names of the files that were loaded as modules, by the name of the module, which depends on the folder.
_STEMS: dict[str, str] = {}


class Registry[T](dict[str, str]):
    """The extensions of one kind. As a mapping: ``module:attribute`` of the built-in ones, by name.

    Others are found as entry points, as ``module:attribute`` or as ``file.py:attribute``. Datasets name their codec and
    family. Such names only find what is built in, what is installed as an entry point, and what the user gave in this
    process or in the environment, so a dataset cannot make its reader run a module or file of the dataset's choice.

    Args:
        kind: ``codec``.
        group: The group of its entry points, ``vlmdata.codecs``. In capitals, ``VLMDATA_CODECS``, it names the
            environment variable with the user's own, as ``file.py:attribute``, separated by commas.
        option: The option that gives a name, for messages.
        fault: Says why an object is none of this kind: ``it is an int, not a class``; empty if it is one.
        built_in: ``module:attribute`` by name.
        error: Raised if an extension is unknown or cannot be loaded.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        option: str,
        fault: Callable[[object], str],
        built_in: Mapping[str, str],
        error: type[VlmdataError] = UsageError,
    ):
        super().__init__(built_in)
        self.kind, self.group, self.option, self.error = kind, group, option, error
        self.variable = group.upper().replace(".", "_")
        self._fault = fault
        self._given: dict[str, str] = {}
        #: What the user gave as ``module:attribute`` or ``file.py:attribute``.
        self._own_code: set[str] = set()

    def find(self, given: str, option: str | None = None) -> T:
        """Returns what the user names: by name, as ``module:attribute`` or as ``file.py:attribute``.

        An extension with a ``name`` of its own, such as a codec, is then known by it in this process.

        Args:
            given: The name.
            option: The option that gave it, for messages; None is that of the registry.
        """
        where = f"{option or self.option} {given}"
        return self._own(given, where) if ":" in given else self._named(given, where)

    def _own(self, given: str, where: str) -> T:
        self._own_code.add(_place_of(given))
        found = self._load(given, given, where)
        if isinstance(name := getattr(found, "name", None), str):
            if ":" in name or name in self or name in _installed(self.group):
                taken = "names have no colon" if ":" in name else f"another {self.kind} has this name"
                raise self.error(f"{where}: its name is {name!r}, but {taken}. Choose another name.")
            self._given[name] = given
        return found

    def named(self, name: str) -> T:
        """Returns the extension that a dataset or the user names; runs no code that only the name tells."""
        where = f"{self.option} {name}"
        if ":" not in name:
            return self._named(name, where)
        self._target("")  # loads what the environment names
        if _place_of(name) in self._own_code:
            return self._own(name, where)
        raise self.error(
            f"{where}: a dataset names this code, and what a dataset names is not run. If you trust the code, name it "
            f"yourself: {self.variable}={name} (docs/extend/{self.kind}.md)."
        )

    def _named(self, name: str, where: str) -> T:
        target = self._target(name)
        if target is None:
            raise self.error(
                f"{where}: unknown {self.kind}. Known: {', '.join(self.names())}; or your own as "
                "module:attribute or file.py:attribute."
            )
        found = self._load(name, target, where)
        if (own := getattr(found, "name", name)) != name:
            raise self.error(f"{where}: {target} has the name {own!r}. Give both the same name.")
        return found

    def knows(self, name: str) -> bool:
        """True if :meth:`named` finds this name."""
        return self._target(name) is not None

    def names(self) -> list[str]:
        """Returns all known names: of the built-in, the installed, and the user's own extensions."""
        self._target("")
        return list(dict.fromkeys([*self, *_installed(self.group), *self._given]))

    def trusted(self) -> list[str]:
        """Returns the names of the built-in extensions and of those that the user gave, without the installed ones."""
        self._target("")
        return list(dict.fromkeys([*self, *self._given]))

    def missing(self, name: str) -> str:
        """Says how to give an extension that a dataset names and that is not known here."""
        return (
            f"{self.kind.capitalize()} {name} is neither built in nor installed here. Install the package that has it "
            f"as an entry point of {self.group}, or name its file, if you trust it: "
            f"{self.variable}=path/to/file.py:attribute (docs/extend/{self.kind}.md)."
        )

    def target(self, given: str) -> str:
        """Returns the ``module:attribute`` or ``file.py:attribute`` that the user names."""
        return given if ":" in given else self._target(given) or given

    def _target(self, name: str) -> str | None:
        if name in self:
            return self[name]
        if found := _installed(self.group).get(name):
            return found
        if name not in self._given:
            for given in filter(None, map(str.strip, os.environ.get(self.variable, "").split(","))):
                self._own(given, f"{self.variable}={given}")
        return self._given.get(name)

    def _load(self, name: str, target: str, where: str) -> T:
        module, _, attribute = target.partition(":")
        built_in = ", ".join(self)
        if not attribute:
            raise self.error(f"{where}: it names no attribute. Write {target.rstrip(':')}:NAME.")
        try:
            loaded = module_named(module)
        except Exception as error:  # the module is the user's: its top level may raise anything
            problem, remedy = problem_of(error, _name_of(module)), _remedy(error, module, attribute)
            raise self.error(f"{where}: cannot load {target}: {problem}. {remedy}Built in: {built_in}.") from error
        try:
            found = getattr(loaded, attribute)
        except AttributeError as error:
            raise self.error(
                f"{where}: cannot load {target}: {module} has no attribute {attribute!r}. Built in: {built_in}."
            ) from error
        if name not in self and (fault := self._fault(found)):
            raise self.error(f"{where}: {fault}.")
        return found  # type: ignore[no-any-return]


def not_callable(found: object) -> str:
    """The fault of an object that is neither a class nor a function."""
    return "" if callable(found) else f"it is {with_article(type(found).__name__)}, not a class"


@cache
def _installed(group: str) -> Mapping[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}


def problem_of(error: Exception, home: str) -> str:
    """Describes an error of the user's code, with file and line, in a sentence without its end.

    Args:
        error: The error.
        home: Name of the user's module. The line is the innermost one in it, not that of a library that it calls;
            without any, the innermost line.
    """
    if isinstance(error, ImportError | OSError):
        return str(error)
    if isinstance(error, SyntaxError):  # its text has them
        return f"{type(error).__name__}: {error}"
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__)]
    own = [each for each in frames if each[0].f_globals.get("__name__") == home]
    frame, line = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.f_code.co_filename).name}, line {line})"


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
    """Imports a module by its dotted name, or by the path of its file, which is loaded once per process.

    Raises:
        ImportError: If there is no such module.
        OSError: If the file cannot be read.
    """
    if not is_file(name):
        return import_module(name)
    path, own_name = Path(name).resolve(), _name_of(name)
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


def code_digest(found: object, module: str = "") -> str:
    """Returns the sha256 of an extension's source code: of the file that defines it, or of all files of its package.

    Args:
        found: The extension: a class or function.
        module: Name of the module, package or file that the user named; empty for that of the extension.
    """
    digest = hashlib.sha256(inspect.getsource(inspect.getmodule(found) or object).encode())
    package = module_named(module) if module else inspect.getmodule(found)
    for folder in map(Path, getattr(package, "__path__", ())):
        for file in sorted(folder.rglob("*.py")):
            source = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def files_of(kinds: Iterable[type]) -> tuple[str, ...]:
    """Returns the files of the modules of some classes that :func:`module_named` has loaded from files.

    Another process that unpickles objects of these classes must load them first: no import finds them.
    """
    names = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__ in _STEMS)
    return tuple(str(sys.modules[name].__file__) for name in names)


def _name_of(module: str) -> str:
    """Returns the name under which Python has a module that is given by its name or by its file."""
    if not is_file(module):
        return module
    path = Path(module).resolve()
    return f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"


def _place_of(given: str) -> str:
    """Returns ``module:attribute``, or the absolute path of a file and its attribute."""
    module, colon, attribute = given.partition(":")
    return f"{Path(module).resolve() if is_file(module) else module}{colon}{attribute}"


def is_file(name: str) -> bool:
    """True if a module is named by its file."""
    return name.endswith(".py")
