"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

from vlmdata.errors import UsageError
from vlmdata.loader.config import DEFAULT_VERIFY
from vlmdata.machine import available_cores
from vlmdata.options import OptionHelp
from vlmdata.service.address import DEFAULT_PORT, is_loopback
from vlmdata.storage.choices import Verify

GIB = 1 << 30
#: The part of the memory that is for plans.
_PLANS = 1 / 4

_network = partial(OptionHelp, panel="Network")
_limit = partial(OptionHelp, panel="Limits")
_security = partial(OptionHelp, panel="Security")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of a server, validated on construction.

    Raises:
        UsageError: If options are incompatible, or clients or tokens would be exposed to a network.
    """

    host: Annotated[str, _network("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _network("Port; 0 means a free one.")] = DEFAULT_PORT
    metrics_port: Annotated[
        int | None, _network("Port for /metrics (Prometheus) and /healthz, on the same host; 0 means a free one.")
    ] = None
    workers: Annotated[
        int, _limit("Processes that read and decode; 0 means one per core.", flags=("--workers", "-j"))
    ] = 0
    #: In bytes. It holds packs that are made, cached or sent; a quarter is for plans.
    memory: Annotated[int, _limit("Memory of all packs and plans, such as 500M or 4G.", typed="4G")] = 4 * GIB
    #: They take at most a third of the memory for packs.
    ahead: Annotated[int, _limit("Batches to make for each rank before it asks; 0 for none.")] = 2
    #: Bursts of twice as many are allowed.
    rate: Annotated[float, _limit("Queries a second per client machine.")] = 2000.0
    verify: Annotated[Verify, _limit(f"Checks: {', '.join(get_args(Verify))}.")] = DEFAULT_VERIFY
    stall: Annotated[
        float, _limit("Seconds after which a client that does not read loses its place if others wait.")
    ] = 10.0
    drain: Annotated[float, _limit("Seconds for answers under way when the server is stopped.")] = 30.0
    #: They are kept in the folder ``vlmdata-cache`` in it.
    cache_dir: Annotated[Path | None, _limit("Folder for shards of remote datasets.")] = None
    cache_bytes: int = 100 * GIB  # largest size of these shards
    timeout: float = 120.0  # seconds for a pack to be made before the query fails
    max_calls: int = 256  # queries at the same time
    token_file: Annotated[Path | None, _security("Valid tokens, one on each line; read again when it changes.")] = None
    tls_cert: Annotated[Path | None, _security("Certificate, PEM.")] = None
    tls_key: Annotated[Path | None, _security("Its private key, PEM.")] = None
    tls_client_ca: Annotated[Path | None, _security("Authorities whose certificates clients must present, PEM.")] = None
    insecure: Annotated[bool, _security("Allow clear text and no token on a network.", flags=("--insecure",))] = False

    def __post_init__(self) -> None:
        if self.workers == 0:
            object.__setattr__(self, "workers", available_cores())
        for name in ("workers", "memory", "timeout", "stall", "max_calls", "rate"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be more than 0")
        if self.ahead < 0:
            raise UsageError(f"--ahead {self.ahead}: must be 0 or more")
        for name in ("port", "metrics_port"):
            if (port := getattr(self, name)) is not None and not 0 <= port < 65_536:
                raise UsageError(f"{name} is {port}; ports go from 0 to 65535")
        if self.verify not in get_args(Verify):
            raise UsageError(f"--verify {self.verify}: must be one of {', '.join(get_args(Verify))}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UsageError("--tls-client-ca needs --tls-cert and --tls-key")
        if is_loopback(self.host) or self.insecure:
            return
        if self.tls_cert is None:
            raise UsageError(
                f"--host {self.host}: batches{' and tokens' if self.token_file else ''} would cross the network in "
                "clear text. Give --tls-cert and --tls-key, or --insecure on a trusted network."
            )
        if self.token_file is None and self.tls_client_ca is None:
            raise UsageError(
                f"--host {self.host}: anyone on the network could read the data. Give --token-file or --tls-client-ca, "
                "or --insecure on a trusted network."
            )

    @property
    def plan_memory(self) -> int:
        """Bytes of plans, those being made included."""
        return int(self.memory * _PLANS)

    @property
    def pack_memory(self) -> int:
        """Bytes of packs."""
        return self.memory - self.plan_memory

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_cert is not None
