"""``vlmdata verify``: exit codes, lines for people, JSON for programs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.preprocess.command_line import run


@pytest.fixture
def verify(vlmdata):
    """Runs ``vlmdata verify`` in this process."""
    return partial(vlmdata, "verify")


def damage(directory: Path) -> None:
    path = directory / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"000000001.patches")] ^= 1
    path.write_bytes(data)


def test_a_sound_dataset_ends_with_0_and_one_line(verify, sound_dataset):
    code, out, _ = verify(sound_dataset, "-j", "1")
    assert code == 0
    assert out.startswith("sound: 6 samples, 4 shards, ")
    assert out.count("\n") == 1


def test_faults_end_with_1_and_a_line_each(verify, damaged):
    damage(damaged)
    code, out, _ = verify(damaged, "-j", "1")
    *faults, verdict, remove, run = out.splitlines()
    assert code == 1
    assert remove == f"next: Remove {damaged}/shard-000000.tar."
    assert run.startswith("next: Run the dataset's `vlmdata preprocess` command")
    assert len(faults) == 3
    assert verdict.startswith("3 faults: ")
    assert any(line.startswith("shard-000000.tar row 1 key 000000001: checksum: ") for line in faults)


def test_json_tells_every_fault(verify, damaged):
    damage(damaged)
    code, out, _ = verify(damaged, "--json", "-j", "1")
    result = json.loads(out)
    assert code == 1
    assert (result["sound"], result["samples"], result["shards"]) == (False, 6, 4)
    assert len(result["remedies"]) == 2
    fault = next(fault for fault in result["faults"] if fault["check"] == "checksum")
    assert (fault["file"], fault["row"], fault["key"]) == ("shard-000000.tar", 1, "000000001")


def test_json_of_a_sound_dataset(verify, sound_dataset):
    code, out, _ = verify(sound_dataset, "--json", "-j", "1")
    assert code == 0
    assert json.loads(out)["faults"] == []
    assert json.loads(out)["sound"] is True


def test_foreign_files_are_named_and_the_dataset_is_sound(verify, damaged):
    for number in range(7):
        (damaged / f"notes{number}.txt").touch()
    code, out, _ = verify(damaged, "-j", "1")
    foreign, verdict = out.splitlines()
    assert (code, verdict.partition(":")[0]) == (0, "sound")
    assert foreign == (
        "not part of the dataset, and not checked: "
        "notes0.txt, notes1.txt, notes2.txt, notes3.txt, notes4.txt and 2 more"
    )
    code, out, _ = verify(damaged, "--json", "-j", "1")
    assert json.loads(out)["foreign"] == [f"notes{number}.txt" for number in range(7)]


def test_added_files_at_a_url_are_found(verify, sound_dataset, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path))
    url = f"memory://{tmp_path}/added"
    system, root = fsspec.core.url_to_fs(url)
    system.put(str(sound_dataset), root, recursive=True)
    system.pipe_file(f"{root}/notes.txt", b"mine")
    assert verify(url)[0] == 0
    system.pipe_file(f"{root}/tokenizer/added_tokens.json", b"{}")
    code, out, _ = verify(url)
    stray, foreign, *_ = out.splitlines()
    assert (code, stray.partition(": a file")[0]) == (1, "tokenizer/added_tokens.json: stray")
    assert foreign.endswith(": notes.txt")


def test_many_faults_are_cut_short_for_people_and_not_for_programs(verify, damaged):
    for number in range(100, 200):
        (damaged / f"shard-{number:06d}.tar").touch()
    _, out, _ = verify(damaged, "-j", "1")
    assert out.count(": stray: ") == 50
    assert "… and 50 more; --json lists them all" in out
    _, out, _ = verify(damaged, "--json", "-j", "1")
    assert len(json.loads(out)["faults"]) == 100


def test_what_is_no_dataset_ends_with_2_and_one_message(verify, tmp_path):
    code, out, err = verify(tmp_path)
    assert code == 2
    assert out == ""
    assert "has no manifest.json, so it is not a vlmdata dataset" in err


def test_a_folder_of_datasets_names_them(verify, damaged, tmp_path):
    damaged.rename(tmp_path / "train")
    code, _, err = verify(tmp_path)
    assert (code, err.rstrip().endswith("Give one of the datasets in it: train")) == (2, True), err


def test_the_command_in_a_process_of_its_own(damaged):
    damage(damaged)
    done = run("verify", damaged, "--json", "-j", 1)
    assert done.returncode == 1, done.stderr
    assert {fault["check"] for fault in json.loads(done.stdout)["faults"]} == {"sha256", "tar", "checksum"}
