"""Runs the scripts of ``docs/frameworks.md`` that need a trainer that is no development dependency.

    python -m tests.integrations.adapters [NAME…] --work build/adapters     # or: make adapters

Each trainer has an environment of its own, made by uv with the versions in ``requirements/``, and vlmdata from this
checkout. Some trainers hold back a library of which vlmdata wants a newer version; ``overrides`` says so. Prints a line
for each trainer, and the end of its tests' output if they fail. The exit code is 1 if one of them did.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = ("pytest", "pytest-timeout", "hypothesis", "psutil")


@dataclass(frozen=True)
class Adapter:
    """A trainer and its tests.

    Attributes:
        name: As in ``FRAMEWORKS`` of ``framework_run`` if its script is in the guide.
        requirements: File in ``requirements/``.
        tests: What pytest runs.
        overrides: Requirements that replace those of the trainer and of vlmdata.
        bare: Requirements that are installed without what they need themselves.
    """

    name: str
    requirements: str
    tests: tuple[str, ...] = ("tests/integrations/test_frameworks.py",)
    overrides: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()


ADAPTERS = (
    Adapter("lightning", "lightning.txt"),
    Adapter("trl", "trl.txt"),
    Adapter("swift", "ms-swift.txt"),
    Adapter("llamafactory", "llamafactory.txt", overrides=("av==19.0.2", "datasets==4.8.4", "transformers==5.17.0")),
    Adapter(
        "megatron-bridge",
        "megatron-bridge.txt",
        tests=("tests/integrations/test_megatron_bridge.py",),
        bare=("megatron-bridge==0.6.2",),
    ),
    Adapter("verl", "verl.txt", tests=("tests/integrations/test_verl.py",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[each.name for each in ADAPTERS], default=[])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "adapters", help="where environments are made")
    parser.add_argument("--uv", default=shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv"))
    options = parser.parse_args()
    chosen = [each for each in ADAPTERS if not options.names or each.name in options.names]
    failed = [each.name for each in chosen if not proven(each, options.work.resolve(), options.uv)]
    sys.exit(1 if failed else 0)


def proven(adapter: Adapter, work: Path, uv: str) -> bool:
    """Makes the environment of an adapter and runs its tests."""
    try:
        python = environment(adapter, work, uv)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *adapter.tests]
        variables = {"ADAPTERS": adapter.name, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        variables |= {"DISABLE_VERSION_CHECK": "1"} if adapter.overrides else {}  # of LLaMA-Factory
        run(command, {**os.environ, **variables})
    except subprocess.CalledProcessError as error:
        print(f"{adapter.name}: FAILED\n{error.output[-6000:]}", flush=True)
        return False
    print(f"{adapter.name}: proven", flush=True)
    return True


def environment(adapter: Adapter, work: Path, uv: str) -> Path:
    """Returns the Python of the environment, made if its requirements have changed."""
    folder, file = work / adapter.name, HERE / "requirements" / adapter.requirements
    python, stamp = folder / "bin" / "python", folder / "requirements"
    wanted = "\n".join((file.read_text(), *adapter.overrides, *adapter.bare))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    run([uv, "venv", "--quiet", "--clear", "--python", "3.12", str(folder)])
    overrides: list[str] = []
    if adapter.overrides:
        (folder / "overrides").write_text("\n".join(adapter.overrides))
        overrides = ["--overrides", str(folder / "overrides")]
    install = [uv, "pip", "install", "--quiet", "--python", str(python), *overrides]
    run([*install, "-r", str(file), "--editable", str(ROOT), *TESTS])
    if adapter.bare:
        run([*install, "--no-deps", *adapter.bare])
    stamp.write_text(wanted)
    return python


def run(command: Sequence[str], variables: dict[str, str] | None = None) -> None:
    """Runs a command; an error has its output."""
    subprocess.run(
        command, cwd=ROOT, env=variables, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


if __name__ == "__main__":
    main()
