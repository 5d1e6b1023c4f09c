"""The collation service against the local loader, over loopback.

    python benchmarks/service.py [--rows 240]

Drawn receipts, raw pixels, packs of 8,192 tokens. Servers run in processes of their own on the same cores as the
client. Rounds of all ways take turns; figures are medians. All files are in the page cache.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from hardware import hardware

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # benchmarks/preprocess.py has the name of a package

from tests.service.servers import Server, serving, start
from vlmdata import StreamingLoader

ROUNDS = 5
OPTIONS = {"capacity": 8192, "global_batch": 1}
HEDGE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=240)
    rows = parser.parse_args().rows
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
    (ROOT / "benchmarks" / "results" / f"service-{when}.md").write_text(text)


def describe() -> str:
    return ", ".join(f"{name} {value}" for name, value in hardware("pyarrow").items())


def throughput(data: Path) -> list[tuple[str, str]]:
    """Bytes a second of an epoch, and CPU seconds a GB on either side."""
    with serving(data, "-j", 1) as server, serving(data, "-j", 1, "--verify", "off") as unchecked:
        ways: dict[str, Callable[[], float]] = {
            "memcpy": memcpy,
            "local": lambda: epoch(str(data), num_workers=1),
            "served": lambda: epoch(server.url, num_workers=1),
            "served, 2 queries": lambda: epoch(server.url, num_workers=2),
            "served, unchecked": lambda: epoch(unchecked.url, num_workers=1, verify="off"),
            "two clients": lambda: two_clients(server.url),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for each in ways.values():
            each()  # fills caches
        for _ in range(ROUNDS):
            for name, way in ways.items():
                found[name].append(way())
        rates = {name: median(values) for name, values in found.items()}
        client, at_server = cpu_seconds_per_gb(server)
    lines = [("GB/s of a memcpy here", f"{rates['memcpy'] / 1e9:.2f}")]
    served = [name for name in rates if name.startswith("served")]
    lines += [(f"{name}: of memcpy", f"{rates[name] / rates['memcpy']:.2f}") for name in ("local", *served)]
    lines += [
        (f"{name}: of local", f"{rates[name] / rates['local']:.2f}") for name in rates if name.startswith("served")
    ]
    lines.append(("two clients over one, both together", f"{rates['two clients'] / rates['served']:.2f}"))
    return [*lines, ("CPU s a GB, client", f"{client:.2f}"), ("CPU s a GB, server with its worker", f"{at_server:.2f}")]


def memcpy(size: int = 32 << 20) -> float:
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    target[:] = source
    begun = time.perf_counter()
    for _ in range(20):
        target[:] = source
    return 20 * size / (time.perf_counter() - begun)


def epoch(place: str, **options: object) -> float:
    """Bytes a second over one epoch after its first batch."""
    with StreamingLoader(place, **OPTIONS, **options) as loader:
        batches, total = iter(loader), 0
        next(batches)
        begun = time.perf_counter()
        for batch in batches:
            total += sum(tensor.nbytes for tensor in batch.tensors().values())
        return total / (time.perf_counter() - begun)


def two_clients(place: str) -> float:
    """Bytes a second of two data-parallel ranks in processes of their own, together."""
    code = (
        "import sys; sys.path[0] = '.'; from vlmdata import StreamingLoader; import time\n"
        "loader = StreamingLoader(sys.argv[1], capacity=8192, global_batch=2, dp_rank=int(sys.argv[2]), dp_size=2, "
        "num_workers=1)\nbatches = iter(loader); next(batches); input(); begun = time.perf_counter(); total = 0\n"
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
    time.sleep(8)  # until both have imported torch and hold their first batch
    results = []
    for each in clients:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    for each in clients:
        out, _ = each.communicate()
        results.append(tuple(map(float, out.split())))
    return sum(size for size, _ in results) / max(seconds for _, seconds in results)


def cpu_seconds_per_gb(server: Server) -> tuple[float, float]:
    process = psutil.Process(server.process.pid)

    def at_server() -> float:
        family = [process, *process.children(recursive=True)]
        return sum(each.cpu_times().user + each.cpu_times().system for each in family)

    before, client = at_server(), time.process_time()
    with StreamingLoader(server.url, num_workers=1, seed=7, **OPTIONS) as loader:
        total = sum(sum(tensor.nbytes for tensor in batch.tensors().values()) for batch in loader)
    return (time.process_time() - client) / total * 1e9, (at_server() - before) / total * 1e9


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
        for _ in range(3):
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
