"""The record of a run's data, in the run's folder, from which commands take the options that they are not given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmdata.errors import ConfigMismatchError, ResourceError, UsageError
from vlmdata.format.atomic import write_atomically
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import LoaderConfig, Packing, Parallelism, loader_options
from vlmdata.loader.data import is_served
from vlmdata.loader.mixture import mixture_in
from vlmdata.loader.request.index_rows import default_capacity
from vlmdata.loader.saved_versions import pinned
from vlmdata.locations import is_url, place_of
from vlmdata.packing.config import Blend, Change, Stage, config_differences
from vlmdata.packing.cost import CostModel

if TYPE_CHECKING:
    from vlmdata.loader.loader import StreamingLoader

RECORD_NAME = "loader.json"
RECORD_VERSION = 1


@dataclass(frozen=True)
class RunRecord:
    """The datasets and options of a run.

    Attributes:
        path: File of the record.
        data: Datasets: absolute paths or URLs.
        fingerprints: Fingerprint of each dataset's manifest.
        config: The options, with ``dp_size`` but without per-rank values. ``reading`` is not recorded.
        plan: ``config.plan_config()`` as a dictionary, with the version of the algorithm.
    """

    path: Path
    data: tuple[str, ...]
    fingerprints: tuple[str, ...]
    config: LoaderConfig
    plan: Mapping[str, Any]

    @classmethod
    def of(cls, loader: StreamingLoader, folder: Path) -> RunRecord:
        """Creates the record of a loader for a run's folder. It is the same on all ranks."""
        places = [name if is_url(name) else str(Path(name).resolve()) for name, _ in loader.fingerprints]
        layout = dataclasses.replace(
            loader.config.parallelism,
            dp_rank=None,
            dp_size=loader.dp_size,
            context_parallel_rank=None,
            vision_ranks=0,
            vision_rank=None,
        )
        return cls(
            path=folder / RECORD_NAME,
            data=tuple(places),
            fingerprints=tuple(fingerprint for _, fingerprint in loader.fingerprints),
            config=LoaderConfig(dataclasses.replace(loader.config.packing, cost=loader.plan_config.cost), layout),
            plan=loader.plan_config.to_dict(),
        )

    @classmethod
    def read(cls, run: str) -> RunRecord:
        """Reads the record of a run.

        Args:
            run: The run's folder, a checkpoint folder in it, or the file itself.

        Raises:
            UsageError: If there is no record, or it cannot be read.
            ConfigMismatchError: If this version of vlmdata plans differently from the one used for training.
        """
        path = _find(Path(run))
        try:
            values = json.loads(path.read_text())
            if values["version"] != RECORD_VERSION:
                raise UsageError(f"{path}: has version {values['version']}, but this vlmdata reads {RECORD_VERSION}")
            record = cls(
                path=path,
                data=tuple(str(each["place"]) for each in values["datasets"]),
                fingerprints=tuple(str(each["fingerprint"]) for each in values["datasets"]),
                config=_config_of(values),
                plan=values["plan"],
            )
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: is not a record of a run ({error!r}). Resume the run to rewrite it") from error
        changed = config_differences(dict(record.plan), record.config.plan_config())
        if changed:
            listed = "\n".join(f"  {line}" for line in changed)
            raise ConfigMismatchError(
                f"{path}: this vlmdata makes different packs than the run had:\n{listed}\n"
                "Install the version that began the run, or pass the data and options themselves instead of the run."
            )
        return record

    def write(self) -> None:
        """Writes the record.

        Raises:
            ResourceError: If the record cannot be written.
        """
        packing = dataclasses.asdict(self.config.packing)
        values = {
            "version": RECORD_VERSION,
            "datasets": [
                {"place": place, "fingerprint": fingerprint}
                for place, fingerprint in zip(self.data, self.fingerprints, strict=True)
            ],
            "packing": packing,
            "parallelism": dataclasses.asdict(self.config.parallelism),
            "plan": dict(self.plan),
        }
        try:
            write_atomically(self.path, (json.dumps(values, indent=2) + "\n").encode())
        except OSError as error:
            raise ResourceError(
                f"{self.path}: cannot be written: {error.strerror or error}. Free space or fix permissions"
            ) from error

    def places(self) -> list[str]:
        """Returns the datasets, each by the version that the run read, also if there are newer ones."""
        recorded = zip(self.data, self.fingerprints, strict=True)
        return [place if is_served(place) else pinned(place, fingerprint) or place for place, fingerprint in recorded]

    def require_same_data(self, datasets: Sequence[VlmDataset]) -> None:
        """Raises an error for datasets that the run was not trained on.

        Raises:
            ConfigMismatchError: Naming the first difference.
        """
        if len(datasets) != len(self.data):
            raise ConfigMismatchError(
                f"{self.path}: the run read {', '.join(self.data)}; give all of them, not {len(datasets)}"
            )
        for place, fingerprint, dataset in zip(self.data, self.fingerprints, datasets, strict=True):
            found = dataset.manifest.fingerprint
            if found != fingerprint:
                raise ConfigMismatchError(
                    f"{place_of(dataset.name)}: has fingerprint {found[:16]}, but the run read {place} with "
                    f"{fingerprint[:16]} ({self.path}). Its steps had other samples; give the dataset that it read"
                )


def _find(run: Path) -> Path:
    # A checkpoint is in RUN/checkpoints/step-….
    places = [run, *run.absolute().parents[:2]]
    found = [place / RECORD_NAME for place in places if (place / RECORD_NAME).is_file()]
    if run.is_file() or found:
        return run if run.is_file() else found[0]
    if not run.exists():
        raise UsageError(f"--run {run}: no such folder")
    raise UsageError(
        f"--run {run}: has no {RECORD_NAME}, which vlmdata train writes when a run starts. For an older run, resume it "
        "once, or give its settings (--capacity, --global-batch, … as in its config.toml)"
    )


def _config_of(values: Mapping[str, Any]) -> LoaderConfig:
    packing = dict(values["packing"])
    if packing["blend"] is not None:
        packing["blend"] = Blend.from_dict(packing["blend"])
    packing["schedule"] = [Change.from_dict(each) for each in packing.get("schedule", ())]
    packing["earlier"] = [Stage.from_dict(each) for each in packing.get("earlier", ())]
    if isinstance(packing["cost"], dict):
        packing["cost"] = CostModel(**packing["cost"])
    return LoaderConfig(Packing(**packing), Parallelism(**values["parallelism"]))


@dataclass(frozen=True)
class LoaderChoice:
    """Given options by name, and the run that supplies the others; without a run, defaults do."""

    given: Mapping[str, Any] = field(default_factory=dict)
    run: RunRecord | None = None

    def data(self, named: Sequence[str]) -> list[str]:
        """Returns the given datasets, or else those of the run; a UsageError if there are none."""
        if named or self.run is not None:
            return list(named) if self.run is None or named else self.run.places()
        raise UsageError("DIR: give a dataset, or a training run with --run")

    def config(self, datasets: Sequence[VlmDataset], places: Sequence[str] = ()) -> LoaderConfig:
        """Returns the options for these datasets, but for what a mixture file among the places says.

        A mixture file replaces the blend of a run. Without a run, ``capacity`` has room for the longest sample and
        ``global_batch`` is one pack per rank.

        Raises:
            UsageError: If options are incompatible.
            DatasetFormatError: If there are no samples.
        """
        if self.run is not None:
            replaced = {} if mixture_in(places) is None else {"blend": None, "schedule": ()}
            return self.run.config.with_options(**{**replaced, **self.given})
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
