"""Loader options of a command: given ones, else those of a run, else defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmdata.errors import UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import LoaderConfig, loader_options
from vlmdata.loader.request.index_rows import default_capacity
from vlmdata.loader.run_record import RunRecord


@dataclass(frozen=True)
class LoaderChoice:
    """Given options by name, and the run that supplies the others; without a run, defaults do."""

    given: Mapping[str, Any] = field(default_factory=dict)
    run: RunRecord | None = None

    def data(self, named: Sequence[str]) -> list[str]:
        """Returns the given datasets, or else those of the run; a UsageError if there are none."""
        if named or self.run is not None:
            return list(named) if self.run is None or named else list(self.run.data)
        raise UsageError("DIR: give a dataset, or a training run with --run")

    def config(self, datasets: Sequence[VlmDataset]) -> LoaderConfig:
        """Returns the options for these datasets.

        Without a run, ``capacity`` has room for the longest sample and ``global_batch`` is one pack per rank.

        Raises:
            UsageError: If options are incompatible.
            DatasetFormatError: If there are no samples.
        """
        if self.run is not None:
            return self.run.config.with_options(**self.given)
        given = {"dp_size": 1, **self.given}
        if "capacity" not in given:
            given["capacity"] = default_capacity(datasets)
        return LoaderConfig.of(**{"global_batch": given["dp_size"], **given})

    def __getitem__(self, name: str) -> Any:
        """Returns an option that needs no dataset: given, or the run's, or its default."""
        if name in self.given:
            return self.given[name]
        option = loader_options()[name]
        return option.default if self.run is None else getattr(getattr(self.run.config, option.group), name)
