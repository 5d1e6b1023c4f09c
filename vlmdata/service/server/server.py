"""The Arrow Flight server."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from vlmdata.errors import NotFoundError, UsageError, VlmdataError
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME
from vlmdata.loader.fill.filler import DAMAGE, damaged_file
from vlmdata.loader.request.pack_request import PackRequest
from vlmdata.machine import free_descriptors, open_file_limit, raise_open_file_limit
from vlmdata.service.protocol import (
    DESCRIBE,
    HEALTH,
    PROTOCOL,
    STATUS,
    BatchQuery,
    Description,
    FileQuery,
    decode_query,
    encode_error,
)
from vlmdata.service.server.access import RateLimit, TokenCheck, TokenFile, machine_of
from vlmdata.service.server.ahead import ReadAhead
from vlmdata.service.server.answer import SCHEMA, Answer, Answers, FileAnswer, Sent, SharedAnswer
from vlmdata.service.server.config import ServerConfig
from vlmdata.service.server.datasets import Datasets
from vlmdata.service.server.metrics import Shown, counting
from vlmdata.service.server.packs import BusyError, FilledPack, Fillers, Packs
from vlmdata.service.server.plans import PlanBook
from vlmdata.service.shared_memory import this_place
from vlmdata.storage.open import open_for_loading
from vlmdata.version import __version__

_log = logging.getLogger("vlmdata.service")

# gRPC's own log is a line for each failed handshake, in a thread that serves others and waits while stderr is full.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

#: The files of a dataset that clients may have.
_FILES = (MANIFEST_NAME, INDEX_NAME)
_FILES_AT_ONCE = 16
#: Threads that answers may keep when they were given up, as a multiple of the calls.
_THREADS_PER_CALL = 4
_LONGEST_LOGGED = 500
_SECONDS_BETWEEN_LOOKS = 0.05
#: With fewer file descriptors left, connections may be refused.
_LEAST_DESCRIPTORS = 16


class CollationServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves batches of some datasets. It answers as soon as it exists; :meth:`close` ends it.

    Raises:
        UsageError: If options are incompatible, or the address is taken.
        DatasetFormatError: If a dataset is missing or unfinished.
    """

    def __init__(self, data: Sequence[str | os.PathLike[str]], config: ServerConfig):
        raise_open_file_limit()  # each pack and each connection has one; before workers start
        self.datasets = Datasets(data, lambda place: open_for_loading(place, config.cache_dir, config.cache_bytes))
        self.config = config
        # First: an error must not leave workers behind.
        self.metrics = counting(config, self._shown, self.problem)
        certificates = [(_read(config.tls_cert), _read(config.tls_key))] if config.tls else None
        authorities = _read(config.tls_client_ca) if config.tls_client_ca is not None else None
        tokens = {}
        if config.token_file is not None:
            tokens = {"token": TokenCheck(TokenFile(config.token_file), partial(self.metrics.refused, "token"))}
        self.plans = PlanBook(self.datasets, config.plan_memory, config.timeout)
        self.answers, self.files = (Answers(config.stall, config.pack_memory) for _ in range(2))
        self._fillers = Fillers(self.datasets.shards, config.workers, config.verify, config.timeout)
        self.datasets.on_opened = self._fillers.add
        self.packs = Packs(self._fillers, config.pack_memory, config.timeout, self.answers.packs, self.answers.relieve)
        self.ahead = ReadAhead(self.plans, self.packs, config.ahead, 2 * config.workers)
        self._damaged: dict[str, str] = {}  # what was wrong first, by file
        self._rate = RateLimit(config.rate)
        self._calls_lock, self._preparing = threading.Lock(), 0
        self._begun, self._draining = time.time(), threading.Event()
        scheme = "grpc+tls" if config.tls else "grpc"
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            super().__init__(
                f"{scheme}://{host}:{config.port}",
                tls_certificates=certificates,
                verify_client=config.tls_client_ca is not None,
                root_certificates=authorities,
                middleware=tokens,
            )
        except (pa.ArrowException, OSError) as error:
            self._fillers.close()
            raise UsageError(f"{host}:{config.port}: cannot listen: {error}") from error

    @property
    def is_draining(self) -> bool:
        """Whether new queries are refused."""
        return self._draining.is_set()

    def problem(self) -> str:
        """Returns why this server takes no queries now; "" if it does."""
        if self.is_draining:
            return "stopping"
        left = free_descriptors()
        if left is not None and left < _LEAST_DESCRIPTORS:
            return f"only {left} file descriptors are left: raise the limit (`ulimit -n`, LimitNOFILE of systemd)"
        return ""

    def describe(self) -> Description:
        """Returns what clients need to know of this server."""
        return Description(PROTOCOL, __version__, *self.datasets.offered())

    def status(self) -> dict[str, Any]:
        """Returns the state of this server as JSON values."""
        counts, memory = self.packs.counts, self.packs.memory
        return {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "vlmdata": __version__,
            "up_seconds": time.time() - self._begun,
            "draining": self.is_draining,
            "datasets": [dataclasses.asdict(each) for each in self.describe().datasets],
            "workers": self.config.workers,
            "worker_restarts": self._fillers.restarts,
            "memory": {"limit": memory.limit, "in_use": memory.pool.bytes_in_use},
            "files": {"limit": open_file_limit(), "left": free_descriptors()},
            "plans": {"limit": self.config.plan_memory, "in_use": self.plans.bytes_in_use},
            "packs": dataclasses.asdict(counts),
            "damaged": dict(self._damaged),
            "answers_under_way": len(self.answers),
        }

    def _shown(self) -> list[Shown]:
        """Returns the values that the metrics show besides their own counts."""
        packs, memory, plans = self.packs.counts, self.packs.memory, self.plans
        answers, files = self.answers.given_up, self.files.given_up
        return [
            Shown("vlmdata_packs_made", "Packs read and decoded.", packs.made, True),
            Shown("vlmdata_packs_made_ahead", "Of these, packs made before a query asked.", packs.ahead, True),
            Shown("vlmdata_packs_dropped", "Of the latter, packs forgotten before a query asked.", packs.dropped, True),
            Shown("vlmdata_packs_shared", "Queries answered from a pack made for another one.", packs.shared, True),
            Shown("vlmdata_bytes_read", "Bytes read from shards.", packs.bytes_read, True),
            Shown("vlmdata_worker_restarts", "Times that workers were replaced.", self._fillers.restarts, True),
            Shown("vlmdata_answers_given_up", "Answers to stalled clients that lost memory.", answers, True),
            Shown("vlmdata_files_given_up", "Files whose clients stalled while others waited.", files, True),
            Shown("vlmdata_memory_in_use_bytes", "Bytes of packs in use.", memory.pool.bytes_in_use),
            Shown("vlmdata_memory_limit_bytes", "Limit of these.", memory.limit),
            Shown("vlmdata_plans_in_use_bytes", "Bytes of plans.", plans.bytes_in_use),
            Shown("vlmdata_plans_limit_bytes", "Limit of these.", self.config.plan_memory),
            Shown("vlmdata_file_descriptors_left", "Files that can be opened.", free_descriptors() or 0),
            Shown("vlmdata_answers_under_way", "Answers being sent.", len(self.answers)),
            Shown("vlmdata_damaged_files", "Files in which damage was met.", len(self._damaged)),
        ]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Answers a query; called by Flight in a thread of its own."""
        with self._translated(context):
            query = decode_query(ticket.ticket)
            with self._entered():
                if isinstance(query, FileQuery):
                    return flight.GeneratorStream(SCHEMA, self._sent_file(self._file(query)))
                return flight.GeneratorStream(SCHEMA, self._sent(self._answer(query, context)))

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answers an action."""
        with self._translated(context, action=True):
            if action.type == DESCRIBE:
                return [self.describe().encode()]
            if action.type == STATUS:
                return [json.dumps(self.status()).encode()]
            if action.type == HEALTH:
                return [b"draining" if self.is_draining else b"ok"]
            raise NotFoundError(f"no action {action.type!r}")

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """Lists the actions."""
        return [(DESCRIBE, "datasets and versions"), (STATUS, "memory, counts"), (HEALTH, "ok or draining")]

    def close(self) -> None:
        """Refuses new queries, waits up to ``drain`` seconds for those under way, and ends."""
        self._draining.set()
        self.ahead.close()
        deadline = time.monotonic() + self.config.drain
        while (self._preparing or len(self.answers) or len(self.files)) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self.metrics.close()
        # Flight waits for calls; one whose client does not read would hold it up for as long.
        threading.Thread(target=self.shutdown, daemon=True).start()
        self._fillers.close()
        self.packs.close()

    def _answer(self, query: BatchQuery, context: Any) -> Answer:
        request, plan = self.plans.request(query)
        self.ahead.asked(query)  # not before: strangers' queries would push others out
        pack = self._pack(request, plan, query)
        self.ahead.note(query, request)
        answer: Answer
        if query.place and query.place == this_place():
            answer = SharedAnswer(request, pack, context.is_cancelled)
        else:
            answer = Answer(request, pack, self.answers.crowd)
        self.answers.add(answer)
        return answer

    def _pack(self, request: PackRequest, plan: str, query: BatchQuery) -> FilledPack:
        try:
            pack = self.packs.get(request, plan, query.on_damage)
        except DAMAGE as error:
            self._note_damage(str(error))
            raise
        for message in pack.filled.damaged.values():
            self._note_damage(message)
        return pack

    def _note_damage(self, message: str) -> None:
        """Logs damaged data, once for each file."""
        file = damaged_file(message)
        if file not in self._damaged:
            self._damaged[file] = message
            _log.error("damaged data", extra={"file": file, "error": message})

    def _sent(self, answer: Answer) -> Iterator[Sent]:
        with self._ending(answer, self.answers):
            yield from answer.batches()
            self.metrics.sent(answer.bytes)
            yield from answer.last()
            answer.wait()

    def _file(self, query: FileQuery) -> FileAnswer:
        if query.name not in _FILES:
            raise NotFoundError(f"no file {query.name!r} of a dataset {query.dataset[:16]}")
        answer = FileAnswer(self.datasets.require(query.dataset).directory / query.name)
        with self._calls_lock:
            if len(self.files) >= _FILES_AT_ONCE and not self.files.relieve():
                raise BusyError("too many files are being sent")
            self.files.add(answer)
        return answer

    def _sent_file(self, answer: FileAnswer) -> Iterator[pa.RecordBatch]:
        with self._ending(answer, self.files):
            yield from answer.batches()

    @contextmanager
    def _ending(self, answer: Answer | FileAnswer, answers: Answers) -> Iterator[None]:
        """Turns the errors of an answer under way into those of Flight, and forgets it at its end."""
        try:
            yield
        except BusyError as error:
            self.metrics.refused("stalled")
            raise flight.FlightUnavailableError(str(error)) from error
        except OSError as error:  # of a file
            _log.error("file cannot be sent", extra={"error": str(error)})
            raise flight.FlightUnavailableError("the file cannot be read") from error
        finally:
            answers.remove(answer)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Counts a query in, if there is room. Answers to stalled clients make room."""
        with self._calls_lock:
            full = self.answers.threads + self.files.threads >= _THREADS_PER_CALL * self.config.max_calls
            busy = self._preparing + len(self.answers) >= self.config.max_calls
            if full or (busy and not self.answers.relieve()):
                raise BusyError("too many queries")
            self._preparing += 1
        try:
            yield
        finally:
            with self._calls_lock:
                self._preparing -= 1

    @contextmanager
    def _translated(self, context: Any, action: bool = False) -> Iterator[None]:
        """Limits and counts calls, and turns errors into those of Flight."""
        if self.is_draining and not action:
            self.metrics.refused("draining")
            raise flight.FlightUnavailableError("the server is stopping")
        if not self._rate.allows(machine_of(context.peer())):
            self.metrics.refused("overloaded")
            raise flight.FlightUnavailableError("too many queries a second")
        begun = time.perf_counter()
        try:
            yield
            self.metrics.answered(time.perf_counter() - begun)
        except VlmdataError as error:
            self.metrics.refused(type(error).__name__)
            if not isinstance(error, DAMAGE):  # which is logged once a file
                _log.warning("query refused", extra={"client": context.peer(), "error": _printable(error)})
            raise flight.FlightServerError(str(error), encode_error(error)) from error
        except BusyError as error:
            self.metrics.refused("busy")
            raise flight.FlightUnavailableError(str(error)) from error
        except Exception as error:
            self.metrics.refused("internal")
            _log.exception("internal error", extra={"client": context.peer()})
            raise flight.FlightInternalError("internal error; the server's log has the details") from error


def _printable(error: Exception) -> str:
    """Returns an error for the log: parts of it come from the client."""
    return str(error)[:_LONGEST_LOGGED].encode("unicode_escape").decode()


def _read(path: Path | None) -> bytes:
    assert path is not None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
