"""Files that a finished dataset lost: the same command makes them again, byte for byte, or says why it cannot."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import MIXED_ROWS_PER_SHARD, mixed_rows, write_jsonl
from tests.conftest import encoded_image, tree_bytes
from tests.verify.rewriting import edit_manifest_json, rotate_ids
from vlmdata import open_dataset
from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.cli.report import report_of
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.fault import remedies

CONFIG = PreprocessConfig(recipe="chat", image=ImageConfig(1024, 65_536), rows_per_shard=MIXED_ROWS_PER_SHARD)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the mixed rows and the dataset of four shards made of them, the second without a sample."""
    folder = tmp_path_factory.mktemp("made")
    rows = mixed_rows()
    (folder / "missing.png").write_bytes(encoded_image(seed=9))
    rows[0]["messages"][0]["content"][0]["image"] = "missing.png"
    rows[7] = {"messages": [{"role": "user", "content": "Nobody answers."}]}
    write_jsonl(folder / "mixed.jsonl", rows)
    preprocess_dataset(open_source(str(folder / "mixed.jsonl"), recipe="chat"), folder / "out", CONFIG)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it for a test to damage."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def again(folder: Path, **options: Any) -> RunResult:
    """Gives the same command once more."""
    return preprocess_dataset(
        open_source(str(folder / "mixed.jsonl"), recipe="chat"), folder / "out", CONFIG, **options
    )


def flip(path: Path, at: int = 5000) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int]] = {
    "index missing": (lambda out: (out / "index.parquet").unlink(), ("index.parquet",), 0),
    "index changed": (lambda out: flip(out / "index.parquet", 500), ("index.parquet",), 0),
    "index of another dataset": (lambda out: (out / "index.parquet").write_bytes(b"PAR1"), ("index.parquet",), 0),
    "tokenizer missing": (lambda out: shutil.rmtree(out / "tokenizer"), ("tokenizer",), 0),
    "tokenizer changed": (rotate_ids, ("tokenizer",), 0),
    "ledger missing": (lambda out: (out / "rejected.jsonl").unlink(), ("rejected.jsonl",), 0),
    "ledger changed": (lambda out: flip(out / "rejected.jsonl", 30), ("rejected.jsonl",), 0),
    "shard missing": (lambda out: (out / "shard-000002.tar").unlink(), ("shard-000002.tar",), 1),
    "shard without samples missing": (lambda out: (out / "shard-000001.tar").unlink(), ("shard-000001.tar",), 1),
    "shard cut": (lambda out: os.truncate(out / "shard-000000.tar", 7000), ("shard-000000.tar",), 1),
    "shard and index missing": (
        lambda out: [(out / name).unlink() for name in ("shard-000003.tar", "index.parquet")],
        ("shard-000003.tar", "index.parquet"),
        1,
    ),
    "shard changed and index missing": (
        lambda out: [flip(out / "shard-000000.tar"), (out / "index.parquet").unlink()],
        ("shard-000000.tar", "index.parquet"),
        1,
    ),
    "everything but the manifest": (
        lambda out: [
            shutil.rmtree(p) if p.is_dir() else p.unlink() for p in out.iterdir() if p.name != "manifest.json"
        ],
        (
            *(f"shard-00000{n}.tar" for n in range(4)),
            "index.parquet",
            "rejected.jsonl",
            "image_files.parquet",
            "tokenizer",
        ),
        4,
    ),
}


@pytest.mark.parametrize(("damage", "repaired", "shards"), DAMAGE.values(), ids=DAMAGE.keys())
def test_what_was_lost_is_made_again(
    made: Path, folder: Path, damage: Callable[[Path], object], repaired: tuple[str, ...], shards: int
) -> None:
    """Follows the words of ``vlmdata verify``: each step it names is taken, then all is as it was."""
    out = folder / "out"
    damage(out)
    steps = remedies(str(out), verify_dataset(out).faults)
    assert steps
    for step in steps[:-1]:
        assert step.startswith("Remove ")
        for name in step.removeprefix("Remove ").rstrip(".").split(", "):
            Path(name).unlink()
    assert "Run the dataset's `vlmdata preprocess` command again" in steps[-1]
    assert repaired[0] in steps[-1]
    result = again(folder)
    assert (result.repaired, result.made, result.kept) == (repaired, shards, 4 - shards)
    assert tree_bytes(out) == tree_bytes(made / "out")
    assert again(folder).repaired == ()


def test_a_changed_byte_in_a_shard_is_repaired_in_the_two_steps_that_verify_names(made: Path, folder: Path) -> None:
    shard = folder / "out" / "shard-000000.tar"
    flip(shard)
    assert again(folder).repaired == ()  # its size is right: only an audit reads whole shards
    remove, run = remedies(str(folder / "out"), verify_dataset(folder / "out").faults)
    assert remove == f"Remove {shard}."
    assert run.startswith("Run the dataset's `vlmdata preprocess` command")
    shard.unlink()
    assert again(folder).repaired == ("shard-000000.tar",)
    assert tree_bytes(folder / "out") == tree_bytes(made / "out")


