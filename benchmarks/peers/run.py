"""vlmdata's loader against its peers, each in its own environment, on the same receipts.

    python benchmarks/peers/run.py --rows 200             # ten minutes or so, and 8 GB for the environments

Run it with the Python of an environment that has vlmdata. It draws receipts (or takes ``--source``, a CORD-V2-like
folder), makes a vlmdata dataset, and an environment for each peer with the versions in ``requirements/`` (by uv, from
the package index that uv is set to). Array loaders get the finished samples in their own format, Energon the tars as
they are; transformers' processor gets the images. Each has one worker process, two batches ahead, and shuffles. Files
are in the page cache.

Peers run in turn, in every round. A run counts the tokens that the step has in hand, without the first batches of an
epoch; the "step" reads a byte of every page of a batch. Numbers are medians over rounds, ratios medians of the ratios
within a round. A peer that cannot be installed or fails is named with the last line that it said.
Writes benchmarks/results/peers-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # for hardware

from hardware import hardware

sys.path.pop(0)  # benchmarks/preprocess.py has the name of a package

CAPACITY = 8192
#: Name, script, file of requirements (none: this environment), further arguments.
PEERS = (
    ("vlmdata", "vlmdata_peer.py", None, ("uint8",)),
    ("vlmdata, float32 pixels", "vlmdata_peer.py", None, ("float32",)),
    ("LitData", "litdata_peer.py", "litdata.txt", ()),
    ("MosaicML streaming", "mosaicml_streaming_peer.py", "mosaicml-streaming.txt", ()),
    ("Megatron-Energon", "energon_peer.py", "energon.txt", ()),
    ("DataLoader + transformers", "transformers_peer.py", "transformers.txt", ()),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--source", default="demo", help="a source of vlmdata preprocess with the recipe cord_v2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of steady epochs, per peer and round")
    parser.add_argument("--work", type=Path, help="where environments and data are made, and found again")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vlmdata-peers-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        data = make_data(options.source, options.rows, work)
        failures: dict[str, str] = {}
        pythons = {name: environment(name, file, work, failures) for name, _, file, _ in PEERS}
        found = measure(data, work, pythons, options.rounds, options.seconds, failures)
        text = report(found, failures, options, json.loads((data / "data.json").read_text()))
    print(text)
    stem = options.out / f"peers-{datetime.date.today()}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps({"rounds": found, "failures": failures}, indent=1) + "\n")


def make_data(source: str, rows: int, work: Path) -> Path:
    """A vlmdata dataset, and its rows as messages and image files."""
    from vlmdata import open_dataset
    from vlmdata.preprocess.config import ImageConfig
    from vlmdata.preprocess.conversation import ImagePart
    from vlmdata.preprocess.recipes.base import load_recipe
    from vlmdata.preprocess.sources.open import open_source

    data = work / f"data-{rows}"
    if (data / "data.json").exists():
        return data
    note("making data")
    shutil.rmtree(data, ignore_errors=True)
    vlmdata = Path(sys.executable).parent / "vlmdata"
    command = [vlmdata, "preprocess", source, "--limit", str(rows), "--out", data / "dataset", "--recipe", "cord_v2"]
    subprocess.run([*command, "--tokenizer", "embedded", "--pad-multiple", "1"], check=True, stdout=sys.stderr)
    (data / "images").mkdir()
    opened, recipe, lines = open_source(source, limit=rows), load_recipe("cord_v2"), []
    for number in range(opened.num_rows):
        talk, messages = recipe(opened.row(number)), []
        for message in talk.messages:
            content = []
            for part in message.parts:
                if isinstance(part, ImagePart):
                    name = f"{number}-{len(messages)}-{len(content)}"
                    (data / "images" / name).write_bytes(part.data)
                    content.append({"type": "image", "file": name})
                else:
                    content.append({"type": "text", "text": part.text})
            messages.append({"role": message.role, "content": content})
        lines.append(json.dumps(messages) + "\n")
    (data / "rows.jsonl").write_text("".join(lines))
    index, limits = open_dataset(data / "dataset").index, ImageConfig()
    facts = {
        "samples": len(index),
        "tokens": int(index.lengths.sum()),
        "patches": int(index.num_patches.sum()),
        "capacity": CAPACITY,
        "samples_per_batch": max(1, int(CAPACITY // index.lengths.mean())),
        "min_pixels": limits.min_pixels,
        "max_pixels": limits.max_pixels,
    }
    (data / "data.json").write_text(json.dumps(facts))
    return data


def environment(name: str, file: str | None, work: Path, failures: dict[str, str]) -> Path | None:
    """The Python of a peer's environment, made if it is not there; None if that fails."""
    if file is None:
        return Path(sys.executable)
    folder = work / "environments" / Path(file).stem
    python, done = folder / "bin" / "python", folder / "installed"
    requirements = HERE / "requirements" / file
    if done.exists() and done.read_text() == requirements.read_text():
        return python
    note(f"installing {name}")
    uv = shutil.which("uv") or str(HERE.parents[1] / ".uv" / "bin" / "uv")
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder],
        [uv, "pip", "install", "--quiet", "--python", python, "--requirement", requirements],
    ):
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            failures[name] = f"not installed: {last_line(ran.stderr)}"
            return None
    done.write_text(requirements.read_text())
    return python


