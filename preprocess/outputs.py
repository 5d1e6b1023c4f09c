"""Which datasets one command makes: one, one per split, or the two sides of a held-out share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from preprocess.engines.local import PRELOADED
from preprocess.shard_job import PROGRESS_DIR
from preprocess.sources.holdout import hold_out
from preprocess.sources.rows import Source
from vlmdata.errors import ConfigMismatchError, SourceError
from vlmdata.format.schema import MANIFEST_NAME


@dataclass(frozen=True, eq=False)
class Output:
    """A dataset that the command makes.

    Attributes:
        name: Of the split or side, and of its folder below ``--out``; None if it is the only one.
        source: Its rows.
        directory: Where it goes.
    """

    name: str | None
    source: Source
    directory: Path


def split_names(split: str | None, *, holdout: float | None, trace: int | None) -> list[str | None]:
    """The splits that ``--split`` names; None is the default.

    Raises:
        SourceError: If a name is missing or repeated, or several do not go with the other options.
    """
    if split is None:
        return [None]
    names = [name.strip() for name in split.split(",")]
    if "" in names or len(set(names)) != len(names):
        raise SourceError(f"--split {split}: name each split once, as in --split train,validation")
    if len(names) > 1 and holdout is not None:
        raise SourceError(f"--split {split}: --holdout divides one split; name one, or leave --holdout out")
    if len(names) > 1 and trace is not None:
        raise SourceError(f"--split {split}: --trace shows a row of one split; name one")
    return [*names]


def divide(
    sources: Mapping[str | None, Source],
    directory: Path,
    *,
    holdout: float | None,
    workers: int,
    on_rows: Callable[[int], None],
) -> list[Output]:
    """The datasets to make.

    Args:
        sources: The opened splits by name; one if there is a holdout.
        directory: What ``--out`` names.
        holdout: Share of the rows to hold out, if any.
        workers: Processes to use.
        on_rows: Called with the number of rows read so far in order to divide them.

    Raises:
        ConfigMismatchError: If several go below a folder that is a dataset itself.
        SourceError: If the holdout would leave a side without rows.
    """
    if len(sources) == 1 and holdout is None:
        (source,) = sources.values()
        return [Output(None, source, directory)]
    if (directory / MANIFEST_NAME).exists() or (directory / PROGRESS_DIR).exists():
        raise ConfigMismatchError(
            f"{directory}: holds a dataset itself, so there can be none for each split in it; give another --out"
        )
    if holdout is None:
        return [Output(name, source, directory / str(name)) for name, source in sources.items()]
    (source,) = sources.values()
    sides = hold_out(source, holdout, workers=workers, preload=PRELOADED, on_rows=on_rows)
    return [Output(side, rows, directory / side) for side, rows in sides.items()]
