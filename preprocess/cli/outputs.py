"""The datasets of one command: a single one, one per split, or the two sides of a holdout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from preprocess.engines.local import PRELOADED
from preprocess.sources.holdout import hold_out
from preprocess.sources.rows import Source
from vlmdata.errors import ConfigMismatchError, SourceError
from vlmdata.format.schema import MANIFEST_NAME, PROGRESS_DIR
from vlmdata.storage import Store


@dataclass(frozen=True, eq=False)
class Output:
    """A dataset to make."""

    name: str | None  # of the split or side, and of its folder in --out; None for a single dataset
    source: Source
    store: Store
    split: str | None = None  # if the command names several


def split_names(split: str | None, *, holdout: float | None, trace: int | None) -> list[str | None]:
    """Returns the splits in ``--split``; None means the default. Raises a SourceError for wrong ones."""
    if split is None:
        return [None]
    names = [name.strip() for name in split.split(",")]
    if "" in names or len(set(names)) != len(names):
        raise SourceError(f"--split {split}: give each split once, as in --split train,validation")
    if len(names) > 1 and holdout is not None:
        raise SourceError(f"--split {split}: --holdout divides one split; give one, or omit --holdout")
    if len(names) > 1 and trace is not None:
        raise SourceError(f"--split {split}: --trace shows a row of one split; give one")
    return [*names]


def divide(
    sources: Mapping[str | None, Source],
    store: Store,
    *,
    holdout: float | None,
    workers: int,
    on_rows: Callable[[int], None],
) -> list[Output]:
    """Returns the datasets to make of the opened splits: one if there is a holdout.

    Calls ``on_rows`` with the number of rows read so far for the division.

    Raises:
        ConfigMismatchError: If several datasets would go into a folder that is itself a dataset.
        SourceError: If a side of the holdout would have no rows.
    """
    if len(sources) == 1 and holdout is None:
        (source,) = sources.values()
        return [Output(None, source, store)]
    if {MANIFEST_NAME, PROGRESS_DIR} & store.listing().keys():
        raise ConfigMismatchError(
            f"{store}: is itself a dataset, so it cannot contain one per split; give another --out"
        )
    if holdout is None:
        return [Output(name, source, store.below(str(name)), name) for name, source in sources.items()]
    (source,) = sources.values()
    sides = hold_out(source, holdout, workers=workers, preload=PRELOADED, on_rows=on_rows)
    return [Output(side, rows, store.below(side)) for side, rows in sides.items()]
