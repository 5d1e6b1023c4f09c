"""Shared fixtures. Everything runs offline and below pytest's temporary folder."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests import forked, property_tests
from tests.object_store import object_store, object_store_server  # noqa: F401
from tests.proxy import proxy  # noqa: F401

if TYPE_CHECKING:
    from tests.preprocess.command_line import Ended  # needs psutil, which GPU machines may lack

property_tests.load_profiles()
gc.disable()  # until all is collected: each time, the collector would look through what was imported so far

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Where nothing may be compiled beside the libraries, every start would compile half of torch anew (15 s).
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "pycache"))
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ["PYTHONPYCACHEPREFIX"], False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background so, and with them all that tests start and then interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# By default Ray's workers give way to all other processes: those of other tests. Each imports what it needs, 4 s of CPU
# time, so none is started before a task needs it, and none ends because it has nothing to do for a second.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def _drop_frame_converter() -> None:
    """Tests convert frames with ``to_ndarray(format=…)``, for which PyAV keeps a converter with threads in each thread.
    A child that another thread forks frees it, and waits for these threads forever (docs/loader.md#workers).
    """
    if "av.video.frame" in sys.modules:
        vars(sys.modules["av.video.frame"])["_thread_local"] = threading.local()


os.register_at_fork(before=_drop_frame_converter)


def pytest_configure(config: pytest.Config) -> None:
    """With several workers, all of the suite's are forked, and share two servers of processes."""
    of_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if of_all and config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        forked.share_servers(Path(folder.name))
        import_module("tests.pytest_workers").fork_workers()  # GPU machines may lack pytest-xdist


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks for constants in all that is imported, 1 s of CPU time
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders with slow tests first: with a file to a worker, one that comes last would keep the others waiting.

    A folder stays together, because a worker that leaves it and comes back makes its fixtures anew.
    """
    property_tests.fix_constants()
    slow = {item.path.parent for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path.parent not in slow)


def pytest_collection_finish() -> None:
    """All modules of the session's tests are imported. The collector need not look through them again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _private_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hugging Face's and our caches live for the session only."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("VLMDATA_CACHE", str(cache / "vlmdata"))
        patch.setenv("HF_DATASETS_CACHE", str(cache / "datasets"))
        if find_spec("datasets"):  # GPU machines, where only loading is tested, may lack it
            import datasets

            patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
            datasets.disable_progress_bars()
        yield


@pytest.fixture
def vlmdata(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs the console script's function in this process: what it says and how it exits, without its start-up."""
    from tests.preprocess.command_line import Ended
    from vlmdata.cli.main import main

    def call(*arguments: Any, columns: int = 120) -> Ended:
        monkeypatch.setattr(sys, "argv", ["vlmdata", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        output = capsys.readouterr()
        code = caught.value.code
        return Ended(code if isinstance(code, int) else int(code is not None), output.out, output.err)

    return call


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded tokenizer as a ChatTokenizer."""
    from vlmdata.preprocess.chat.tokenizer import load_tokenizer

    return load_tokenizer()


def encoded_image(
    width: int = 64, height: int = 64, seed: int = 0, format: str = "PNG", mode: str = "RGB", **options: Any
) -> bytes:
    """A small noisy image file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, format=format, **options)
    return buffer.getvalue()


def cord_row(number: int = 0, **image_options: Any) -> dict[str, Any]:
    """A row in the CORD-V2 layout with a little image."""
    parse = {"menu": [{"nm": f"ITEM {number}", "price": f"{number}.000"}], "total": {"total_price": f"{number}.000"}}
    data = encoded_image(seed=number, **image_options)
    return {"image": {"bytes": data, "path": None}, "ground_truth": json.dumps({"gt_parse": parse})}


def write_cord_parquet(path: Path, rows: list[dict[str, Any]], rows_per_group: int | None = None) -> Path:
    """Rows as a parquet file with the features of CORD-V2."""
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    path.parent.mkdir(parents=True, exist_ok=True)
    features = Features({"image": ImageFeature(decode=False), "ground_truth": Value("string")})
    columns = {name: [row[name] for row in rows] for name in ("image", "ground_truth")}
    Dataset.from_dict(columns, features=features).to_parquet(str(path), batch_size=rows_per_group)
    return path


@pytest.fixture(scope="session")
def cord_parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 CORD-V2 rows with small images of several sizes."""
    sizes = [(64, 64), (96, 64), (64, 128), (100, 70)]
    rows = [cord_row(n, width=sizes[n % 4][0], height=sizes[n % 4][1]) for n in range(40)]
    return write_cord_parquet(tmp_path_factory.mktemp("cord") / "train.parquet", rows)


def build_dataset(
    spec: Path | str, directory: Path, *, workers: int = 1, limit: int | None = None, **config: Any
) -> Path:
    """Preprocesses a source into a folder and returns the folder."""
    from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
    from vlmdata.preprocess.run.dataset import preprocess_dataset
    from vlmdata.preprocess.sources.open import open_source

    config.setdefault("image", ImageConfig(min_pixels=1024, max_pixels=65536))
    resolved = PreprocessConfig(**config)
    source = open_source(str(spec), recipe=resolved.recipe, limit=limit)
    preprocess_dataset(source, directory, resolved, workers=workers)
    return directory


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Path]:
    """Preprocesses a source into a fresh folder and returns the folder."""

    def make(spec: Path | str, name: str = "out", **options: Any) -> Path:
        return build_dataset(spec, tmp_path / name, **options)

    return make


def tree_bytes(directory: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative name: for byte-for-byte comparison of datasets."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system in memory of so many KiB below the test's folder; again, it resizes the one it made."""
    mounted: list[Path] = []

    def mount(kib: int, place: str = "disk") -> Path:
        point = tmp_path / place
        point.mkdir(parents=True, exist_ok=True)
        options = f"size={kib}k" + (",remount" if mounted else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here (it needs root): {done.stderr.strip()}")
        mounted.append(point)
        return point

    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("a small disk can be mounted by root on Linux only")
    try:
        yield mount
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", mounted[0]], check=True)
