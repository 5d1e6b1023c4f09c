"""FlashAttention 4's cache is turned on in a folder of the user's own, and nowhere else."""

from __future__ import annotations

import fcntl
import importlib
import os
import stat
import tempfile
from pathlib import Path

import pytest

from tests.forked import run_forked
from vlmdata.model.kernels.flash_cache import keep_compiled
from vlmdata.model.parallel.environment import before_megatron

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder it should take."""
    for name in (ENABLED, FOLDER):
        monkeypatch.setenv(name, "")  # what is set within the test is undone after it
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"vlmdata-{os.getuid()}" / "flash-attention"


def test_a_folder_that_only_the_user_may_open(place: Path) -> None:
    assert keep_compiled() == place
    assert (os.environ[ENABLED], os.environ[FOLDER]) == ("1", str(place))
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert keep_compiled() is None, "decided already"


@pytest.mark.parametrize("decided", ["0", "1"])
def test_what_the_user_decided_stays(place: Path, monkeypatch: pytest.MonkeyPatch, decided: str) -> None:
    monkeypatch.setenv(ENABLED, decided)
    assert keep_compiled() is None
    assert os.environ[ENABLED] == decided
    assert FOLDER not in os.environ


def test_the_users_folder_is_taken(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "kept" / "here"))
    assert keep_compiled() == tmp_path / "kept" / "here"
    assert os.environ[ENABLED] == "1"
    assert not place.exists()


def test_a_folder_that_others_may_write_to_is_not_taken(place: Path) -> None:
    place.mkdir(parents=True)
    place.parent.chmod(0o777)
    assert keep_compiled() is None
    assert ENABLED not in os.environ


def test_a_link_is_not_taken(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.parent.symlink_to(tmp_path / "elsewhere")
    assert keep_compiled() is None
    assert ENABLED not in os.environ


def test_without_locks_it_stays_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert keep_compiled() is None
    assert ENABLED not in os.environ


def test_where_nothing_can_be_written_it_stays_off(place: Path, tmp_path: Path) -> None:
    place.parent.write_text("a file where the folder should be")
    assert keep_compiled() is None
    assert ENABLED not in os.environ


def find_it() -> None:
    """Prints what the package finds in the environment when it is imported."""
    before_megatron()
    importlib.import_module("megatron.core")
    print(importlib.import_module("flash_attn.cute").FOUND)


@pytest.mark.parametrize("installed", [True, False])
def test_it_is_on_before_anything_can_import_the_package(tmp_path: Path, installed: bool) -> None:
    """Transformer Engine imports it together with megatron-core, long before a model is built."""
    pytest.importorskip("megatron.core")
    package = tmp_path / "site" / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(f"import os\nFOUND = os.environ.get({ENABLED!r})\n")
    if installed:
        (tmp_path / "site" / "flash_attn_4-4.0.dist-info").mkdir()
        (tmp_path / "site" / "flash_attn_4-4.0.dist-info" / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0\n")
    environment = {name: value for name, value in os.environ.items() if name not in (ENABLED, FOLDER)}
    environment |= {"PYTHONPATH": str(tmp_path / "site"), "TMPDIR": str(tmp_path)}
    done = run_forked(f"{__name__}:find_it", env=environment)  # the server has not imported megatron-core
    assert done.stdout.splitlines()[-1:] == ["1" if installed else "None"], done.stderr
