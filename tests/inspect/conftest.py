"""The datasets of these tests, made once for all test processes, and the browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.chat_rows import build_mixed, image_item, turn, write_jsonl
from tests.conftest import build_dataset
from tests.documents import build_documents
from tests.inspect.browser import launched
from tests.inspect.raw import RawSample, read_samples
from tests.list_recipe import build_lists
from tests.preprocess.command_line import Ended
from vlmdata.format.dataset import VlmDataset
from vlmdata.preprocess.config import SpecialText
from vlmdata.storage.open import open_dataset

#: Text that tries everything on whoever shows it.
HOSTILE = (
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 2</script>",
    "<img src=x onerror='window.pwned = 3'>",
    "<!-- <script> ]]> --> &lt;b&gt; &amp;",
    "'\"><svg/onload=window.pwned=4> {{ 7 * 7 }} {% raw %} ${7*7} `",
    "javascript:window.pwned=5",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J",
    "[bold red]markup[/] [link=https://evil.example]x[/link] :smile:",
    "\u202ereversed\u202c \u2066isolate\u2069 \ufeff\u2028",
    "𝕳 e\u0301 漢字 👩\u200d👩\u200d👧 \U0001f600",
)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all test processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "inspect"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, name: str, make: Callable[[Path], Any]) -> Path:
    """What ``make`` puts under a name, made by whichever process is first."""
    with FileLock(folder / f"{name}.lock"):
        done = folder / f"{name}.done"
        if not done.exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            make(folder / name)
            done.touch()
    return folder / name


@pytest.fixture(scope="session")
def demo(shared_folder: Path) -> Path:
    """The demo dataset of 8 receipts in 3 shards. Read-only by agreement, like the others."""
    return once(shared_folder, "demo", lambda out: build_dataset("demo", out, limit=8, rows_per_shard=3))


@pytest.fixture(scope="session")
def mixed(shared_folder: Path) -> Path:
    """Chats with no, one and several images, several turns, and rejected rows; one of four shards is empty."""
    return once(shared_folder, "mixed", build_mixed) / "dataset"


@pytest.fixture(scope="session")
def documents(shared_folder: Path) -> Path:
    """Short questions about images that take more tokens than the text, as documents do."""
    rows = [
        {"messages": [turn("user", image_item(seed=n, width=512, height=512), "?"), turn("assistant", "Noise.")]}
        for n in range(3)
    ]

    def make(out: Path) -> None:
        out.mkdir()
        build_dataset(write_jsonl(out / "documents.jsonl", rows), out / "dataset", recipe="chat")

    return once(shared_folder, "documents", make) / "dataset"


@pytest.fixture(scope="session")
def hostile(shared_folder: Path) -> Path:
    """Chats whose every text is an attack."""
    rows: list[Any] = [
        {"messages": [turn("user", image_item(seed=n), f"{n}: {text}"), turn("assistant", text)]}
        for n, text in enumerate(HOSTILE)
    ]
    rows.append({"messages": [turn("user", HOSTILE[0]), {"role": HOSTILE[2], "content": "x"}]})

    def make(out: Path) -> None:
        out.mkdir()
        source = write_jsonl(out / "<img src=x onerror=alert(1)>.jsonl", rows)
        build_dataset(source, out / "dataset", recipe="chat", special_text=SpecialText.PLAIN)

    return once(shared_folder, "hostile", make) / "dataset"


@pytest.fixture(scope="session")
def lists(shared_folder: Path) -> Path:
    """Rows that give lists of samples, of which some are rejected."""
    return once(shared_folder, "lists", build_lists) / "dataset"


@pytest.fixture(scope="session")
def texts(shared_folder: Path) -> Path:
    """Documents with and without images, of which one is split."""
    return once(shared_folder, "texts", build_documents) / "dataset"


@pytest.fixture(scope="session")
def demo_dataset(demo: Path) -> VlmDataset:
    """The same, opened."""
    return open_dataset(demo)


@pytest.fixture(scope="session")
def mixed_dataset(mixed: Path) -> VlmDataset:
    """The same, opened."""
    dataset = open_dataset(mixed)
    assert set(dataset.index.item_counts.tolist()) == {0, 1, 2}  # else the tests prove less than they say
    return dataset


@pytest.fixture(scope="session")
def demo_raw(demo: Path) -> list[RawSample]:
    """Its samples, read with tarfile."""
    return read_samples(demo)


@pytest.fixture(scope="session")
def mixed_raw(mixed: Path) -> list[RawSample]:
    """Its samples, read with tarfile."""
    return read_samples(mixed)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a dataset for a test to damage."""
    return lambda directory: Path(shutil.copytree(directory, tmp_path / directory.name))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for the tests of a file. None stays open longer: its event loop is that of this thread."""
    with launched() as found:
        yield found


Command = Callable[..., Ended]


@pytest.fixture
def command(vlmdata: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs ``vlmdata inspect`` in this process, 100 columns wide."""
    monkeypatch.setenv("NO_COLOR", "1")
    return partial(vlmdata, "inspect", columns=100)
