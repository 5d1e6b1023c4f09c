"""The streaming loader: packed batches in an order that is a pure function of data, configuration and position."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import torch

from vlmdata.batch import PackedBatch, Slice
from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.families.processor import ProcessorFamily
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import LoaderConfig, takes_loader_options
from vlmdata.loader.data import locations_of, open_data, require_for_tensors, require_one_tokenizer
from vlmdata.loader.feed.iteration import LoaderDataset, LoaderIterator, NoDataLoader, OneThread
from vlmdata.loader.feed.pipeline import Filler
from vlmdata.loader.feed.session import CurrentSession, LoadedBatch, Session
from vlmdata.loader.fill.filler import FillerHere, FillerInWorkers
from vlmdata.loader.mixture import mixture_in
from vlmdata.loader.option_types import LoaderOptions
from vlmdata.loader.ranks import DataParallel, data_parallel, given_data_parallel
from vlmdata.loader.request.index_rows import named_samples, sample_table
from vlmdata.loader.request.pack_request import EpochPlans, PackImages, RankStream
from vlmdata.loader.saved_versions import saved_versions
from vlmdata.loader.state import (
    DamagedSample,
    LoaderStats,
    Position,
    SampleId,
    require_few,
    restore,
    saved_state,
)
from vlmdata.media.codecs import require_codecs
from vlmdata.packing.config import Stage
from vlmdata.packing.plan.epoch import EpochPlan
from vlmdata.packing.table import SampleTable
from vlmdata.storage.open import fetched_as_chosen

_log = logging.getLogger("vlmdata.loader.damage")

Location = str | PathLike[str]


class StreamingLoader(NoDataLoader):
    """Streams packed batches from one or several dataset directories.

    One pass of the iterator is one epoch; the next pass is the next epoch. A pass that was left early continues where
    it was left, also after :meth:`load_state_dict`. The packs of every optimizer step are the same for every
    ``dp_size``, ``num_workers`` and point of interruption.

    Args:
        data: A dataset directory, an fsspec URL, or several of them; or a mixture file (``mixture.toml``) that names
            them and their weights; or a collation service (``grpc://host:8815,host2:8815``), which gives all of its
            datasets, or the one named after a slash.
        config: The options.
        **options: Options by name, which override those of ``config``. Without ``config``, ``capacity`` and
            ``global_batch`` must be given. :class:`vlmdata.LoaderConfig` lists all of them.

    Attributes:
        config: The options.
        plan_config: The part of the options on which the plan depends.
        plans: The plans of all epochs.
        datasets: The datasets, in order.
        stats: Counts so far.

    Raises:
        UsageError: If options are incompatible with each other or the process group, a sample fits no pack, or a
            package that decodes the pixels is not installed. It is also a ``ValueError``.
        TypeError: If an option is unknown.
        DatasetFormatError: If a dataset is missing or unfinished.
        ConfigMismatchError: If datasets have different tokenizers.
    """

    @takes_loader_options
    def __init__(
        self,
        data: Location | Sequence[Location],
        config: LoaderConfig | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        if not isinstance(config, LoaderConfig | None):
            raise UsageError(f"config is {config!r}; it must be a LoaderConfig. Give single options by name")
        self.config = LoaderConfig.of(**options) if config is None else config.with_options(**options)
        self._ranks = self._settle_ranks()
        locations = locations_of(data)
        mixture = mixture_in(locations)
        locations = locations if mixture is None else list(mixture.locations)
        table = self._open(locations)
        if mixture is not None:
            self.config = mixture.applied(self.config, table)
        self._plan_with(table, tuple(self.config.packing.earlier))
        device = self.config.reading.device
        self._device = torch.device(device) if device is not None else None
        self._position = Position()
        self._threads = OneThread()
        self._session = CurrentSession()
        # Not __del__: a finalizer still runs at the interpreter's exit.
        weakref.finalize(self, self._session.end)
        self.stats = LoaderStats()
        self._damaged: tuple[DamagedSample, ...] = ()
        self.plan(0)  # report samples that cannot be packed now, not at the first batch

    def _open(self, locations: Sequence[Location]) -> SampleTable:
        """Opens the datasets, and returns the columns of their samples that plans need."""
        self._given = locations
        reading, layout = self.config.reading, self.config.parallelism
        cache = Path(reading.cache_dir) if reading.cache_dir is not None else None
        opened = open_data(locations, cache, reading.cache_bytes, self.config.service, reading.timeout)
        self.datasets: tuple[VlmDataset, ...] = opened.datasets
        slices = layout.context_parallel_rank is not None or layout.vision_rank is not None
        self._shards = fetched_as_chosen(opened.shards, reading.fetch, reading.cache_bytes, slices=slices)
        self._service = opened.service
        if self._service is not None and layout.vision_rank is not None:
            raise UsageError(
                "a collation service makes the packs of one data-parallel rank, but vision_rank needs those of all: "
                "read the datasets themselves"
            )
        require_one_tokenizer(self.datasets)
        if isinstance(self.datasets[0].family, ProcessorFamily):
            require_for_tensors(self.config)
        if "pixels" in reading.wanted_parts and self._service is None:
            require_codecs({feature for dataset in self.datasets for feature in dataset.manifest.features})
        return sample_table(self.datasets)

    def _plan_with(self, table: SampleTable, earlier: tuple[Stage, ...], known: tuple[int, int] | None = None) -> None:
        """Makes the plans those of a run with this history."""
        self.config = self.config.with_options(earlier=earlier)
        self.plan_config = self.config.plan_config(self.datasets[0].family.name)
        names = [shards.name for shards in self._shards]
        self.plans = EpochPlans(table, self.plan_config, self.datasets, names, known)

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """Returns the plan of an epoch, by default that of the next batch. Keeps the last two."""
        return self.plans[self._position.epoch if epoch is None else epoch]

    def steps(self, epoch: int | None = None) -> int:
        """Returns the optimizer steps in an epoch. They differ slightly between epochs."""
        return self.plan(epoch).num_steps

    def images(self, epoch: int, step: int) -> tuple[tuple[PackImages, ...], ...]:
        """Returns boundaries and images of the packs of all data-parallel ranks in a step, from the index alone.

        With ``vision_ranks``, they include the rank of the vision tower that encodes each image. All ranks, those of
        the tower included, get the same.

        Args:
            epoch: The epoch.
            step: The step in it.

        Returns:
            The packs, first by micro-batch, then by data-parallel rank.

        Raises:
            IndexError: If the epoch has no such step.
        """
        return self._stream().images(epoch, step)

    def __len__(self) -> int:
        """Returns this rank's number of batches in the current epoch, including those already returned."""
        whole = self.config.parallelism.vision_rank is not None
        return self.plan().micro_batches(self.dp_size) * (self.dp_size if whole else 1)

    @property
    def dp_rank(self) -> int:
        """This data-parallel rank."""
        return self._follow_process_group().rank

    @property
    def dp_size(self) -> int:
        """Data-parallel size."""
        return self._follow_process_group().size

    def set_epoch(self, epoch: int) -> None:
        """Moves to the start of an epoch. Within that epoch, the loader keeps its position.

        Frameworks call this before every pass, so it must not undo a resume. Consecutive passes need
        no such call.

        Raises:
            UsageError: If the epoch is negative.
        """
        if epoch < 0:
            raise UsageError(f"epoch is {epoch}; epochs count from 0")
        if epoch != self._position.epoch:
            self._session.end()
            self._position = Position(epoch)

    def as_dataset(self, endless: bool = False) -> LoaderDataset:
        """Returns this loader as a PyTorch dataset, for ``DataLoader(loader.as_dataset(), batch_size=None)``.

        Args:
            endless: Whether a pass continues from epoch to epoch; the dataset then has no length.
        """
        return LoaderDataset(self, endless)

    @property
    def position(self) -> Position:
        """Position of the next batch."""
        return self._position

    def __iter__(self) -> Iterator[PackedBatch]:
        return LoaderIterator(self._threads, self._batches())

    def _batches(self) -> Iterator[PackedBatch]:
        self._follow_process_group()
        epoch = self._position.epoch
        while self._position.epoch == epoch:
            session = self._session.at(self._position, self._begin_session)
            begun = time.perf_counter()
            loaded = session.take()
            waited = time.perf_counter() - begun
            self._note(loaded)
            self._position = loaded.following
            self.stats = LoaderStats(
                self.stats.batches + 1,
                self.stats.tokens + loaded.batch.true_tokens,
                self.stats.bytes_read + loaded.bytes_read,
                self.stats.wait_seconds + waited,
                self._damaged,
            )
            yield loaded.batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last returned batch, as JSON values of a few hundred bytes.

        Between steps it is the same on all data-parallel ranks, so saving one copy is enough.
        """
        config, known, epoch = self.plan_config, None, self._position.epoch
        if config.schedule:
            known = (epoch, self.plans.steps_before(epoch))
            config = self.plans.settled_before(epoch)
        return saved_state(self._position, self.dp_size, self.fingerprints, config, self._damaged, known)

    def load_state_dict(self, state: Mapping[str, Any], change: bool = False) -> None:
        """Continues from a saved state.

        Args:
            state: Result of :meth:`state_dict`, from any number of ranks if between steps.
            change: Whether this loader may have other datasets and another plan (blend, seed, capacity, …) than the
                one that saved the state. If it has, the run changes there: a new epoch begins, in which each dataset
                continues with the samples that were used least. Datasets of before must still be given, with weight 0
                if they are not wanted.

        Raises:
            UsageError: If it is no saved state.
            ConfigMismatchError: If data or plan have changed; lists every difference. With ``change``: if the state is
                within a step, or lacks a dataset of before.
        """
        if (named := saved_versions(self._given, self.fingerprints, state, self._service)) is not None:
            self._plan_with(self._open(named), self.plan_config.earlier)
        found = restore(state, self.dp_size, self.fingerprints, self.plan_config, change)
        self._session.end()
        if found.earlier != self.plan_config.earlier or found.known is not None:
            self._plan_with(self.plans.table, found.earlier, found.known)
        self._position = found.position
        self._damaged = self.describe_damaged(found.damaged)
        self.stats = dataclasses.replace(self.stats, damaged=self._damaged)

    def describe_damaged(self, ids: Iterable[SampleId]) -> tuple[DamagedSample, ...]:
        """Returns file, row and key of damaged samples, given (dataset number, number in the dataset) of each."""
        return named_samples(ids, self.datasets, self._shards)

    def add_damaged(self, ids: Iterable[SampleId]) -> None:
        """Adds samples that other ranks masked, so that all ranks have the same state and limit.

        Each is (dataset number, number in the dataset).

        Raises:
            DatasetFormatError: If there are more than ``max_damaged`` now, naming all.
        """
        known = {each.id for each in self._damaged}
        if not known.issuperset(more := set(ids)):
            damaged = self.describe_damaged(known | more)
            require_few(damaged, self.config.reading.max_damaged)
            self._damaged = damaged
            self.stats = dataclasses.replace(self.stats, damaged=damaged)

    def _note(self, loaded: LoadedBatch) -> None:
        """Logs the samples of a batch that are masked for the first time."""
        known = {each.id for each in self._damaged}
        origins = loaded.batch.origins
        found = {(origins[i].dataset, origins[i].index): text for i, text in loaded.damaged.items()}
        self.add_damaged(found)
        for sample in found.keys() - known:
            _log.warning("%s The sample is masked: it has no targets, and its pixels are 0.", found[sample])

    def close(self) -> None:
        """Stops workers, releases buffers and closes connections. Returned batches stay valid."""
        self._session.end()
        if self._service is not None:
            self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        at, names = self._position, [shards.name for shards in self._shards]
        return (
            f"StreamingLoader({(names[0] if len(names) == 1 else names)!r}, capacity={self.plan_config.capacity}, "
            f"global_batch={self.plan_config.global_batch}, dp_rank={self._ranks.rank}, dp_size={self._ranks.size}, "
            f"epoch={at.epoch}, step={at.step}, micro_batch={at.micro_batch})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The caller's arguments and the position. The copy opens datasets and finds its ranks again.
        data = self._given if self._service is not None else [shards.name for shards in self._shards]
        return _make_again, (data, self.config, self._position, [each.id for each in self._damaged])

    def _begin_session(self) -> Session:
        stream, reading = self._stream(), self.config.reading
        filler: Filler
        if self._service is not None:
            filler = self._service.filler(stream, reading)
        else:
            filler = (FillerInWorkers if reading.num_workers else FillerHere)(self._shards, reading)
        return Session(stream, filler, self._device, self._position)

    def _stream(self) -> RankStream:
        # The workers' thread must not reference this loader, so that garbage collection of the loader stops them.
        layout, reading = self.config.parallelism, self.config.reading
        held = layout.context_parallel_rank
        context_parallel = None if held is None else Slice(held, layout.context_parallel)
        return RankStream(
            plans=self.plans,
            datasets=self.datasets,
            dp_rank=self._ranks.rank,
            dp_size=self._ranks.size,
            context_parallel=context_parallel,
            parts=reading.wanted_parts,
            pixels=reading.pixels,
            vision_ranks=layout.vision_ranks,
            vision_rank=layout.vision_rank,
        )

    def _settle_ranks(self) -> DataParallel:
        layout, global_batch = self.config.parallelism, self.config.packing.global_batch
        if layout.vision_ranks and layout.dp_size is not None:
            # The process group has ranks of the tower too, so its size says nothing of these.
            ranks = given_data_parallel(layout.dp_rank or 0, layout.dp_size)
        else:
            ranks = data_parallel(layout.dp_rank, layout.dp_size, layout.context_parallel, layout.tensor_parallel)
        if global_batch % ranks.size:
            source = f" (from {ranks.source})" if ranks.source else ""
            raise UsageError(
                f"global_batch {global_batch} is not a multiple of dp_size {ranks.size}{source}: all ranks must get "
                "the same number of packs"
            )
        return ranks

    def _follow_process_group(self) -> DataParallel:
        """Returns the ranks. While there seems to be one, checks again: a loader may precede the process group."""
        layout = self.config.parallelism
        if layout.dp_rank is None and layout.dp_size is None and not self._ranks.source:
            ranks = self._settle_ranks()
            if ranks != self._ranks:
                if self._position.micro_batch:
                    raise ConfigMismatchError(
                        f"the process group was set up within a step, at {self._position}: {self._ranks.size} rank "
                        f"started the step, {ranks.size} cannot continue it. Create the loader after the process group"
                    )
                self._session.end()
                self._ranks = ranks
        return self._ranks

    @property
    def fingerprints(self) -> tuple[tuple[str, str], ...]:
        """Returns name and fingerprint of each dataset, in order."""
        return tuple(
            (shards.name, dataset.manifest.fingerprint)
            for dataset, shards in zip(self.datasets, self._shards, strict=True)
        )


def _make_again(
    data: Location | Sequence[Location], config: LoaderConfig, position: Position, damaged: Iterable[SampleId]
) -> StreamingLoader:
    """Rebuilds a pickled loader."""
    loader = StreamingLoader(data, config)
    loader._position = position
    loader.add_damaged(damaged)
    return loader
