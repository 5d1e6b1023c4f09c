"""Iterators over a loader, for one thread at a time, and a loader as a PyTorch dataset."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch.utils.data

from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError


class OneThread:
    """Lets one thread at a time iterate over a loader.

    Iterators of one thread share the loader's position. A second thread is refused while an iterator of another living
    thread is unfinished: two threads that wait for the same batch would wait until the timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak: leaving a loop drops its iterator, which ends it.
        self._threads: WeakKeyDictionary[LoaderIterator[Any], threading.Thread] = WeakKeyDictionary()

    def enter(self, one: LoaderIterator[Any]) -> None:
        """Begins to take an item; a UsageError if another thread is in an unfinished iterator, or in this one."""
        here = threading.current_thread()
        with self._lock:
            for each, thread in self._threads.items():
                if thread is not here and thread.is_alive() and (each is not one or each.taking):
                    raise UsageError(
                        f"thread {here.name} iterates a StreamingLoader that thread {thread.name} is iterating: one "
                        "thread at a time iterates over a loader. Create a loader for each thread, or finish the other "
                        "pass first (leave its loop and drop its iterator)"
                    )
            self._threads[one] = here
            one.taking = True

    def leave(self, one: LoaderIterator[Any]) -> None:
        """Ends an iterator."""
        with self._lock:
            self._threads.pop(one, None)


class LoaderIterator[Item](Iterator[Item]):
    """An iterator over a loader, for one thread at a time. ``taking``: whether a thread is taking an item."""

    def __init__(self, threads: OneThread, items: Iterator[Item]):
        self._threads, self._items = threads, items
        self.taking = False

    def __next__(self) -> Item:
        self._threads.enter(self)
        try:
            return next(self._items)
        except BaseException:
            self._threads.leave(self)
            raise
        finally:
            self.taking = False


#: Attributes that frameworks take from a ``DataLoader``.
_OF_DATALOADERS = ("dataset", "batch_size", "batch_sampler", "sampler", "collate_fn", "drop_last")
_REMEDY = (
    "It yields finished batches of this rank: iterate over it as it is. Where a DataLoader is wanted, give "
    "DataLoader(loader.as_dataset(), batch_size=None)"
)


class NoDataLoader:
    """Says what to do to code that takes a loader for torch's ``DataLoader``, or for a dataset of single samples."""

    if not TYPE_CHECKING:  # a checker would take any attribute for granted

        def __getattr__(self, name: str) -> NoReturn:
            remedy = f". {_REMEDY}" if name in _OF_DATALOADERS else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{remedy}", name=name, obj=self
            )

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(f"{type(self).__name__!r} object is not subscriptable. {_REMEDY}")


class _Loader(Protocol):
    """What a view needs of :class:`vlmdata.StreamingLoader`."""

    def __iter__(self) -> Iterator[PackedBatch]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class LoaderDataset(torch.utils.data.IterableDataset[PackedBatch]):
    """The batches of a loader. Pass it to ``DataLoader(dataset, batch_size=None)`` or to torchdata's.

    Workers of the ``DataLoader`` would yield all batches each, so they are an error. With ``endless``, a pass continues
    from epoch to epoch; it then has no length.
    """

    def __init__(self, loader: _Loader, endless: bool = False):
        self.loader, self.endless = loader, endless

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            raise UsageError(
                f"DataLoader(num_workers={worker.num_workers}) over a StreamingLoader: every worker would yield all "
                "batches. Use num_workers=0 here, and set num_workers of StreamingLoader, which has its own workers"
            )
        yield from self.loader
        while self.endless:
            yield from self.loader

    def __len__(self) -> int:
        if self.endless:
            raise TypeError("an endless LoaderDataset has no length")
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`StreamingLoader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`StreamingLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`StreamingLoader.load_state_dict`."""
        self.loader.load_state_dict(state)