def measure(
    data: Path, work: Path, pythons: dict[str, Path | None], rounds: int, seconds: float, failures: dict[str, str]
) -> list[dict[str, dict[str, float]]]:
    """Prepares every peer's format, then runs all in turn, round by round."""

    def call(name: str, script: str, command: str, *more: str) -> str | None:
        if pythons[name] is None or name in failures:
            return None
        own = data / Path(script).stem
        ran = subprocess.run(
            [pythons[name], HERE / script, command, data, own, *more], capture_output=True, text=True, timeout=1800
        )
        if ran.returncode:
            failures[name] = f"{command} failed: {last_line(ran.stderr)}"
            return None
        return ran.stdout

    for name, script, _, _ in PEERS:
        done = data / f"{Path(script).stem}.prepared"
        if not done.exists():
            note(f"preparing {name}")
            shutil.rmtree(data / Path(script).stem, ignore_errors=True)
            if call(name, script, "prepare") is not None:
                done.touch()
    found = []
    for number in range(rounds):
        results = {}
        for name, script, _, more in PEERS:
            note(f"round {number + 1}/{rounds}: {name}")
            said = call(name, script, "measure", str(seconds), *more)
            if said is not None:
                results[name] = json.loads(said.splitlines()[-1])
        found.append(results)
    return found


def report(
    found: list[dict[str, dict[str, float]]],
    failures: dict[str, str],
    options: argparse.Namespace,
    facts: dict[str, Any],
) -> str:
    lines = [
        f"`python benchmarks/peers/run.py --rows {options.rows} --source {Path(options.source).name} --rounds "
        f"{options.rounds} --seconds {options.seconds:g}`, {datetime.date.today()}.",
        "",
        f"{hardware('torch', 'numpy', 'transformers')}",
        "",
        f"{facts['samples']} receipts, {facts['tokens']} tokens, {facts['patches']} patches, one worker each.",
        "",
        "| loader | tokens/s per worker | relative to vlmdata | lowest and highest |",
        "|---|---|---|---|",
    ]
    for name, *_ in PEERS:
        rounds = [each for each in found if name in each and "vlmdata" in each]
        if not rounds:
            lines.append(f"| {name} | – | – | {failures.get(name, 'no result')} |")
            continue
        speeds = [speed(each[name]) for each in rounds]
        ratios = [speed(each[name]) / speed(each["vlmdata"]) for each in rounds]
        lines.append(
            f"| {name} | {median(speeds):,.0f} | {median(ratios):.3f} | {min(ratios):.3f}, {max(ratios):.3f} |"
        )
    pinned = {path.stem: " ".join(path.read_text().split()) for path in sorted((HERE / "requirements").iterdir())}
    lines += ["", "Versions: " + "; ".join(f"{name}: {text}" for name, text in pinned.items()) + ".", ""]
    return "\n".join(lines)


def speed(result: dict[str, float]) -> float:
    return result["tokens"] / result["seconds"]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:200]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
