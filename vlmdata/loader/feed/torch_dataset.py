"""A loader as a PyTorch ``IterableDataset``, for frameworks that need a ``DataLoader``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch.utils.data

from vlmdata.batch import PackedBatch
from vlmdata.errors import UsageError


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
