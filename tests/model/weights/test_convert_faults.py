"""What stops a conversion: a message, and nothing left in the output folder; and what it takes by itself."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from click.testing import Result
from typer.testing import CliRunner

import vlmdata.model.weights.convert as conversion
from tests.model.weights.test_convert import hf_folder
from vlmdata.cli.main import app
from vlmdata.errors import ResourceError
from vlmdata.model.parallel import groups
from vlmdata.model.training.checkpoints.weights import load_weights
from vlmdata.model.weights.convert import to_hf, to_megatron
from vlmdata.model.weights.hf_files import WeightsError
from vlmdata.model.weights.places import is_distributed, temporary_of

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.slow]


@pytest.fixture(scope="module")
def sources(one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder and a distributed checkpoint."""
    root = tmp_path_factory.mktemp("sources")
    hf_folder(root / "hf", "dense")
    to_megatron(root / "hf", root / "megatron")
    return root


@pytest.fixture
def checkpoint(sources: Path, tmp_path: Path) -> Path:
    """A copy without checksums, in which only reading finds damage."""
    folder = Path(shutil.copytree(sources / "megatron", tmp_path / "checkpoint"))
    (folder / "checksums-00000.json").unlink()
    return folder


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, in the groups of this process."""
    monkeypatch.setattr(groups, "initialize", lambda **options: None)
    monkeypatch.setattr(groups, "destroy", lambda: None)
    return lambda *arguments: CliRunner().invoke(app, ["convert", *map(str, arguments)])


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _spoil(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("damage", [_cut, _spoil, Path.unlink])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_named(
    checkpoint: Path, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(checkpoint / file)
    wanted = (
        "was removed" if damage is Path.unlink and file == ".metadata" else "cannot be read; its files seem damaged"
    )
    with pytest.raises(WeightsError, match=f"^{checkpoint} {wanted}") as error:
        to_hf(checkpoint, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert names_in(tmp_path) == ["checkpoint"]


def test_a_checkpoint_that_a_run_removes_meanwhile_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, count = conversion.read_piece, 0

    def removed(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            shutil.rmtree(checkpoint)
        return read(*arguments)

    monkeypatch.setattr(conversion, "read_piece", removed)
    with pytest.raises(WeightsError, match=rf"^{checkpoint} was removed while it was read, .*\(run\.keep\)"):
        to_hf(checkpoint, tmp_path / "out")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("direction", ["hf", "megatron"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_nothing_and_the_retry_works(
    sources: Path, small_disk: Callable[..., Path], direction: str, exists: bool
) -> None:
    disk = small_disk(500)
    out, convert, source = disk / "out", to_hf, sources / "megatron"
    if direction == "megatron":
        convert, source = to_megatron, sources / "hf"
    if exists:
        out.mkdir()
    with pytest.raises(ResourceError, match=rf"^{out} could not be written: No space left on device; 0\.[1-9] MB free"):
        convert(source, out)
    assert list(disk.rglob("*")) == ([out] if exists else [])
    small_disk(20_000)
    convert(source, out)
    assert not list(disk.glob(".*"))
    assert (out / "config.json").exists()


def test_a_folder_that_cannot_be_made_is_named(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=rf"^{tmp_path}/file/out could not be written: Not a directory"):
        to_hf(sources / "megatron", tmp_path / "file" / "out")


def test_an_error_of_the_program_stays_one(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(conversion, "with_dtypes", fail)
    with pytest.raises(AssertionError, match="a bug"):
        to_hf(sources / "megatron", tmp_path / "out")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("exists", [True, False])
def test_what_a_killed_conversion_left_is_no_obstacle(
    sources: Path, tmp_path: Path, convert: Callable[..., Result], exists: bool
) -> None:
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    left = temporary_of(out)
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    done = convert(sources / "megatron", "--out", out)
    assert done.exit_code == 0, done.output
    assert names_in(tmp_path) == ["out"]
    assert names_in(out) == ["config.json", "model.safetensors"]


def test_a_damaged_index_of_tensors_is_named(sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "hf", tmp_path / "hf"))
    _cut(folder / "model.safetensors.index.json")
    with pytest.raises(WeightsError, match=rf"^{folder}/model\.safetensors\.index\.json is no index of tensors"):
        to_megatron(folder, tmp_path / "out")


class TestARun:
    """A run's folder, given instead of a checkpoint."""

    @pytest.fixture
    def run(self, sources: Path, tmp_path: Path) -> Path:
        """Its newest checkpoint is that of step 12; others are being written, removed, or have no metadata."""
        checkpoints = tmp_path / "run" / "checkpoints"
        for step in (4, 12):
            shutil.copytree(sources / "megatron", checkpoints / f"step-{step:08d}")
        for name in ("step-00000016", ".step-00000020.tmp", ".step-00000024.removed", "step-00000028.old"):
            (checkpoints / name).mkdir()
        (checkpoints / "step-00000028.old" / ".metadata").touch()
        return tmp_path / "run"

    @pytest.mark.parametrize("named", ["", "checkpoints"])
    def test_stands_for_its_newest_checkpoint(
        self, run: Path, tmp_path: Path, convert: Callable[..., Result], named: str
    ) -> None:
        done = convert(run / named, "--out", tmp_path / "out")
        newest = run / "checkpoints" / "step-00000012"
        assert done.exit_code == 0, done.output
        assert f"converting {newest}, the newest checkpoint in {run / named}\n" in done.stderr
        done = convert(run / named, "--out", tmp_path / "again", "--json")
        assert json.loads(done.stdout)["source"] == str(newest)

    @pytest.mark.parametrize("removed", [1, 3])
    def test_one_that_is_removed_meanwhile_gives_way_to_the_newest_of_then(
        self, run: Path, tmp_path: Path, convert: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, removed: int
    ) -> None:
        places, original = list[Path](), conversion.to_hf
        shutil.copytree(run / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000002")

        def to_hf(source: Path, *rest: Any) -> Any:
            places.append(source)
            if len(places) <= removed:
                shutil.rmtree(source)
            return original(source, *rest)

        monkeypatch.setattr(conversion, "to_hf", to_hf)
        done = convert(run, "--out", tmp_path / "out")
        if removed == 1:
            assert done.exit_code == 0, done.output
            assert [place.name for place in places] == ["step-00000012", "step-00000004"]
            assert f"{places[0]} was removed by its run\n" in done.stderr
        else:
            assert "removed by its run while it was converted, and so were 2 before it" in str(done.exception)
            assert not (tmp_path / "out").exists()

    def test_without_a_checkpoint_is_refused(self, tmp_path: Path, convert: Callable[..., Result]) -> None:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        done = convert(tmp_path / "run", "--out", tmp_path / "out")
        assert "run holds neither *.safetensors nor a distributed checkpoint (.metadata), nor checkpoints of a" in str(
            done.exception
        )


class _Runs:
    """A pickle that leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self.path), "w")


def test_a_folder_of_others_with_safetensors_is_not_unpickled(
    sources: Path, tmp_path: Path, convert: Callable[..., Result]
) -> None:
    folder, ran = Path(shutil.copytree(sources / "hf", tmp_path / "hf")), tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs(ran)))
    shutil.copy(sources / "megatron" / "metadata.json", folder)
    assert not is_distributed(folder)
    assert is_distributed(sources / "megatron")
    result = convert(folder, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Megatron distributed checkpoint" in result.output
    assert not ran.exists()
    # The trainer decides with the same function.
    weights = "vlmdata.model.training.checkpoints.weights"
    learner: Any = SimpleNamespace(optimizer=SimpleNamespace(reload_model_params=lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{weights}._load_hf", lambda *_, place: ["hf"])
        patch.setattr(f"{weights}._other_settings", lambda *_: [])
        assert load_weights(folder, learner, None, None, None) == ["hf"]
    assert not ran.exists()


def test_a_model_to_be_like_gives_no_code_no_hidden_file_and_nothing_from_elsewhere(
    sources: Path, tmp_path: Path, convert: Callable[..., Result]
) -> None:
    cache = tmp_path / "models--a--b"
    like = Path(shutil.copytree(sources / "hf", cache / "snapshots" / "1"))
    (cache / "blobs").mkdir()
    (cache / "blobs" / "2").write_text("mine")
    (tmp_path / "secret").write_text("secret")
    for name, target in {"linked.json": "../../blobs/2", "notes.txt": tmp_path / "secret"}.items():
        (like / name).symlink_to(target)
    for name in (".env", "modeling.py", "README.md"):
        (like / name).write_text(name)
    result = convert(sources / "megatron", "--out", tmp_path / "out", "--like", like)
    assert result.exit_code == 0, result.output
    assert f"not copied from {like}, as code or a link to elsewhere: modeling.py, notes.txt" in result.output
    names = names_in(tmp_path / "out")
    assert not {".env", "modeling.py", "notes.txt"}.intersection(names)
    assert (tmp_path / "out" / "linked.json").read_text() == "mine"
    assert "README.md" in names
