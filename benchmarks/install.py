"""Size and time of an installation from wheels, and the time to import the loader from it.

    python benchmarks/install.py before=OLD.whl now=NEW.whl 'trainer=NEW.whl[train]' --constraint requirements/lock.txt

Each wheel is installed into an empty environment of its own, with uv and without its cache, so the seconds include the
download. Sizes are those of the files that the installed distributions list, without bytecode. Then all environments
import `StreamingLoader` in turn, after one import each that writes the bytecode.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from hardware import hardware

#: What PyPI's torch brings on Linux, and a build of torch for CPUs does not.
CUDA = ("nvidia-", "cuda-", "triton")
SIZES = """
import importlib.metadata, json
sizes = {}
for each in importlib.metadata.distributions():
    files = [file.locate() for file in each.files or () if file.suffix != ".pyc"]
    sizes[each.name.lower()] = sum(file.stat().st_size for file in files if file.is_file())
print(json.dumps(sizes))
"""
LOADER = "from vlmdata import StreamingLoader"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", metavar="NAME=WHEEL")
    parser.add_argument("--constraint", type=Path)
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name, _, wheel in (each.partition("=") for each in options.wheels):
            found[name] = installed(Path(work, name), wheel, options)
        seconds: dict[str, list[float]] = {name: [] for name in found}
        for number in range(options.rounds + 1):
            for name in found:
                began = time.perf_counter()
                subprocess.run([Path(work, name, "bin", "python"), "-c", LOADER], check=True, cwd=work)
                if number:
                    seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        found[name]["import_seconds"] = round(median(values), 2)
    write(found, options.out)


def installed(folder: Path, wheel: str, options: argparse.Namespace) -> dict[str, Any]:
    """Installs a wheel. Returns the seconds, and MB by distribution."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([options.uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    constraint = ["--constraint", options.constraint] if options.constraint else []
    began = time.perf_counter()
    command = [options.uv, "pip", "install", "--no-cache", "--python", folder / "bin" / "python", *constraint, wheel]
    subprocess.run(command, check=True, **quiet)
    seconds = time.perf_counter() - began
    sizes = json.loads(subprocess.check_output([folder / "bin" / "python", "-c", SIZES]))
    return {"install_seconds": round(seconds), "mb": {name: round(size / 1e6, 1) for name, size in sizes.items()}}


def write(found: dict[str, dict[str, Any]], out: Path) -> None:
    """Writes install-<date>.json and .md."""
    machine, today = hardware(), datetime.date.today().isoformat()
    rows: dict[str, list[object]] = {}
    for each in found.values():
        cuda = sum(size for name, size in each["mb"].items() if name.startswith(CUDA))
        for title, value in {
            "distributions": len(each["mb"]),
            "MB": round(sum(each["mb"].values())),
            "of it CUDA libraries and Triton": round(cuda),
            "of it torch": round(each["mb"]["torch"]),
            "of it the rest": round(sum(each["mb"].values()) - cuda - each["mb"]["torch"]),
            "seconds of the installation": each["install_seconds"],
            "seconds of a process that imports the loader": each["import_seconds"],
        }.items():
            rows.setdefault(title, []).append(value)
    lines = [f"# Installation, {today}", "", f"`python {shlex.join(sys.argv)}` on {machine}.", ""]
    lines += ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    lines += [f"| {title} | " + " | ".join(map(str, values)) + " |" for title, values in rows.items()]
    last = next(reversed(found.values()))["mb"]
    largest = sorted(last, key=lambda name: -last[name])[:20]
    lines += [
        "",
        "Largest distributions of the last one, in MB: " + ", ".join(f"{name} {last[name]}" for name in largest),
    ]
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"install-{today}"
    stem.with_suffix(".json").write_text(json.dumps({"hardware": machine, "found": found}, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + ".\n")
    print("\n".join(lines))


if __name__ == "__main__":
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "UV_PYTHON_DOWNLOADS": "never"}
    main()
