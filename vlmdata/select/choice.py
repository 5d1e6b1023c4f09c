"""Which samples are chosen: by an expression, by keys, without repetitions, as a random share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index import DatasetIndex
from vlmdata.media.codecs import IMAGE
from vlmdata.select.columns import columns_of
from vlmdata.select.content import content, digests
from vlmdata.select.duplicates import Duplicates
from vlmdata.select.marks import near_samples
from vlmdata.select.near import Near
from vlmdata.select.where import Where
from vlmdata.wording import counted

_SHOWN = 5
Mask = npt.NDArray[np.bool_]
"""bool (n,): which samples of an index."""


@dataclass(frozen=True)
class Keys:
    """A list of keys."""

    name: str  # the file, for messages
    keys: tuple[str, ...]  # without repetitions, in the order of the file

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Reads a text file with a key per line; empty lines are ignored.

        Raises:
            UsageError: If it cannot be read, or has no key.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read as text with a key per line: {error}") from None
        keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
        if not keys:
            raise UsageError(f"{path}: has no key; give a text file with a key per line, such as 000000017")
        return cls(str(path), keys)

    @property
    def recorded(self) -> dict[str, Any]:
        """Its number of keys, and the sha256 of the sorted keys, a line each."""
        text = "".join(f"{key}\n" for key in sorted(self.keys))
        return {"count": len(self.keys), "sha256": hashlib.sha256(text.encode()).hexdigest()}


@dataclass(frozen=True)
class Choice:
    """The criteria, in the order in which they apply. Without any, all samples are chosen."""

    where: str | None = None  # expression that must be true
    keys: Keys | None = None  # samples to choose from
    exclude_keys: Keys | None = None  # samples not to choose
    drop_duplicates: Duplicates | None = None  # of equal samples, all but the first are left out
    share: float | None = None  # share of the samples, by a hash of seed and key
    seed: int = 0  # seed of the share

    @property
    def recorded(self) -> dict[str, Any]:
        """The criteria as JSON, for the manifest."""
        fields: dict[str, Any] = {
            "where": self.where,
            "keys": self.keys and self.keys.recorded,
            "exclude_keys": self.exclude_keys and self.exclude_keys.recorded,
            "drop_duplicates": self.drop_duplicates and self.drop_duplicates.value,
            "share": self.share,
            "seed": None if self.share is None else self.seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class SelectionCounts:
    """Sums over samples."""

    samples: int
    tokens: int
    targets: int
    images: int

    @classmethod
    def of(cls, index: DatasetIndex, chosen: Mask) -> SelectionCounts:
        """Counts the chosen samples."""
        images = np.repeat(chosen, index.item_counts) & (index.item_kinds == IMAGE)
        tokens, targets = (int(each[chosen].sum(dtype=np.int64)) for each in (index.lengths, index.num_targets))
        return cls(int(chosen.sum()), tokens, targets, int(images.sum()))


@dataclass(frozen=True)
class Step:
    """What one criterion left."""

    name: str  # option with its value
    left: int  # samples left by it and those before it


@dataclass(frozen=True, eq=False)
class Chosen:
    """The samples that a choice leaves of a dataset."""

    mask: Mask  # which samples
    steps: tuple[Step, ...]  # what each criterion left
    kept: SelectionCounts  # the chosen samples
    lost: SelectionCounts  # the others
    unknown: int  # keys to exclude that no sample has
    near: tuple[Near, ...] = ()  # near duplicates that were dropped, each with the sample that stays for it


def choose(dataset: VlmDataset, choice: Choice) -> Chosen:
    """Applies a choice to a dataset. Only an expression over columns of the source reads shards.

    Raises:
        UsageError: If the expression or the share is none, a column or a key to choose is unknown, or nothing is left.
    """
    index, steps, near = dataset.index, list[Step](), list[Near]()
    mask = np.ones(len(index), np.bool_)
    for name, narrowed in _criteria(dataset, choice, near):
        mask = narrowed(mask)
        steps.append(Step(name, int(mask.sum())))
    if not mask.any():
        story = ", ".join(f"{step.left:,} after {step.name}" for step in steps)
        raise UsageError(
            f"{dataset.name}: no sample is selected. Of {counted(len(index), 'sample')}, {story or 'none is left'}."
        )
    known = set(index.keys.to_pylist()) if choice.exclude_keys else set()
    unknown = sum(key not in known for key in choice.exclude_keys.keys) if choice.exclude_keys else 0
    return Chosen(
        mask, tuple(steps), SelectionCounts.of(index, mask), SelectionCounts.of(index, ~mask), unknown, tuple(near)
    )


def _criteria(dataset: VlmDataset, choice: Choice, near: list[Near]) -> Iterator[tuple[str, Callable[[Mask], Mask]]]:
    """Yields name and function of each criterion: the samples that it leaves of those that are left.

    Near duplicates are added to ``near``.
    """
    index = dataset.index
    if choice.share is not None and not 0 < choice.share < 1:
        raise UsageError(f"--share {choice.share}: must be between 0 and 1")
    if choice.where is not None:
        where = Where.parse(choice.where)
        true = where.evaluate(columns_of(dataset, where.columns), len(index))
        yield f"--where {choice.where!r}", lambda mask: mask & true
    for option, listed in (("--keys", choice.keys), ("--exclude-keys", choice.exclude_keys)):
        if listed is not None:
            found = _among(dataset, listed, option)
            wanted = found if option == "--keys" else ~found
            yield f"{option} {listed.name}", lambda mask, wanted=wanted: mask & wanted  # type: ignore[misc]
    if choice.drop_duplicates is not None:
        kind = choice.drop_duplicates
        yield f"--drop-duplicates {kind}", lambda mask: mask & ~_repeated(dataset, kind, mask, near)
    if choice.share is not None:
        yield (
            f"--share {choice.share} --seed {choice.seed}",
            lambda mask: mask & in_share(index.keys.to_pylist(), float(choice.share or 0), choice.seed),
        )


def _among(dataset: VlmDataset, listed: Keys, option: str) -> Mask:
    index = dataset.index
    found = np.asarray(pa.compute.is_in(index.keys, value_set=pa.array(listed.keys)).to_numpy(zero_copy_only=False))
    missing = len(listed.keys) - int(found.sum())
    if missing and (option == "--keys" or not found.any()):
        known = set(index.keys.to_pylist())
        names = [key for key in listed.keys if key not in known][:_SHOWN]
        raise UsageError(
            f"{listed.name}: {counted(missing, 'key')} of {len(listed.keys):,} of {option} "
            f"{'is' if missing == 1 else 'are'} not in {dataset.name}: {', '.join(names)}"
            f"{', …' if missing > len(names) else ''}. Its keys run from {index.key(0)} to {index.key(len(index) - 1)}."
            if len(index)
            else f"{dataset.name}: has no samples"
        )
    return found.astype(np.bool_)


def in_share(keys: list[str], share: float, seed: int) -> Mask:
    """Returns which keys are in a random share. It depends on seed, share and the key alone, and grows with the share.

    Args:
        keys: The keys.
        share: Expected share of them, from 0 to 1.
        seed: Another seed gives another, independent share.
    """
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(f"{seed}:{key}".encode()) for key in keys), np.uint64, len(keys))
    return np.asarray((hashes >> np.uint64(11)) < np.uint64(int(share * 2**53)))


def _repeated(dataset: VlmDataset, kind: Duplicates, among: Mask, near: list[Near]) -> Mask:
    if not kind.is_near:
        return repetitions(dataset.index, kind, among)
    near += near_samples(dataset, kind, np.flatnonzero(among).tolist())
    repeated = np.zeros(len(among), np.bool_)
    repeated[[each.sample for each in near]] = True
    return repeated


def repetitions(index: DatasetIndex, kind: Duplicates, among: Mask) -> Mask:
    """Returns which samples repeat an earlier one, of those in ``among``.

    Two samples are equal if all that is trained on is (``samples``), their tokens (``texts``), or their images in this
    order (``images``; samples without images repeat none).
    """
    parts = {Duplicates.TEXTS: "tokens", Duplicates.IMAGES: "images"}
    hashes = digests(index, parts[kind]) if kind in parts else content(index)
    candidates = np.flatnonzero(among & (index.item_counts > 0) if kind is Duplicates.IMAGES else among)
    _, first = np.unique(hashes[candidates], return_index=True)
    repeated = np.zeros(len(index), np.bool_)
    repeated[np.delete(candidates, first)] = True
    return repeated
