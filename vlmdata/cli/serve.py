"""``vlmdata serve``: the collation service, which makes packed batches for loaders on other machines."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdata.errors import ResourceError, UsageError, VlmdataError
from vlmdata.wording import counted

if TYPE_CHECKING:
    from vlmdata.service.server.server import CollationServer

_NETWORK, _LIMITS, _SECURITY, _CLIENT = "Network", "Limits", "Security", "Look at a running server"
_LEAST_WIDTH = 110
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def serve(
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA…", help="Dataset directories or fsspec URLs, in the loader's order."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 means a free one.", rich_help_panel=_NETWORK)] = 8815,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port for /metrics (Prometheus) and /healthz.", rich_help_panel=_NETWORK)
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", "-j", help="Processes that read and decode; 0 means one per core.", rich_help_panel=_LIMITS
        ),
    ] = 0,
    memory: Annotated[
        str, typer.Option(help="Memory of all packs and plans, such as 500M or 4G.", rich_help_panel=_LIMITS)
    ] = "4G",
    ahead: Annotated[
        int,
        typer.Option(help="Batches to make for each rank before it asks; 0 for none.", rich_help_panel=_LIMITS),
    ] = 2,
    rate: Annotated[float, typer.Option(help="Queries a second per client machine.", rich_help_panel=_LIMITS)] = 2000.0,
    client_calls: Annotated[
        int, typer.Option(help="Queries at the same time per client machine; more wait.", rich_help_panel=_LIMITS)
    ] = 64,
    verify: Annotated[str, typer.Option(help="Checks: pixels, stored or off.", rich_help_panel=_LIMITS)] = "pixels",
    stall: Annotated[
        float,
        typer.Option(
            help="Seconds after which a client that does not read loses its place if others wait.",
            rich_help_panel=_LIMITS,
        ),
    ] = 10.0,
    drain: Annotated[
        float, typer.Option(help="Seconds for answers under way when the server is stopped.", rich_help_panel=_LIMITS)
    ] = 30.0,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for shards of remote datasets.", rich_help_panel=_LIMITS)
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Valid tokens, one on each line; read again when it changes.", rich_help_panel=_SECURITY),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.", rich_help_panel=_SECURITY)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.", rich_help_panel=_SECURITY)] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Authorities whose certificates clients must present, PEM.", rich_help_panel=_SECURITY),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow clear text and no token on a network.", rich_help_panel=_SECURITY)
    ] = False,
    status: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Show the clients and the state of a server, and exit.", rich_help_panel=_CLIENT
        ),
    ] = None,
    service_token_file: Annotated[
        Path | None, typer.Option(help="With --status: file that holds the token.", rich_help_panel=_CLIENT)
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(help="With --status: authorities of the server's certificate, PEM.", rich_help_panel=_CLIENT),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log, or print the status, as JSON.")] = False,
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
    from vlmdata.service.server.config import ServerConfig

    config = ServerConfig(
        host=host,
        port=port,
        workers=workers,
        memory=parse_bytes(memory),
        ahead=ahead,
        verify=verify,  # type: ignore[arg-type]
        rate=rate,
        client_calls=client_calls,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        insecure=insecure,
        metrics_port=metrics_port,
        stall=stall,
        drain=drain,
        cache_dir=cache_dir,
    )
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
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True, emoji=False)
    console.width = max(console.width, _LEAST_WIDTH)  # a narrow table that hides its values is of no use
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
        f"{counted(values['answers_under_way'], 'answer')} under way, {values['waiting']} waiting"
    )
    for message in values["damaged"].values():
        console.print(f"damaged: {message}", markup=False, style="red")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("client", "plan", "rank", "slice", "parts", "epoch/step/batch", "batches", "MB", "ago"):
        table.add_column(name, no_wrap=True)
    for each in values["clients"]:
        table.add_row(
            each["machine"].partition(":")[2],
            each["plan"],
            f"{each['dp_rank']}/{each['dp_size']}",
            each["slice"] or "–",
            "all" if each["parts"] == "labels+pixels+tokens" else each["parts"] or "none",
            "/".join(map(str, each["position"])),
            f"{each['batches']:,}",
            f"{each['bytes'] / 1e6:,.0f}",
            f"{each['seconds_ago']:.0f} s",
        )
    console.print(table if values["clients"] else "no client has asked in the last ten minutes")