def test_workers_make_it_again_too(made: Path, folder: Path) -> None:
    for name in ("shard-000000.tar", "shard-000002.tar", "index.parquet", "rejected.jsonl"):
        (folder / "out" / name).unlink()
    assert again(folder, workers=2).made == 2
    assert tree_bytes(folder / "out") == tree_bytes(made / "out")


def test_files_of_others_stay_and_do_not_block_a_repair(made: Path, folder: Path) -> None:
    out = folder / "out"
    mine = {"notes.txt": b"mine", ".DS_Store": b"x", "tokenizer/.DS_Store": b"y", "tokenizer/added_tokens.json": b"{}"}
    for name, content in mine.items():
        (out / name).write_bytes(content)
    for name in ("shard-000002.tar", "index.parquet", "tokenizer/tokenizer.json"):
        (out / name).unlink()
    assert again(folder).repaired == ("shard-000002.tar", "index.parquet", "tokenizer")
    assert tree_bytes(out) == tree_bytes(made / "out") | mine
    assert again(folder).repaired == ()


def test_overwrite_keeps_files_of_others(made: Path, folder: Path) -> None:
    out = folder / "out"
    (out / "photos").mkdir()
    (out / "photos" / "a.png").write_bytes(b"mine")
    again(folder, overwrite=True)
    assert tree_bytes(out) == tree_bytes(made / "out") | {"photos/a.png": b"mine"}


def test_an_unfinished_run_is_continued_beside_files_of_others(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "copy", ignore=shutil.ignore_patterns("out")))

    def stop(record: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(folder, watcher=Watcher(shard_done=stop))
    (folder / "out" / ".DS_Store").touch()
    assert again(folder).kept == 1
    assert tree_bytes(folder / "out") == tree_bytes(made / "out") | {".DS_Store": b""}


def test_only_shards_that_are_needed_are_made(folder: Path) -> None:
    seen: list[str] = []
    begun: list[tuple[int, ...]] = []
    (folder / "out" / "rejected.jsonl").unlink()
    watcher = Watcher(
        started=lambda rows, shards, kept, counters: begun.append((rows, shards, kept)),
        shard_done=lambda record: seen.append(record.info.name),
    )
    again(folder, watcher=watcher)
    assert begun == [(10, 4, 2)]
    assert seen == ["shard-000001.tar", "shard-000002.tar"]  # those with rejected rows


def test_a_shard_whose_images_changed_is_not_made_of_the_new_ones(folder: Path) -> None:
    for name in ("shard-000000.tar", "image_files.parquet"):  # with its list, changed files are found before
        (folder / "out" / name).unlink()
    before = tree_bytes(folder / "out")
    (folder / "missing.png").write_bytes(encoded_image(seed=10))
    with pytest.raises(DatasetFormatError, match=r"\.tar: recreated with sha256 .*image files"):
        again(folder)
    assert tree_bytes(folder / "out") == before


def test_an_index_of_other_bytes_is_not_taken(folder: Path) -> None:
    (folder / "out" / "index.parquet").unlink()
    edit_manifest_json(folder / "out", "index_sha256", "0" * 64)
    with pytest.raises(DatasetFormatError, match=r"index\.parquet: recreated .*the manifest says 0000.*pyarrow"):
        again(folder)
    assert not (folder / "out" / "index.parquet").exists()
    assert not (folder / "out" / ".progress").exists()


def test_a_repair_that_was_killed_is_begun_anew(made: Path, folder: Path) -> None:
    (folder / "out" / "shard-000002.tar").unlink()
    leftover = folder / "out" / ".progress" / "repair"
    (leftover / ".progress").mkdir(parents=True)
    (leftover / "shard-000002.tar").write_bytes(b"half")
    (leftover / ".progress" / "shard-000002.json").write_text("{}")
    assert again(folder).repaired == ("shard-000002.tar",)
    assert tree_bytes(folder / "out") == tree_bytes(made / "out")


def test_the_report_names_what_was_made_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    (folder / "out" / "index.parquet").unlink()
    report = report_of(open_store(folder / "out"), again(folder), 1.0, 1.0)
    report.print(Console(width=200))
    assert "recreated and equal to the manifest: index.parquet" in capsys.readouterr().out
    assert json.loads(json.dumps(report.to_json()))["repaired"] == ["index.parquet"]


def test_messages_of_readers_lead_to_the_remedy(folder: Path) -> None:
    out = folder / "out"
    os.truncate(out / "shard-000000.tar", 7000)
    with pytest.raises(DatasetFormatError, match="Run `vlmdata verify` on the dataset to see how to repair it"):
        open_dataset(out)[0]
    (out / "index.parquet").unlink()
    with pytest.raises(DatasetFormatError, match="Run the same `vlmdata preprocess` command again"):
        open_dataset(out)


def test_faults_that_no_repair_fixes_name_another_remedy(folder: Path) -> None:
    out = folder / "out"
    edit_manifest_json(out, "config.options.max_length", 1)
    (step,) = remedies(str(out), verify_dataset(out).faults)
    assert step.startswith(f"Restore {out}/manifest.json from a copy")
    assert remedies(str(out), []) == []
    (out / "shard-000009.tar").write_bytes(b"x")
    assert f"Remove {out}/shard-000009.tar." in remedies(str(out), verify_dataset(out).faults)
    assert Manifest.read(out).shards
