"""The collation service against the local loader, over loopback.

    python benchmarks/service.py [--rows 120]

Drawn receipts, raw pixels, packs of 8,192 tokens. Servers run in processes of their own on the same cores as the
client. All ways take turns; figures are medians. All files are in the page cache. "Same machine" copies from the
server's memory; "connection" is gRPC over loopback, as a client on another machine would have it. If other work shares
the cores, read CPU time: client and server are more processes than a local loader, so they get more of the cores.
Writes benchmarks/results/service-<date>.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from hardware import hardware

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # benchmarks/preprocess.py has the name of a package

from tests.service.servers import Server, serving, start
from vlmdata import PackedBatch, StreamingLoader

ROUNDS = 7
#: Times that two clients run together, that a server is killed, and that it is stopped.
STALLS = 3
#: Batches of a turn that count, and those before them that do not.
BATCHES, AHEAD = 40, 5
#: Of the server: less than the data, so that packs are made anew, into buffers that are used again.
MEMORY = "160M"
OPTIONS = {"capacity": 8192, "global_batch": 1}
HEDGE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    options = parser.parse_args()
    rows = options.rows
    with tempfile.TemporaryDirectory(prefix="vlmdata-bench-") as folder:
        data = Path(folder) / "receipts"
        command = [sys.executable, "-c", "from vlmdata.cli.main import main; main()", "preprocess", "demo"]
        subprocess.run([*command, "--limit", str(rows), "--out", str(data)], check=True, capture_output=True)
        lines = [*throughput(data), *first_batch(data), *stall(data)]
    when = datetime.date.today().isoformat()
    table = "\n".join(["| what | value |", "|---|---|", *(f"| {what} | {value} |" for what, value in lines)])
    text = (
        f"# The collation service ({when})\n\n`python benchmarks/service.py --rows {rows}`\n\n{describe()}\n\n{table}\n"
    )
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"service-{when}.md").write_text(text)


def describe() -> str:
    return ", ".join(f"{name} {value}" for name, value in hardware("pyarrow").items())


def throughput(data: Path) -> list[tuple[str, str]]:
    """Bytes a second and CPU seconds a GB. All loaders are open and take turns; no pack is asked for twice in a row."""
    with (
        serving(data, "-j", 1, "--memory", MEMORY) as server,
        serving(data, "-j", 1, "--memory", MEMORY, "--verify", "off") as unchecked,
        serving(data, "-j", 1, "--memory", MEMORY, "--ahead", 0) as asked,
    ):
        ways: dict[str, dict[str, object]] = {
            "local": {"data": str(data)},
            "same machine": {"data": server.url},
            "same machine, 2 queries": {"data": server.url, "num_workers": 2},
            "same machine, nothing ahead": {"data": asked.url},
            "same machine, 2 queries, nothing ahead": {"data": asked.url, "num_workers": 2},
            "connection": {"data": server.url, "shared_memory": False},
            "connection, 2 queries": {"data": server.url, "num_workers": 2, "shared_memory": False},
            "connection, unchecked": {"data": unchecked.url, "verify": "off", "shared_memory": False},
        }
        servers = [psutil.Process(each.process.pid) for each in (server, unchecked, asked)]
        turns = {
            name: Turns(servers, {"num_workers": 1, "seed": seed, **way})
            for seed, (name, way) in enumerate(ways.items())
        }
        copies = []
        for _ in range(ROUNDS + 1):  # the first one fills caches and buffers
            copies.append(memcpy())
            for each in turns.values():
                each.take()
        together = median(two_clients(server.url) for _ in range(STALLS))
    rates = {name: each.rate for name, each in turns.items()}
    lines = [("GB/s of a memcpy here", f"{median(copies) / 1e9:.2f}")]
    lines += [(f"{name}: of memcpy", f"{rate / median(copies):.2f}") for name, rate in rates.items()]
    lines += [(f"{name}: of local", f"{rate / rates['local']:.2f}") for name, rate in rates.items() if name != "local"]
    lines.append(("two clients over one, both together", f"{together / rates['same machine']:.2f}"))
    for name, each in turns.items():
        if name != "local":
            # Servers still make batches ahead of the way before.
            speed = turns["local"].cpu_seconds_per_gb[0] / sum(each.cpu_seconds_per_gb)
            lines.append((f"{name}: of local, by CPU time", f"{speed:.2f}"))
    for name, each in turns.items():
        client, at_servers = each.cpu_seconds_per_gb
        lines.append((f"{name}: CPU s per GB, client + server with its worker", f"{client:.2f} + {at_servers:.2f}"))
    return lines


class Turns:
    """A loader that takes some batches at a time.

    Args:
        servers: All servers.
        options: The loader's options.
    """

    def __init__(self, servers: list[psutil.Process], options: dict[str, object]):
        self._servers, self._batches = servers, endless(options)
        self._rates: list[float] = []
        self._cpu, self._bytes = [0.0, 0.0], 0

    def take(self) -> None:
        """Takes a turn. The batches that were made ahead do not count."""
        for _ in range(AHEAD):
            next(self._batches)
        families = self._processes()  # before: listing them takes as long as loading a batch
        before, begun, total = _cpu_seconds(families), time.perf_counter(), 0
        for _ in range(BATCHES):
            total += sum(tensor.nbytes for tensor in next(self._batches).tensors().values())
        self._rates.append(total / (time.perf_counter() - begun))
        if len(self._rates) > 1:
            self._bytes += total
            taken = zip(self._cpu, _cpu_seconds(families), before, strict=True)
            self._cpu = [so_far + now - then for so_far, now, then in taken]

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return median(self._rates[1:])

    @property
    def cpu_seconds_per_gb(self) -> tuple[float, float]:
        """Of this process with its workers, and of the servers with theirs."""
        client, servers = (each / self._bytes * 1e9 for each in self._cpu)
        return client, servers

    def _processes(self) -> list[list[psutil.Process]]:
        """This process with its workers, and the servers with theirs."""
        theirs = {each.pid: each for server in self._servers for each in (server, *server.children(recursive=True))}
        me = psutil.Process()
        mine = {each.pid: each for each in (me, *me.children(recursive=True)) if each.pid not in theirs}
        return [list(mine.values()), list(theirs.values())]


def _cpu_seconds(families: list[list[psutil.Process]]) -> list[float]:
    """CPU seconds of each of some groups of processes."""
    return [sum(sum(each.cpu_times()[:2]) for each in family) for family in families]


def endless(options: dict[str, object]) -> Iterator[PackedBatch]:
    with StreamingLoader(**OPTIONS, **options) as loader:  # type: ignore[arg-type]
        while True:
            yield from loader


def memcpy(size: int = 32 << 20) -> float:
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    target[:] = source
    begun = time.perf_counter()
    for _ in range(20):
        target[:] = source
    return 20 * size / (time.perf_counter() - begun)


def two_clients(place: str) -> float:
    """Bytes a second of two data-parallel ranks in processes of their own, together."""
    code = (
        "import sys; sys.path[0] = '.'; from vlmdata import StreamingLoader; import time\n"
        "loader = StreamingLoader(sys.argv[1], capacity=8192, global_batch=2, dp_rank=int(sys.argv[2]), dp_size=2, "
        "num_workers=1)\nbatches = iter(loader); next(batches); print(flush=True); input()\n"
        "begun, total = time.perf_counter(), 0\n"
        "for batch in batches: total += sum(t.nbytes for t in batch.tensors().values())\n"
        "print(total, time.perf_counter() - begun)"
    )
    clients = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, place, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    for each in clients:  # until both have imported torch and hold their first batch
        assert each.stdout is not None
        each.stdout.readline()
    results = []
    for each in clients:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    for each in clients:
        out, _ = each.communicate()
        results.append(tuple(map(float, out.split())))
    return sum(size for size, _ in results) / max(seconds for _, seconds in results)


def first_batch(data: Path) -> list[tuple[str, str]]:
    """Seconds from creating the loader to its first batch, torch being imported and the server running."""
    with serving(data, "-j", 1) as server:
        found: dict[str, list[float]] = {"local": [], "served": []}
        for seed in range(ROUNDS):
            for name, place in (("local", str(data)), ("served", server.url)):
                begun = time.perf_counter()
                with StreamingLoader(place, seed=seed, **OPTIONS) as loader:
                    next(iter(loader))
                    found[name].append(time.perf_counter() - begun)
    return [(f"first batch, {name}", f"{median(seconds):.2f} s") for name, seconds in found.items()]


def stall(data: Path) -> list[tuple[str, str]]:
    """Longest wait for a batch when one of two servers is killed, and when it is stopped (SIGSTOP)."""
    lines = []
    for name, harm in (("killed", "SIGKILL"), ("stopped", "SIGSTOP")):
        waits = []
        for _ in range(STALLS):
            with two_servers(data) as (first, second):
                place = f"grpc://127.0.0.1:{first.port},127.0.0.1:{second.port}"
                with StreamingLoader(place, num_workers=1, prefetch_factor=1, hedge=HEDGE, **OPTIONS) as loader:
                    waits.append(longest_wait(loader, first, harm))
        lines.append((f"stall when one of two servers is {name} (hedge {HEDGE:.0f} s)", f"{median(waits):.2f} s"))
    return lines


@contextmanager
def two_servers(data: Path) -> Iterator[tuple[Server, Server]]:
    servers = [start(data, "-j", 1, "--port", 0) for _ in range(2)]
    try:
        yield servers[0], servers[1]
    finally:
        for each in servers:
            if each.process.poll() is None:
                each.stop()


def longest_wait(loader: StreamingLoader, victim: Server, harm: str) -> float:
    import signal

    batches = iter(loader)
    for _ in range(4):
        next(batches)
    threading.Timer(0.05, lambda: os.kill(victim.process.pid, getattr(signal, harm))).start()
    waits = []
    for _ in range(8):
        begun = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - begun)
        time.sleep(0.05)
    return max(waits)


if __name__ == "__main__":
    main()
