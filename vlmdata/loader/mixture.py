"""A mixture of datasets in a TOML file: weights by name, nested groups, limits, and a schedule.

by = "tokens"                      # what weights share: tokens, samples, targets; or epochs: passes over each

[datasets.receipts]
path = "cord"                      # relative to this file; or a URL
weight = 3

[datasets.text]                    # a group: its weight is shared by its members
weight = 7
temperature = 2                    # weights of its members to the power of 1/2

[datasets.text.chat]
path = "chat"                      # without weights: by size

[datasets.text.books]
path = "s3://bucket/books"
max_samples = 10_000

[[schedule]]                       # this mixture with other values, from an optimizer step of the run on
step = 2000
weights = {receipts = 1, "text.books" = 0}
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from vlmdata.errors import UsageError
from vlmdata.loader.config import LoaderConfig
from vlmdata.locations import is_url, place_of
from vlmdata.packing.config import Blend, BlendUnit, Change
from vlmdata.packing.plan.blend import blend_mass
from vlmdata.packing.table import SampleTable

_SUFFIX = ".toml"
_OF_FILE = ("by", "temperature", "max_length", "datasets", "schedule")
_OF_DATASET = ("path", "weight", "max_samples")
_OF_CHANGE = ("step", "weights", "max_samples", "max_length", "temperature", "seed")
#: Weights up to this are exact as floats.
_EXACT = 1 << 53


@dataclass(frozen=True)
class MixtureMember:
    """A dataset or a group of a mixture.

    Attributes:
        name: Names of the groups around it and its own, joined by dots; "" for the whole mixture.
        weight: Share within its group, or passes; None means by size, or one pass.
        path: Place of a dataset; None for a group.
        max_samples: Most samples of a dataset that are used; None means all.
        temperature: Of a group: its members' weights are taken to the power of 1 / temperature.
        members: Of a group.
    """

    name: str
    weight: float | None = None
    path: str | None = None
    max_samples: int | None = None
    temperature: float = 1.0
    members: tuple[MixtureMember, ...] = ()

    def datasets(self) -> Iterator[MixtureMember]:
        """Yields the datasets, in the order of the file."""
        if self.path is not None:
            yield self
        for each in self.members:
            yield from each.datasets()

    def with_values(self, name: str, values: Mapping[str, Any]) -> MixtureMember:
        """Returns a copy with other values of an attribute, by the names of members."""
        members = tuple(each.with_values(name, values) for each in self.members)
        mine = {name: values[self.name]} if self.name in values else {}
        return replace(self, members=members, **mine)


@dataclass(frozen=True)
class _Entry:
    """The mixture from a step on."""

    step: int
    root: MixtureMember
    max_length: int | None
    seed: int | None


@dataclass(frozen=True)
class Mixture:
    """What a mixture file says.

    Attributes:
        file: The file.
        by: What weights share.
        entries: The mixture from step 0 on, and changes of it, by their steps.
    """

    file: Path
    by: BlendUnit
    entries: tuple[_Entry, ...]

    @property
    def locations(self) -> list[str]:
        """Places of the datasets, in the order of the file."""
        return [str(each.path) for each in self.entries[0].root.datasets()]

    def packing(self, table: SampleTable) -> dict[str, Any]:
        """Returns the loader's options ``blend`` and ``schedule`` for the samples of the datasets, in their order."""
        first, *later = self.entries
        changes = tuple(Change(each.step, self._blend(each, table), each.seed) for each in later)
        seed = {} if first.seed is None else {"seed": first.seed}
        return {"blend": self._blend(first, table), "schedule": changes, **seed}

    def applied(self, config: LoaderConfig, table: SampleTable) -> LoaderConfig:
        """Returns a loader's options with this mixture.

        Raises:
            UsageError: If they have a mixture already, or a dataset with a weight has nothing to use.
        """
        if config.packing.blend is not None or config.packing.schedule:
            raise UsageError(f"{self.file} and a blend or weights: give one of them")
        return config.with_options(**self.packing(table))

    def _blend(self, entry: _Entry, table: SampleTable) -> Blend:
        datasets = list(entry.root.datasets())
        ones = Blend(self.by, (1.0,) * len(datasets), tuple(each.max_samples for each in datasets), entry.max_length)
        if self.by == "epochs":
            weights = list(_passes(entry.root))
        else:
            sizes = dict(zip((each.name for each in datasets), blend_mass(table, ones), strict=True))
            weights = _whole(_shares(entry.root, sizes, Fraction(1)))
        return replace(ones, weights=tuple(weights))


