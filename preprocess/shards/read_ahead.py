"""Reading rows, and fetching the images that they name, ahead of their turn where they come over a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice

from preprocess.recipes.media import MediaLoader
from preprocess.reject import RowRejected
from preprocess.row import Row
from preprocess.sources.rows import Source
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
) -> Generator[tuple[int, Callable[[], Row]]]:
    """Numbers of rows, and what gives each row or raises what reading it raised.

    Close the generator when leaving it early.

    Args:
        source: The rows.
        numbers: Which of them, in this order.
        media: Fetches their images.
        deadly: Rows that are not read, as they end the processes that do; asking for one raises RowRejected.
    """

    def row_of(number: int) -> Row:
        if number in deadly:
            raise RowRejected(Reason.WORKER_DIED, _DIED)
        return source.row(number)

    if not source.is_remote and not media.is_remote:
        for number in numbers:
            yield number, partial(row_of, number)
        return
    reading: deque[tuple[int, Future[Row]]] = deque()
    ahead: deque[tuple[int, Future[Row], list[str]]] = deque()
    # One thread, as an opened source is for one.
    with ThreadPoolExecutor(1, thread_name_prefix="rows") as reader:
        try:
            waiting = iter(numbers)
            while True:
                for number in islice(waiting, _ROWS_AHEAD - len(reading) - len(ahead)):
                    reading.append((number, reader.submit(row_of, number)))
                # Images of rows that have come are asked for at once, and of the next row in any case.
                while reading and (reading[0][1].done() or not ahead):
                    number, row = reading.popleft()
                    begun = media.begin(row.result().values) if row.exception() is None else []
                    ahead.append((number, row, begun))
                if not ahead:
                    return
                number, row, begun = ahead.popleft()
                yield number, row.result
                media.forget(begun)
        finally:
            for _, row in reading:
                row.cancel()
            for _, _, begun in ahead:
                media.forget(begun)
