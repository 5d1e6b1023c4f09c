"""Sends rows of images and videos from the ranks of the tower to the language model, and their gradients back.

Each direction has a group of its own. In a step every rank takes part in the exchange of every micro-batch, in order,
with sizes from the plan. So ranks cannot wait for each other in a circle. The language model asks for rows as many
micro-batches ahead as the tower may be (``parallel.vision_ahead``). All rows that a rank of the tower has begun to send
can then arrive, even while a rank waits for all work on its GPU, as it does when memory runs short.

Shapes: rows on a rank m, width of a row W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlmdata.model.parallel.embedding_rows import ItemEmbeddings
from vlmdata.model.parallel.exchange import all_gather_rows
from vlmdata.model.parallel.item_blocks import ItemBlocks
from vlmdata.model.parallel.packed import to_device
from vlmdata.model.parallel.separation import Separation
from vlmdata.model.parallel.vision_rows import MicroBatchRows, Transfer, even_parts
from vlmdata.model.parallel.waiting import Waiting


@dataclass(frozen=True)
class RowFormat:
    """What rows look like."""

    width: int  # values per row
    dtype: torch.dtype
    device: torch.device

    def empty(self, rows: int) -> Tensor:
        """Returns memory for rows."""
        return torch.empty(rows, self.width, dtype=self.dtype, device=self.device)


class RowSender:
    """A rank of the tower, with its tensor-parallel group: sends rows, receives gradients, counts its waiting time."""

    def __init__(self, ranks: Separation, rows: RowFormat, tensor_group: Any):
        self._ranks, self._format, self._tensor_group = ranks, rows, tensor_group
        self.waiting = Waiting(rows.device)
        self._sent: dict[int, tuple[Any, Transfer, Tensor]] = {}

    def send(self, number: int, micro_batch: MicroBatchRows, rows: Tensor) -> None:
        """Starts to send the rows of a micro-batch, (m, W), that this rank computed."""
        transfer = micro_batch.to_send(dist.get_rank())
        chosen = rows.detach().index_select(0, to_device(transfer.outgoing, rows.device))
        work = _start(self._format.empty(0), chosen, transfer.received, transfer.sent, self._ranks.rows_group)
        self._sent[number] = (work, transfer, chosen)

    def wait(self, number: int) -> Transfer:
        """Waits until the rows of a micro-batch are sent."""
        work, transfer, _ = self._sent.pop(number)
        with self.waiting.measured():
            work.wait()
        return transfer

    def gradient(self, number: int, count: int) -> Tensor:
        """Receives the gradient of the rows that this rank computed, (m, W) for ``count`` rows m."""
        transfer = self.wait(number)
        arrived = self._format.empty(sum(transfer.sent))
        nothing = self._format.empty(0)
        work = _start(arrived, nothing, transfer.sent, transfer.received, self._ranks.gradients_group)
        with self.waiting.measured():
            work.wait()
        gradient = self._format.empty(count).zero_()
        gradient.index_add_(0, to_device(transfer.outgoing, gradient.device), arrived)
        if self._ranks.vision_tensor > 1:  # each of these ranks sent a part of the same rows
            dist.all_reduce(gradient, group=self._tensor_group)
        return gradient


class RowReceiver:
    """A rank of the language model's first stage, with its tensor-parallel group: receives rows, sends their gradients.

    It asks for the rows of as many micro-batches ``ahead`` before it needs them, and counts the time that it waits.
    """

    def __init__(self, ranks: Separation, rows: RowFormat, tensor_group: Any, ahead: int):
        self._ranks, self._format, self._tensor_group, self._ahead = ranks, rows, tensor_group, ahead
        self.waiting = Waiting(rows.device)
        self._micro_batches: Sequence[MicroBatchRows] = ()
        self._trained = False
        self._next = 0
        self._coming: deque[tuple[Any, Transfer, Tensor]] = deque()
        self._returning: list[tuple[Any, Tensor]] = []

    def begin(self, micro_batches: Sequence[MicroBatchRows], trained: bool) -> None:
        """Begins a step of micro-batches in the order of computation; ``trained`` if the tower wants gradients."""
        self._micro_batches, self._trained, self._next = micro_batches, trained, 0
        for number in range(self._ahead):
            self._request(number)

    def receive(self, blocks: ItemBlocks) -> ItemEmbeddings:
        """Returns the rows that this context-parallel rank places in the pack with these blocks, the next one."""
        number = self._next
        self._next = number + 1
        self._request(number + self._ahead)
        assert self._coming, "the step has no further micro-batch"
        work, transfer, part = self._coming.popleft()
        with self.waiting.measured():
            work.wait()
        if self._trained and torch.is_grad_enabled():
            part.requires_grad_().register_hook(partial(self._return, transfer))
        micro_batch = self._micro_batches[number]
        data, context, _ = self._ranks.place(dist.get_rank())
        wanted = micro_batch.wanted(data, context)
        # All of these ranks have the same gradient of all rows, and each returns that of its part.
        counts = even_parts(len(wanted), self._ranks.tensor)
        rows = all_gather_rows(part, counts, self._tensor_group, sum_gradients=False)
        return ItemEmbeddings(rows, wanted, micro_batch.row_of_token(data, blocks))

    def finish(self) -> None:
        """Ends a step: waits until all gradients are sent."""
        for work, _ in self._returning:
            work.wait()
        self._returning.clear()
        assert self._next == len(self._micro_batches), "rows of some micro-batches were not used"

    def _request(self, number: int) -> None:
        """Starts to receive the rows of a micro-batch, if there is one."""
        if number >= len(self._micro_batches):
            return
        transfer = self._micro_batches[number].to_receive(dist.get_rank())
        part, nothing = self._format.empty(sum(transfer.received)), self._format.empty(0)
        work = _start(part, nothing, transfer.received, transfer.sent, self._ranks.rows_group)
        self._coming.append((work, transfer, part))

    def _return(self, transfer: Transfer, gradient: Tensor) -> None:
        """Starts to send the gradient of a part of the rows."""
        gradient, nothing = gradient.contiguous(), self._format.empty(0)
        work = _start(nothing, gradient, transfer.sent, transfer.received, self._ranks.gradients_group)
        self._returning = [each for each in self._returning if not each[0].is_completed()]
        self._returning.append((work, gradient))  # which must live until it is sent


def _start(into: Tensor, values: Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> Any:
    """Starts an exchange of rows; ranks that have none for each other exchange nothing."""
    return dist.all_to_all_single(into, values, list(received), list(sent), group=group, async_op=True)
