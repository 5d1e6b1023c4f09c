"""Options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from vlmdata.errors import UsageError
from vlmdata.loader.config import DEFAULT_VERIFY
from vlmdata.machine import available_cores
from vlmdata.service.address import DEFAULT_PORT, is_loopback
from vlmdata.storage.choices import Verify

GIB = 1 << 30
#: The part of the memory that is for plans.
_PLANS = 1 / 4


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of a server, validated on construction.

    Attributes:
        host: Address to listen on.
        port: Port; 0 means a free one.
        workers: Processes that read and decode.
        memory: Bytes of all packs (being made, cached, or being sent) and plans. A quarter is for plans.
        ahead: Batches that are made for each rank before it asks; at most a third of the memory for packs. 0 for none.
        verify: Checks of stored bytes and pixels, as in :class:`vlmdata.loader.config.Reading`.
        timeout: Seconds for a pack to be made before the query fails.
        stall: Seconds without progress after which the answer to a slow client gives up its memory if others need it.
        max_calls: Queries at the same time.
        rate: Queries a second per client machine; bursts of twice as many are allowed.
        token_file: File with the valid tokens, one on each line. It is read again when it changes.
        tls_cert: Certificate, PEM.
        tls_key: Its private key, PEM.
        tls_client_ca: Authorities whose certificates clients must present, PEM (mutual TLS).
        insecure: Allow clear text over the network.
        metrics_port: Port for ``/metrics`` and ``/healthz`` over HTTP, on ``host``; 0 means a free one, None means
            none.
        drain: Seconds for queries under way to end when the server is stopped.
        cache_dir: Folder for shards of remote datasets. They are kept in the folder ``vlmdata-cache`` in it.
        cache_bytes: Largest size of these shards in bytes.

    Raises:
        UsageError: If options are incompatible, or clients or tokens would be exposed to a network.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    workers: int = 0
    memory: int = 4 * GIB
    ahead: int = 2
    verify: Verify = DEFAULT_VERIFY
    timeout: float = 120.0
    stall: float = 10.0
    max_calls: int = 256
    rate: float = 2000.0
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure: bool = False
    metrics_port: int | None = None
    drain: float = 30.0
    cache_dir: Path | None = None
    cache_bytes: int = 100 * GIB

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
