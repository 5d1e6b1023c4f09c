"""Dependencies point one way, and the data plane stays light: no training stack, no CUDA, a quick command line."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


#: What only preprocessing and options need: a GPU machine that runs a server or a loader may lack it.
OPTIONAL = (
    *("datasets", "transformers", "tokenizers", "PIL", "torchvision", "imagecodecs", "webdataset", "requests"),
    *("platformdirs", "prometheus_client", "starlette", "qwen_vl_utils", "indexed_gzip"),
)
#: One process for three tests, because importing torch takes 2 s: the loader, then the service, then everything.
IMPORTS = """
import importlib, pkgutil, sys
from time import process_time
blocked = {blocked!r}
class Block:
    def find_spec(self, name, path=None, target=None):
        if blocked & {{name.split('.')[0], '.'.join(name.split('.')[:2])}}:
            raise ImportError('blocked: ' + name)
sys.meta_path.insert(0, Block())

import numpy, pyarrow
start = process_time()
import torch
theirs, imported = set(sys.modules), process_time()
from vlmdata import StreamingLoader
loaded = process_time()
print(*{{name.partition('.')[0] for name in set(sys.modules) - theirs}} - sys.stdlib_module_names)
print(loaded - imported, imported - start)

optional = {optional!r}
print(*set(optional) & set(sys.modules))
sys.modules.update(dict.fromkeys(optional))  # None: importing it is an ImportError
import vlmdata.cli.serve, vlmdata.service.server.server, vlmdata.service.client.open, vlmdata.service.client.filler
for name in optional:
    del sys.modules[name]

for package in ('vlmdata', 'vlmdata.preprocess'):
    blocked.discard(package)
    count = 0
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + '.', onerror=lambda name: None):
        if module.name not in blocked:
            importlib.import_module(module.name)
            count += 1
    print(count)
print(torch.cuda.is_initialized())
"""


@pytest.fixture(scope="module")
def imports() -> list[str]:
    """What a new process prints that imports the loader, the service without what is optional, and all modules.

    Triton comes with torch and torch imports it where it likes; nothing of ours may need it.
    """
    blocked = {"megatron", "transformer_engine", "fla", "vlmdata.model", "vlmdata.train", "vlmdata.preprocess"}
    code = IMPORTS.format(blocked=blocked, optional=OPTIONAL)
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_importing_the_loader_loads_torch_numpy_pyarrow_and_little_else_and_takes_less_than_torch(
    imports: list[str],
) -> None:
    """Processor time of one process, which other work on the machine hardly changes: a sixth of torch's."""
    names, seconds = imports[:2]
    assert "vlmdata" in names.split()
    assert set(names.split()) <= {"vlmdata", "numpy", "pyarrow", "filelock", "xxhash"}
    ours, theirs = map(float, seconds.split())
    assert ours < theirs / 2


def test_the_collation_service_starts_without_what_only_preprocessing_and_options_need(imports: list[str]) -> None:
    assert imports[2] == "", "imported with torch or the loader"


def test_the_data_plane_imports_without_a_training_stack_and_vlmdata_without_preprocess_and_leave_cuda_alone(
    imports: list[str],
) -> None:
    assert min(map(int, imports[3:5])) > 30
    assert imports[5:] == ["False"]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


def files_of_ours() -> dict[str, ast.Module]:
    """The parsed files of the three packages, by module name."""
    found = {}
    for package in ("vlmdata", "preprocess", "model"):
        for file in (ROOT / package).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name if package == "vlmdata" else f"vlmdata.{name}"] = parsed(file)
    return found


