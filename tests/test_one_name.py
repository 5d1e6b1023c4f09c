"""An install brings one name, ``vlmdata``: projects may have their own ``model.py`` and ``preprocess.py``.

The commands run without what only Linux has, which other tests have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vlmdata.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
OWN = "raise AssertionError('the file of the project was imported')\n"
PROJECT = """
import os, subprocess, sys
from vlmdata.cli.main import app

def run(*words):
    app(list(words), standalone_mode=False)

if __name__ == "__main__":
    run("preprocess", "rows.jsonl", "--tokenizer", "embedded", "--recipe", "recipe.py:Own", "-j", "2",
        "--rows-per-shard", "1", "--part", "1/1", "--out", "data")
    run("finish", "data")
    run("verify", "data")
    run("select", "data", "--where", "length > 5", "--out", "chosen")
    run("plan", "data", "--capacity", "512", "--cost", "2b")
    run("inspect", "data", "--json")
    from vlmdata import StreamingLoader

    with StreamingLoader("data", capacity=512, global_batch=1, num_workers=1, cost="2b") as loader:
        print("batches:", len(list(loader)))
    serve = "from vlmdata.cli.main import main; main()", "serve", "chosen", "--port", "0", "--workers", "1"
    server = subprocess.Popen([sys.executable, "-P", "-c", *serve], stdout=subprocess.PIPE, text=True)
    with StreamingLoader(server.stdout.readline().split()[-1], capacity=512, global_batch=1) as loader:
        print("served:", len(list(loader)))
    server.terminate()
    print("ended:", server.wait())
    run("train", "--data", "data", "--preset", "tiny", "--steps", "1", "--capacity", "512", "--global-batch", "1",
        "--workers", "0", "--out", "run")
    run("convert", "run", "--out", "hf", "--data", "data")
    roots = {name.partition(".")[0] for name in sys.modules}
    print("of Linux:", os.path.exists("/proc/self"), hasattr(os, "memfd_create"), sys.modules.get("triton"))
    print("others:", sorted(roots & {"model", "preprocess", "train", "tests"}))
"""
RECIPE = """
from vlmdata.preprocess.recipes.chat import Chat

class Own(Chat):
    pass
"""
ROW = '{"messages": [{"role": "user", "content": "Two and %d?"}, {"role": "assistant", "content": "%d."}]}\n'


@pytest.mark.slow
def test_a_project_with_files_of_the_same_names_runs_everything_as_on_a_mac(tmp_path: Path) -> None:
    """The files come first on the path of every process, workers included; what only Linux has is taken away."""
    pytest.importorskip("megatron.core")
    scripts = tmp_path / "scripts"  # not beside inspect.py, which would hide Python's own from any script there
    scripts.mkdir()
    (tmp_path / "inspect.py").write_text(OWN)
    (scripts / "run.py").write_text(PROJECT)
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text("".join(ROW % (number, number + 2) for number in range(3)))
    for name in ("model.py", "preprocess.py", "train.py"):
        (scripts / name).write_text(OWN)
    ended = subprocess.run(
        [sys.executable, "scripts/run.py"],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": f"{ROOT / 'tests' / 'without_linux'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "batches: 1" in ended.stdout
    assert "nothing to do" not in ended.stdout
    assert ended.stdout.splitlines()[-2:] == ["of Linux: False False None", "others: []"]
    assert "served: 1\nended: 0" in ended.stdout


@pytest.mark.parametrize("name", ["preprocess", "model"])
def test_a_folder_of_the_checkout_is_no_second_copy_of_a_package(name: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode
    assert f"ImportError: this folder is the package vlmdata.{name}" in ended.stderr
    assert (ROOT / "vlmdata" / name).resolve() == ROOT / name


def test_entry_points_and_packages_have_one_root() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert declared["tool"]["setuptools"]["packages"]["find"]["include"] == ["vlmdata*"]
    points = [value for group in declared["project"]["entry-points"].values() for value in group.values()]
    points += COMMANDS.values()
    assert len(points) > 15
    assert {value.partition(".")[0] for value in [*points, *declared["project"]["scripts"].values()]} == {"vlmdata"}
