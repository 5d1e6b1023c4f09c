"""The streaming loader: packed batches in an order that is a pure function of data, configuration and position."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from vlmdata.batch import PackedBatch, Slice
from vlmdata.errors import ConfigMismatchError, UsageError
from vlmdata.format.dataset import VlmDataset
from vlmdata.loader.config import LoaderConfig, takes_loader_options
from vlmdata.loader.open import open_for_loading, require_one_tokenizer, sample_table
from vlmdata.loader.plans import EpochPlans
from vlmdata.loader.ranks import DataParallel, data_parallel
from vlmdata.loader.request import Part
from vlmdata.loader.session import CurrentSession, Session
from vlmdata.loader.state import LoaderState, Position, restore
from vlmdata.loader.stream import RankStream
from vlmdata.loader.view import LoaderDataset
from vlmdata.packing.plan import EpochPlan

Location = str | PathLike[str]


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has done since it was made.

    Attributes:
        batches: Batches handed out.
        tokens: True tokens in them (of whole packs).
        bytes_read: Bytes read from shards for them.
        wait_seconds: Time the consumer waited for batches.
    """

    batches: int = 0
    tokens: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0


class StreamingLoader:
    """Streams packed batches from one or several dataset directories.

    One pass of the iterator is one epoch; the next pass is the next epoch. A pass that was left early goes on where it
    was left, also after :meth:`load_state_dict`. The packs of every optimizer step are the same for every ``dp_size``,
    ``num_workers`` and point of interruption.

    Args:
        data: A dataset directory, an fsspec URL, or several of them.
        config: The options.
        **options: Options by name; they win over those of ``config``. Without ``config``, ``capacity`` and
            ``global_batch`` must be given. :class:`vlmdata.LoaderConfig` lists all of them.

    Attributes:
        config: The options.
        plan_config: What the plan depends on, made of them.
        datasets: The datasets, in order.
        stats: What was read so far.

    Raises:
        UsageError: If options do not fit together or not with the process group, or a sample fits no pack. It is a
            ``ValueError``, too.
        TypeError: If there is no option of that name.
        DatasetFormatError: If there is no finished dataset.
        ConfigMismatchError: If datasets have different tokenizers.
    """

    @takes_loader_options
    def __init__(self, data: Location | Sequence[Location], config: LoaderConfig | None = None, **options: Any) -> None:
        self.config = LoaderConfig.of(**options) if config is None else config.with_options(**options)
        self._data = data
        self._ranks = self._settle_ranks()
        locations = [data] if isinstance(data, str | PathLike) else list(data)
        if not locations:
            raise UsageError("data: no datasets given")
        reading, layout = self.config.reading, self.config.parallelism
        cache = Path(reading.cache_dir) if reading.cache_dir is not None else None
        opened = [open_for_loading(location, cache, reading.cache_bytes) for location in locations]
        self.datasets: tuple[VlmDataset, ...] = tuple(dataset for dataset, _ in opened)
        self._shards = tuple(shards for _, shards in opened)
        require_one_tokenizer(self.datasets)
        self.plan_config = self.config.plan_config()
        names = [shards.name for shards in self._shards]
        self._plans = EpochPlans(sample_table(self.datasets), self.plan_config, self.datasets, names)
        self._context_parallel = (
            None
            if layout.context_parallel_rank is None
            else Slice(layout.context_parallel_rank, layout.context_parallel)
        )
        self._parts = parts_of(reading.parts)
        self._device = torch.device(reading.device) if reading.device is not None else None
        self._position = Position()
        self._session = CurrentSession()
        # Not __del__: at the interpreter's exit this runs while there still is an interpreter to run it.
        weakref.finalize(self, self._session.end)
        self.stats = LoaderStats()
        self.plan(0)  # refuse what cannot be packed now, not at the first batch

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """The plan of an epoch, by default of the one that the next batch is in. The two last used are kept."""
        return self._plans[self._position.epoch if epoch is None else epoch]

    def steps(self, epoch: int | None = None) -> int:
        """Optimizer steps in an epoch; may differ by a little between epochs, as each packs anew."""
        return self.plan(epoch).num_steps

    def __len__(self) -> int:
        """Batches that this rank gets in the epoch of the next batch, those already handed out included."""
        return self.plan().micro_batches(self.dp_size)

    @property
    def dp_rank(self) -> int:
        """This data-parallel rank."""
        return self._follow_process_group().rank

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self._follow_process_group().size

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; within that epoch already, the loader stays where it is.

        Frameworks call this before every pass. So it must not undo a resume, and passes that follow one another need
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
        """This loader as a PyTorch dataset, for ``DataLoader(loader.as_dataset(), batch_size=None)``.

        Args:
            endless: Whether a pass goes on from epoch to epoch; the dataset then has no length.
        """
        return LoaderDataset(self, endless)

    @property
    def position(self) -> Position:
        """Of the next batch."""
        return self._position

    def __iter__(self) -> Iterator[PackedBatch]:
        self._follow_process_group()
        epoch = self._position.epoch
        while self._position.epoch == epoch:
            session = self._session.at(self._position, self._begin_session)
            begun = time.perf_counter()
            ready = session.take()
            waited = time.perf_counter() - begun
            self._position = ready.tag.following
            self.stats = LoaderStats(
                self.stats.batches + 1,
                self.stats.tokens + ready.batch.true_tokens,
                self.stats.bytes_read + ready.bytes_read,
                self.stats.wait_seconds + waited,
            )
            yield ready.batch

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was handed out; JSON-able, a few hundred bytes.

        The same for all data-parallel ranks between steps, so one rank's copy is enough to save.
        """
        return LoaderState(self._position, self.dp_size, self.fingerprints, self.plan_config.to_dict()).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a saved state left off.

        Args:
            state: What :meth:`state_dict` gave, on any number of ranks if it was between steps.

        Raises:
            ConfigMismatchError: If data or plan changed since; every difference is listed.
        """
        position = restore(state, self.dp_size, self.fingerprints, self.plan_config)
        self._session.end()
        self._position = position

    def close(self) -> None:
        """Stops workers and lets go of buffers. Batches that were handed out stay valid."""
        self._session.end()

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
        # What the caller said, and the position: where it lands, datasets are opened and ranks settled anew.
        return _make_again, (self._data, self.config, self._position)

    def _begin_session(self) -> Session:
        # Nothing that the workers' thread holds may hold this loader: a forgotten one must be garbage, and stop them.
        stream = RankStream(
            self._plans,
            self.datasets,
            self.plan_config,
            self._ranks.rank,
            self._ranks.size,
            self._context_parallel,
            self._parts,
        )
        return Session(stream, self._shards, self.config.reading, self._device, self._position)

    def _settle_ranks(self) -> DataParallel:
        layout, global_batch = self.config.parallelism, self.config.packing.global_batch
        ranks = data_parallel(layout.dp_rank, layout.dp_size, layout.context_parallel, layout.tensor_parallel)
        if global_batch % ranks.size:
            source = f" (from {ranks.source})" if ranks.source else ""
            raise UsageError(
                f"global_batch {global_batch} is not a multiple of dp_size {ranks.size}{source}: all ranks must get "
                "equally many"
            )
        return ranks

    def _follow_process_group(self) -> DataParallel:
        """The ranks; settled anew as long as nothing said that there are several, as a loader may be made first."""
        layout = self.config.parallelism
        if layout.dp_rank is None and layout.dp_size is None and not self._ranks.source:
            ranks = self._settle_ranks()
            if ranks != self._ranks:
                if self._position.micro_batch:
                    raise ConfigMismatchError(
                        f"the process group was set up within a step, at {self._position}: {self._ranks.size} rank "
                        f"began the step, {ranks.size} cannot continue it. Make the loader after the process group"
                    )
                self._session.end()
                self._ranks = ranks
        return self._ranks

    @property
    def fingerprints(self) -> tuple[tuple[str, str], ...]:
        """Name and fingerprint of each dataset, in order."""
        return tuple(
            (shards.name, dataset.manifest.fingerprint)
            for dataset, shards in zip(self.datasets, self._shards, strict=True)
        )


def parts_of(names: Sequence[str]) -> Part:
    """Part flags by name."""
    parts = Part(0)
    for name in names:
        parts |= Part[name.upper()]
    return parts


def _make_again(data: Location | Sequence[Location], config: LoaderConfig, position: Position) -> StreamingLoader:
    """Rebuilds a pickled loader."""
    loader = StreamingLoader(data, config)
    loader._position = position
    return loader
