"""What a benchmark ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def hardware(*packages: str) -> dict[str, str | int | float]:
    """The machine, and the versions of Python and of some packages."""
    cpu = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        cpu.setdefault(name.strip(), value.strip())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{cpu.get('model name', platform.machine())}, family {cpu.get('cpu family')} model {cpu.get('model')}",
        "cpu_cache": cpu.get("cache size", "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
