"""Reading rows, and fetching the files that they name, ahead of their turn where they come over a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from vlmdata.preprocess.recipes.media import MediaLoader, Wanted
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.rows import Source
from vlmdata.reasons import Reason

#: Rows that are read before their turn.
_ROWS_AHEAD = 16
#: The same however often they died, as a repair must write it again.
_DIED = (
    "the worker processes that processed this row died (out of memory, or a crash in a library); "
    "--reject-after-deaths rejects such rows"
)


def rows_of(
    source: Source, numbers: Sequence[int], media: MediaLoader, deadly: Collection[int] = ()
) -> Generator[tuple[int, Row | RowRejected]]:
    """Yields rows of a source with their numbers; or their rejections, for ``deadly`` rows without reading them.

    Close the generator when leaving it early.
    """

    def row_of(number: int) -> Row | RowRejected:
        if number in deadly:
            return RowRejected(Reason.WORKER_DIED, _DIED)
        try:
            return source.row(number)
        except RowRejected as error:
            return error

    if not source.is_remote and not media.is_remote:
        yield from ((number, row_of(number)) for number in numbers)
        return
    reading: deque[tuple[int, Future[Row | RowRejected]]] = deque()
    ahead: deque[tuple[int, Future[Row | RowRejected], list[Wanted]]] = deque()
    # One thread, as an opened source is for one.
    with ThreadPoolExecutor(1, thread_name_prefix="rows") as reader:
        try:
            waiting = iter(numbers)
            while True:
                for number in islice(waiting, _ROWS_AHEAD - len(reading) - len(ahead)):
                    reading.append((number, reader.submit(row_of, number)))
                # Files of rows that have come are asked for at once, and of the next row in any case.
                while reading and (reading[0][1].done() or not ahead):
                    number, row = reading.popleft()
                    ahead.append((number, row, _begun(row, media)))
                if not ahead:
                    return
                number, row, begun = ahead.popleft()
                yield number, row.result()
                media.forget(begun)
        finally:
            for _, row in reading:
                row.cancel()
            for _, _, begun in ahead:
                media.forget(begun)


def _begun(row: Future[Row | RowRejected], media: MediaLoader) -> list[Wanted]:
    """Begins to fetch the files of a row, if it can be read."""
    if row.exception() is None and isinstance(read := row.result(), Row):
        return media.begin(read.values)
    return []
