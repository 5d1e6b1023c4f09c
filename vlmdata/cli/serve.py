"""``vlmdata serve``: the collation service, which makes packed batches for loaders on other machines."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdata.cli.declared_options import with_declared_options
from vlmdata.errors import ResourceError, UsageError, VlmdataError
from vlmdata.service.server.config import ServerConfig
from vlmdata.wording import counted

if TYPE_CHECKING:
    from vlmdata.service.server.server import CollationServer

_client = partial(typer.Option, rich_help_panel="Look at a running server")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@with_declared_options(ServerConfig)
def serve(
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA…", help="Dataset directories or fsspec URLs, in the loader's order."),
    ] = None,
    status: Annotated[str | None, _client(metavar="HOST:PORT", help="Show the state of a server, and exit.")] = None,
    service_token_file: Annotated[Path | None, _client(help="With --status: file that holds the token.")] = None,
    tls_ca: Annotated[Path | None, _client(help="With --status: authorities of the server's certificate, PEM.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log, or print the status, as JSON.")] = False,
    **values: Any,
) -> None:
    """Serve packed batches to loaders: StreamingLoader("grpc://HOST:PORT", …).

    A server keeps nothing about its clients. Start several with the same data, and stop or restart any of them at any
    time. SIGTERM and Ctrl-C refuse new queries and let answers under way end.

    **Examples**

    - `vlmdata serve data/cord` (this machine only)

    - `vlmdata serve data/cord data/chat --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --token-file tokens`

    - `vlmdata serve --status trainer-7:8815`

    **Exit codes**: 0 stopped; 2 invalid option, no dataset, or the address is taken; 3 no answer from --status.
    """
    if status is not None:
        _show_status(status, service_token_file, tls_ca, as_json)
        return
    if not data:
        raise UsageError("DATA: give at least one dataset to serve")
    try:
        from vlmdata.service.server.server import CollationServer
    except ImportError as error:  # of pyarrow.flight, which some builds of pyarrow lack
        raise UsageError(f"vlmdata serve needs a package ({error}): pip install --upgrade vlmdata pyarrow") from error
    config = ServerConfig(**{**values, "memory": parse_bytes(values["memory"])})
    _log_to_stderr(as_json)
    stop = Stop()
    server = CollationServer(data, config)
    server.metrics.serve()
    _announce(server)
    stop.wait()
    logging.getLogger("vlmdata.service").info("stopping", extra={"answers_under_way": len(server.answers)})
    server.close()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # Flight would wait for calls whose clients do not read


class Stop:
    """Waits for SIGTERM or Ctrl-C, which it handles from its creation on. Only in the main thread.

    The handler takes no lock. It runs wherever the main thread is, also inside a wait that holds one: with a
    ``threading.Event``, a server that was told to stop at such a moment would hang.
    """

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def wait(self, seconds: float = 0.1) -> None:
        """Returns once a signal has come.

        Args:
            seconds: Time between two looks. A signal that another thread receives does not end a longer sleep.
        """
        while not self._asked:
            time.sleep(seconds)

    def _ask(self, *_: object) -> None:
        self._asked = True


def _announce(server: CollationServer) -> None:
    config = server.config
    scheme = "grpc+tls" if config.tls else "grpc"
    names = ", ".join(each.name for each in server.describe().datasets)
    host = socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host
    host = f"[{host}]" if ":" in host else host
    print(f"serving {names} at {scheme}://{host}:{server.port}", flush=True)
    if server.metrics.port is not None:
        print(f"metrics at http://{host}:{server.metrics.port}/metrics", flush=True)


def parse_bytes(text: str) -> int:
    """Returns the bytes of ``500M`` or ``4G``.

    Raises:
        UsageError: If it is no number of bytes.
    """
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS else (text, "")
    try:
        return int(float(number) * _UNITS.get(unit, 1))
    except ValueError:
        raise UsageError(f"--memory {text!r}: give bytes, or a number with K, M, G or T") from None


def _log_to_stderr(as_json: bool) -> None:
    from vlmdata.service.server.log import LogHandler

    logger = logging.getLogger("vlmdata")
    logger.addHandler(LogHandler(sys.stderr, as_json))
    logger.setLevel(logging.INFO)


def _show_status(place: str, token: Path | None, ca: Path | None, as_json: bool) -> None:
    from vlmdata.loader.config import Service
    from vlmdata.service.address import is_service, parse_address
    from vlmdata.service.client.connection import Connection, ServerLostError
    from vlmdata.service.protocol import STATUS

    address = parse_address(place if is_service(place) else f"{'grpc+tls' if ca else 'grpc'}://{place}")
    options = Service(service_token_file=token, tls_ca=ca)
    found: dict[str, dict[str, Any]] = {}
    problems: dict[str, VlmdataError] = {}
    for server in address.servers():
        try:
            found[str(server)] = json.loads(Connection(server, address, options).action(STATUS))
        except ServerLostError as error:
            problems[str(server)] = ResourceError(f"{error}. Does `vlmdata serve` run there?")
        except VlmdataError as error:
            problems[str(server)] = error
    if as_json:
        values = [{"server": name, **values} for name, values in found.items()]
        values += [{"server": name, "error": str(error)} for name, error in problems.items()]
        print(json.dumps(values if len(values) > 1 else values[0], indent=2))
    for name, status in found.items() if not as_json else ():
        _print_status(name, status)
    if len(problems) == 1:
        raise next(iter(problems.values()))
    if problems:
        raise ResourceError("\n".join(map(str, problems.values())))


def _print_status(name: str, values: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, emoji=False)
    memory, packs = values["memory"], values["packs"]
    state = "stopping" if values["draining"] else "up"
    console.print(
        f"{name} on {values['host']} (vlmdata {values['vlmdata']}), {state} for {values['up_seconds']:,.0f} s"
    )
    console.print("datasets: " + ", ".join(f"{each['name']} {each['fingerprint'][:8]}" for each in values["datasets"]))
    console.print(
        f"packs: {packs['made']:,} made ({packs['ahead']:,} ahead, {packs['dropped']:,} of these for nothing), "
        f"{packs['shared']:,} queries shared one"
    )
    console.print(
        f"memory for packs: {memory['in_use'] / 1e6:,.0f} of {memory['limit'] / 1e6:,.0f} MB; "
        f"{counted(values['workers'], 'worker')}, {counted(values['worker_restarts'], 'restart')}; "
        f"{counted(values['answers_under_way'], 'answer')} under way"
    )
    for message in values["damaged"].values():
        console.print(f"damaged: {message}", markup=False, style="red")
