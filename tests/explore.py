"""Explores the property tests at random (``make explore MINUTES=10``).

Runs the files with property tests again and again, each time with another seed, until the time is over. Prints for each
test that failed the example and a command that finds it again. A test that has failed is left out afterwards.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.property_tests import EXPLORE
from vlmdata.wording import counted

_PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
_PROPERTIES = ["-m", "hypothesis and not gpu"]
#: pytest's exit codes for tests that failed, and for none left to run.
_FAILED, _NONE_LEFT = 1, 5
#: The example in pytest's output, in the words of new and of older versions of hypothesis.
_EXAMPLE = re.compile(r"^E\s+(?:Failing test case|Falsifying example): .*(?:\nE\s+.*)*", flags=re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Explores, and returns the exit code: 0 if all tests held, 1 if one failed, 2 if tests cannot run."""
    parser = argparse.ArgumentParser(prog="make explore", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True, help="time to explore")
    parser.add_argument("--out", type=Path, default=Path("build/explore"), help="folder for the output of failed tests")
    parser.add_argument("--most-runs", type=int, default=1 << 30, help="runs of a file after which to end, too")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files, folders or tests")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    files = _files_with_property_tests(given.tests)
    if not files:
        print(f"{' '.join(given.tests)}: no property test", file=sys.stderr)
        return 2
    rng = random.SystemRandom()
    failed: dict[str, str] = {}
    runs, waiting = 0, list[str]()
    while runs < given.most_runs:
        waiting = waiting or rng.sample(files, len(files))
        file, seed = waiting.pop(), rng.randrange(1 << 32)
        if (done := _run(file, seed, list(failed), deadline - time.monotonic())) is None:
            break
        runs += 1
        if done.returncode not in (0, _FAILED, _NONE_LEFT):
            print(f"{file}: pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}", file=sys.stderr)
            return 2
        for test in re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE):
            failed[test] = _command(test, seed)
            print(_report(test, failed[test], done.stdout, given.out), flush=True)
    print(f"{counted(runs, 'run')} of {counted(len(files), 'file')}; {counted(len(failed), 'test')} failed")
    for command in failed.values():
        print(f"  {command}")
    return 1 if failed else 0


def _files_with_property_tests(tests: Sequence[str]) -> list[str]:
    listed = subprocess.run(
        [*_PYTEST, *_PROPERTIES, "--collect-only", "-qq", *tests], capture_output=True, text=True, check=False
    )
    # With -qq, pytest prints a file and its number of tests on each line.
    return re.findall(r"^(\S+\.py): \d+$", listed.stdout, flags=re.MULTILINE)


def _run(file: str, seed: int, left_out: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """Runs the property tests of a file; returns None if the time is over before."""
    options = [f"--hypothesis-profile={EXPLORE}", f"--hypothesis-seed={seed}", "-q", "-rfE"]
    left = [option for test in left_out for option in ("--deselect", test)]
    try:
        return subprocess.run(
            [*_PYTEST, *_PROPERTIES, *options, *left, file], capture_output=True, text=True, timeout=max(seconds, 0.1)
        )
    except subprocess.TimeoutExpired:
        return None


def _command(test: str, seed: int) -> str:
    return f".venv/bin/python -m pytest '{test}' --hypothesis-profile={EXPLORE} --hypothesis-seed={seed}"


def _report(test: str, command: str, output: str, folder: Path) -> str:
    """Keeps pytest's output, and returns what to print of a failed test."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / (re.sub(r"[^\w.]+", "-", test) + ".txt")
    kept.write_text(output)
    shown = "\n".join(line.removeprefix("E").strip() for line in "".join(_EXAMPLE.findall(output)[:1]).splitlines())
    return f"FAILED {test}\n{shown}\nrepeat: {command}\noutput: {kept}\n"


if __name__ == "__main__":
    sys.exit(main())