def imported_at_run_time(tree: ast.Module) -> Iterator[str]:
    """What a file imports, also inside functions, except for type checkers."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not isinstance(node, ast.expr):  # which holds no import
            left += ast.iter_child_nodes(node)


def test_no_files_import_each_other_in_a_circle() -> None:
    files = files_of_ours()
    graph = {}
    for name, tree in files.items():
        modules = {each if each in files else each.rpartition(".")[0] for each in imported_at_run_time(tree)}
        graph[name] = (modules & files.keys()) - {name}
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_the_data_side_imports_all_that_an_install_brings_and_the_trainer_the_rest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.compile(r"[\w-]+")
    declared, extra = (
        {named.match(each)[0].lower() for each in requirements}  # type: ignore[index]
        for requirements in (project["dependencies"], project["optional-dependencies"]["train"])
    )
    distributions = packages_distributions()
    imported: dict[bool, set[str]] = {
        True: set(),
        False: {"torchvision"},
    }  # whose decoder is loaded without its package
    for module, tree in files_of_ours().items():
        trainer = module.startswith(("vlmdata.model", "vlmdata.train"))
        for name in imported_at_run_time(tree):
            found = distributions.get(name.partition(".")[0], ())
            imported[trainer] |= {each.lower().replace("_", "-") for each in found}
    assert declared <= imported[False]
    assert not extra & declared
    assert extra - {"psutil"} <= imported[True], "psutil is for megatron-core's checkpoints"


def test_model_families_do_not_import_each_other() -> None:
    root = "vlmdata.model.families."
    files = {name: tree for name, tree in files_of_ours().items() if name.startswith(root)}
    families = {name.removeprefix(root).partition(".")[0] for name in files if name.removeprefix(root).count(".")}
    assert len(families) > 1
    for name, tree in files.items():
        own = name.removeprefix(root).partition(".")[0]
        if own in families:
            others = {f"{root}{family}" for family in families - {own}}
            imported = {each for each in imported_at_run_time(tree) if each.startswith(root)}
            assert not {each for each in imported if any(f"{each}.".startswith(f"{it}.") for it in others)}, name


def test_a_public_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for name, tree in files_of_ours().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert len(places) > 400
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_file_of_ours_is_longer_than_one_idea() -> None:
    files = [path for package in ("vlmdata", "preprocess", "model") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 30
    long = {str(path.relative_to(ROOT)): lines for path in files if (lines := len(path.read_text().splitlines())) > 600}
    assert not long


def test_the_top_level_shows_the_architecture() -> None:
    """Also that no dataset or run that somebody tried is part of the project."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {name.split("/")[0] for name in listed if "/" in name and not name.startswith(".")}
    assert folders == {
        *("vlmdata", "preprocess", "model", "tests"),  # train.py and pyproject.toml beside them
        *("benchmarks", "docs", "examples", "requirements", "tools"),
    }


def test_the_lock_names_no_host() -> None:
    lock = (ROOT / "requirements" / "lock.txt").read_text()
    assert "torch==" in lock
    assert "://" not in lock
    assert "--index" not in lock


def test_only_families_know_the_geometry_of_patches() -> None:
    """No number of Qwen's patches stands elsewhere: bytes of a patch, values of both frames, the mean of pixels."""
    known = {768, 1536, 588, 1176, 127.5}
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for package in ("vlmdata", "preprocess")
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(ROOT / "vlmdata" / "families")
        for node in nodes(path)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in known
    }
    assert not found


def test_only_families_know_the_tokens_of_turns_and_items() -> None:
    """The fields of format 1 are mapped in one file."""
    known = ("<|im_", "<|vision_", "<|image_", "<|video_", "im_start", "vision_start")
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for package in ("vlmdata", "preprocess")
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(ROOT / "vlmdata" / "families") and path.name != "tokenizer_info.py"
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
        if any(each in node.value for each in known)
    }
    assert not found


def test_no_console_turns_words_between_colons_into_pictures() -> None:
    """``--recipe mine.py:X: cannot load`` must not become a cross."""
    made = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for package in ("vlmdata", "preprocess", "model")
        for path in (ROOT / package).rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
    ]
    assert len(made) > 5
    assert [place for place, options in made if "emoji" not in options] == []