def is_mixture(location: str | PathLike[str]) -> bool:
    """Returns True for a mixture file, by its name."""
    return place_of(location).endswith(_SUFFIX)


def mixture_in(locations: Sequence[str | PathLike[str]]) -> Mixture | None:
    """Returns the mixture, if the data of a loader is a mixture file.

    Raises:
        UsageError: If it is one of several locations, or says something impossible.
    """
    files = [place_of(each) for each in locations if is_mixture(each)]
    if not files:
        return None
    if len(locations) > 1:
        raise UsageError(f"{files[0]}: a mixture file names all datasets; give it alone, without others")
    return read_mixture(Path(files[0]))


def expanded(locations: Sequence[str | PathLike[str]]) -> list[str | PathLike[str]]:
    """Returns the locations of datasets: those in a mixture file, or the given ones."""
    mixture = mixture_in(locations)
    return list(locations) if mixture is None else list(mixture.locations)


def read_mixture(file: Path) -> Mixture:
    """Reads a mixture file.

    Raises:
        UsageError: Naming file, place and value of what is wrong.
    """
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: is not TOML: {error}") from error
    return _Reader(file).mixture(values)


class _Reader:
    """Checks the values of a file."""

    def __init__(self, file: Path):
        self._file = file

    def mixture(self, values: Mapping[str, Any]) -> Mixture:
        self._require_known(values, _OF_FILE, "")
        by = values.get("by", "tokens")
        if by not in get_args(BlendUnit):
            raise self._wrong("by", by, f"one of {', '.join(get_args(BlendUnit))}")
        members = values.get("datasets")
        if not isinstance(members, dict) or not members:
            raise UsageError(f'{self._file}: names no datasets; add one such as\n\n[datasets.chat]\npath = "data/chat"')
        root = MixtureMember(
            "",
            temperature=self._number(values, "temperature", "", positive=True) or 1.0,
            members=tuple(self._member(name, name, each) for name, each in members.items()),
        )
        base = _Entry(0, root, self._whole_number(values, "max_length", ""), None)
        entries = [self._entry(number, each, base) for number, each in enumerate(self._changes(values))]
        steps = [each.step for each in entries]
        if steps != sorted(set(steps)):
            raise self._wrong("schedule.step", steps, "increasing")
        mixture = Mixture(self._file, by, tuple(entries if 0 in steps else [base, *entries]))
        for entry in mixture.entries:
            self._check_weights(entry.root, by)
        return mixture

    def _changes(self, values: Mapping[str, Any]) -> list[Any]:
        changes = values.get("schedule", [])
        if not isinstance(changes, list) or not all(isinstance(each, dict) for each in changes):
            raise self._wrong("schedule", changes, "a list: [[schedule]] for each step")
        return changes

    def _member(self, key: str, name: str, values: Any) -> MixtureMember:
        if not isinstance(values, dict):
            raise self._wrong(f"datasets.{name}", values, "a table with path, or of members with path each")
        weight = self._number(values, "weight", f"datasets.{name}.")
        if "." in key:
            raise self._wrong("datasets", key, "a name without dots: dots separate groups from their members")
        if "path" not in values:
            inner = {each: value for each, value in values.items() if each not in ("weight", "temperature")}
            if not inner:
                raise UsageError(f"{self._file}: datasets.{name} has neither a path nor members; add one")
            temperature = self._number(values, "temperature", f"datasets.{name}.", positive=True)
            members = tuple(self._member(each, f"{name}.{each}", value) for each, value in inner.items())
            return MixtureMember(name, weight, temperature=temperature or 1.0, members=members)
        self._require_known(values, _OF_DATASET, f"datasets.{name}.")
        path = values["path"]
        if not isinstance(path, str) or not path:
            raise self._wrong(f"datasets.{name}.path", path, "a folder or a URL")
        place = path if is_url(path) else str(self._file.parent / path)
        return MixtureMember(name, weight, place, self._whole_number(values, "max_samples", f"datasets.{name}."))

    def _entry(self, number: int, values: Mapping[str, Any], base: _Entry) -> _Entry:
        """Returns a change: the mixture of the file with other values."""
        where = f"schedule[{number}]."
        self._require_known(values, _OF_CHANGE, where)
        step = values.get("step")
        if type(step) is not int or step < 0:
            raise self._wrong(f"{where}step", step, "an optimizer step of the run, from 0")
        seed = values.get("seed")
        if seed is not None and type(seed) is not int:
            raise self._wrong(f"{where}seed", seed, "an integer")
        root = base.root
        known = {each.name: each for each in _all_members(root)}
        for option, attribute in (("weights", "weight"), ("max_samples", "max_samples")):
            given = values.get(option, {})
            if not isinstance(given, dict):
                raise self._wrong(f"{where}{option}", given, "a table of names and numbers")
            given = _flat(given)
            for name in given:
                if name not in known or (option == "max_samples" and known[name].path is None):
                    raise self._wrong(f"{where}{option}", name, f"one of {', '.join(known)}")
                check = self._number if option == "weights" else self._whole_number
                check(given, name, f"{where}{option}.")
            root = root.with_values(attribute, given)
        temperature = self._number(values, "temperature", where, positive=True)
        root = root if temperature is None else replace(root, temperature=temperature)
        length = self._whole_number(values, "max_length", where)
        return _Entry(step, root, base.max_length if length is None else length, seed)

    def _check_weights(self, group: MixtureMember, by: str) -> None:
        given = [each.weight is not None for each in group.members]
        name = group.name or "the mixture"
        if by != "epochs" and any(given) and not all(given):
            without = next(each.name for each in group.members if each.weight is None)
            raise UsageError(
                f"{self._file}: some members of {name} have a weight, but {without} has none; give one to each, or to "
                "none (then they count by their size)"
            )
        if all(given) and not any(each.weight for each in group.members) and group.members:
            raise UsageError(f"{self._file}: all members of {name} have weight 0; give one of them more")
        if by == "epochs" and group.temperature != 1:
            raise UsageError(f"{self._file}: {name} has a temperature, which weights by 'epochs' do not take")
        for each in group.members:
            self._check_weights(each, by)

    def _number(self, values: Mapping[str, Any], key: str, where: str, positive: bool = False) -> float | None:
        value = values.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (positive and not value):
            raise self._wrong(f"{where}{key}", value, "a number above 0" if positive else "a number of at least 0")
        return float(value)

    def _whole_number(self, values: Mapping[str, Any], key: str, where: str) -> int | None:
        value = values.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self._wrong(f"{where}{key}", value, "a whole number of at least 1")
        return value

    def _require_known(self, values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        for key in values:
            if key not in known:
                raise UsageError(f"{self._file}: unknown key {where}{key}; known are {', '.join(known)}")

    def _wrong(self, key: str, value: Any, wanted: str) -> UsageError:
        return UsageError(f"{self._file}: {key} is {value!r}; it must be {wanted}")


def _all_members(group: MixtureMember) -> Iterator[MixtureMember]:
    for each in group.members:
        yield each
        yield from _all_members(each)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested table with dotted names: TOML reads ``text.books = 0`` as one."""
    found: dict[str, Any] = {}
    for name, each in values.items():
        found |= _flat(each, f"{prefix}{name}.") if isinstance(each, dict) else {f"{prefix}{name}": each}
    return found


def _passes(group: MixtureMember, passes: float = 1.0) -> Iterator[float]:
    """Yields the passes over each dataset: its weight times those of its groups."""
    passes *= 1.0 if group.weight is None else group.weight
    if group.path is not None:
        yield passes
    for each in group.members:
        yield from _passes(each, passes)


def _shares(group: MixtureMember, sizes: Mapping[str, int], share: Fraction) -> Iterator[Fraction]:
    """Yields the exact share of each dataset of a group that has a share itself."""
    if group.path is not None:
        yield share
        return
    weights = [
        Fraction(sum(sizes[dataset.name] for dataset in each.datasets()))
        if each.weight is None
        else Fraction(str(each.weight))
        for each in group.members
    ]
    if group.temperature != 1:
        # Rounded, so that the last digit, in which platforms may differ, has no effect.
        weights = [Fraction(f"{float(each) ** (1 / group.temperature):.12g}") for each in weights]
    total = sum(weights) or Fraction(1)
    for each, weight in zip(group.members, weights, strict=True):
        yield from _shares(each, sizes, share * weight / total)


def _whole(shares: Iterator[Fraction]) -> list[float]:
    """Returns shares in the ratio of whole numbers, which are exact, or of rounded numbers if those are too large."""
    exact = list(shares)
    scale = math.lcm(*(each.denominator for each in exact))
    if all(each * scale < _EXACT for each in exact):
        common = math.gcd(*(int(each * scale) for each in exact)) or 1
        return [float(int(each * scale) // common) for each in exact]
    return [float(f"{float(each):.12g}") for each in exact]
