"""Tars of samples: the columns that members give, against plain WebDataset; what is damaged or ambiguous is refused."""

from __future__ import annotations

import io
import json
import pickle
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import build_dataset, encoded_image
from vlmdata.errors import SourceError
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.sources import counting
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source
from vlmdata.reasons import Reason
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset


def write_tar(path: Path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    source = open_source(str(path))
    return [dict(source.row(number).values) for number in source.numbers]


def row(tmp_path: Path, **members: bytes) -> dict[str, Any]:
    """The columns of the sample ``7`` whose members have these extensions."""
    named = {f"7.{extension.replace('__', '.')}": data for extension, data in members.items()}
    (only,) = rows(write_tar(tmp_path / "rows.tar", named))
    assert only.pop("__key__") == "7"
    return only


def rejected(tmp_path: Path, **members: bytes) -> str:
    with pytest.raises(RowRejected) as rejection:
        row(tmp_path, **members)
    assert rejection.value.reason is Reason.MALFORMED_ROW
    return rejection.value.message


def image(name: str, data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": name}


class TestColumns:
    def test_an_image_and_its_text(self, tmp_path):
        assert row(tmp_path, jpg=b"pixels", txt="Grüße".encode()) == {
            "image": image("7.jpg", b"pixels"),
            "txt": "Grüße",
        }

    def test_the_keys_of_an_object_are_columns(self, tmp_path):
        assert row(tmp_path, PNG=b"p", json=b'{"messages": [1], "id": null}') == {
            "image": image("7.PNG", b"p"),
            "messages": [1],
            "id": None,
        }

    def test_several_images_are_in_natural_order(self, tmp_path):
        found = row(tmp_path, **{"10__jpg": b"c", "2__png": b"b", "jpg": b"a", "caption": b"x"})
        assert [each["bytes"] for each in found["images"]] == [b"b", b"c", b"a"]
        assert "image" not in found

    def test_the_json_may_say_the_order_of_the_images(self, tmp_path):
        members = {"a__jpg": b"a", "b__jpg": b"b", "json": b'{"images": ["b/7.b.jpg", "7.a.jpg"]}'}
        assert [each["bytes"] for each in row(tmp_path, **members)["images"]] == [b"b", b"a"]

    def test_the_json_may_name_its_one_image_as_it_was_called_before(self, tmp_path):
        assert row(tmp_path, jpg=b"a", json=b'{"image": "coco/000.jpg"}') == {"image": image("7.jpg", b"a")}
        assert row(tmp_path, jpg=b"a", json=b'{"image": null}') == {"image": image("7.jpg", b"a")}

    @pytest.mark.parametrize(
        "named", ['"images": ["7.a.jpg"]', '"images": ["7.a.jpg", "x.jpg"]', '"images": [1, 2]', '"image": {"x": 1}']
    )
    def test_a_json_that_names_other_images_is_a_bad_row(self, tmp_path, named):
        members = {"a__jpg": b"a", "b__jpg": b"b", "json": f"{{{named}}}".encode()}
        assert rejected(tmp_path, **members).startswith("sample 7: image")

    def test_other_members(self, tmp_path):
        members = {"box__json": b"[1, 2]", "cls": b"3", "npy": b"\x93", "mp4": b"film", "wav": b"sound", "q__txt": b"?"}
        assert row(tmp_path, **members) == {
            "box": [1, 2],
            "cls": "3",
            "npy": b"\x93",
            "video": b"film",
            "audio": b"sound",
            "q": "?",
        }

    def test_two_members_may_say_the_same_but_not_two_things(self, tmp_path):
        assert row(tmp_path, json=b'{"caption": "x"}', caption=b"x") == {"caption": "x"}
        assert rejected(tmp_path, json=b'{"caption": "x"}', caption=b"y") == (
            "sample 7: 7.caption gives caption a second value: y"
        )

    @pytest.mark.parametrize(
        ("members", "message"), [({"json": b"{"}, "7.json is not JSON"), ({"txt": b"\xff"}, "7.txt is not UTF-8")]
    )
    def test_a_member_that_cannot_be_read_costs_its_row(self, tmp_path, members, message):
        assert message in rejected(tmp_path, **members)

    def test_files_that_are_no_members_are_passed_over(self, tmp_path):
        names = ["README", "._000.jpg", "dir/", "a/000.txt"]
        assert rows(write_tar(tmp_path / "rows.tar", dict.fromkeys(names, b""))) == [{"__key__": "a/000", "txt": ""}]


def test_a_link_costs_its_row(tmp_path):
    path = write_tar(tmp_path / "rows.tar", {"0.jpg": b"a", "0.txt": b"x"})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("1.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "0.jpg"
        tar.addfile(link)
    source = open_source(str(path))
    assert source.num_rows == 2
    with pytest.raises(RowRejected, match=r"sample 1: 1\.jpg is a link; make the tar with --dereference"):
        source.row(1)


NAMES = st.from_regex(r"(\./)?([ab]/)?[0-3]{1,2}\.((x\.)?(jpg|txt)|JSON)", fullmatch=True)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NAMES, min_size=1, max_size=12, unique_by=lambda name: name.lower()), st.booleans())
def test_samples_are_those_of_webdataset(tmp_path, names, long):
    names = sorted(names, key=lambda name: (name.rpartition("/")[0], name.rpartition("/")[2].partition(".")))
    if long:  # names of more than 100 characters stand in members of their own
        names = [f"{'d' * 120}/{name}" for name in names]
    path = write_tar(tmp_path / "rows.tar", [(name, b"{}" if "JSON" in name else b"t") for name in names])
    ours = rows(path)
    theirs = list(wds.WebDataset(str(path), shardshuffle=False))
    assert [each["__key__"] for each in ours] == [each["__key__"] for each in theirs]


def sparse(name: str, kind: str, data: bytes, hole: int) -> bytes:
    """The header and content of a file that begins with data and goes on with a hole."""
    info = tarfile.TarInfo(name)
    if kind == "gnu":
        info.type, info.size = tarfile.GNUTYPE_SPARSE, len(data)
        header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
        header[386:410] = f"{0:011o}\0{len(data):011o}\0".encode()
        header[483:495] = tarfile.itn(len(data) + hole, 12, tarfile.GNU_FORMAT)
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
        stored = data
        content = bytes(header)
    else:
        size = str(len(data) + hole)
        info.name = f"GNUSparseFile.0/{name}"
        pax = {"GNU.sparse.name": name, "GNU.sparse.size": size}
        stored = data
        match kind:
            case "pax 0.0":
                pax |= {"GNU.sparse.numblocks": "1", "GNU.sparse.offset": "0", "GNU.sparse.numbytes": str(len(data))}
            case "pax 0.1":
                pax |= {"GNU.sparse.numblocks": "1", "GNU.sparse.map": f"0,{len(data)}"}
            case _:
                pax = {"GNU.sparse.name": name, "GNU.sparse.realsize": size}
                pax |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
                stored = f"1\n0\n{len(data)}\n".encode().ljust(512, b"\0") + data
        info.size, info.pax_headers = len(stored), pax
        content = info.tobuf(tarfile.PAX_FORMAT)
    return content + stored.ljust(-(-len(stored) // 512) * 512, b"\0")


@pytest.mark.parametrize("kind", ["gnu", "pax 0.0", "pax 0.1", "pax 1.0"])
@pytest.mark.parametrize("hole", [3000, 900 << 30])
def test_a_sparse_member_costs_its_row(tmp_path, kind, hole):
    ends = write_tar(tmp_path / "rows.tar", [("0.txt", b"x"), ("2.txt", b"y")]).read_bytes()
    middle = sparse("1.png", kind, b"data", hole)
    (tmp_path / "rows.tar").write_bytes(ends[:1024] + middle + ends[1024:])
    with tarfile.open(tmp_path / "rows.tar") as tar:
        assert [(member.name, member.issparse(), member.size) for member in tar.getmembers()][1] == (
            "1.png", True, 4 + hole,
        )  # fmt: skip
    source = open_source(str(tmp_path / "rows.tar"))
    assert [source.row(number).values["txt"] for number in (0, 2)] == ["x", "y"]
    with pytest.raises(RowRejected, match=r"sample 1: 1.png is stored as a sparse file; make the tar without --sparse"):
        source.row(1)


def test_a_damaged_map_of_a_sparse_member_is_an_error_of_the_tar(tmp_path):
    path = write_tar(tmp_path / "rows.tar", [])
    path.write_bytes(sparse("1.png", "pax 1.0", b"data", 9).replace(b"1\n0\n4\n", b"1\n0\nx\n") + path.read_bytes())
    with pytest.raises(SourceError, match=r"rows.tar: the tar is damaged or cut off: invalid literal"):
        open_source(str(path))


class TestPlaces:
    def test_any_order_and_several_tars(self, tmp_path, monkeypatch):
        monkeypatch.setattr(counting, "_BLOCK_BYTES", 4096)
        for shard in range(3):
            members = {}
            for n in range(40):
                key = f"{shard}/{n:03d}"
                members |= {f"{key}.jpg": key.encode() * n, f"{key}.json": json.dumps({"n": n, "s": shard}).encode()}
            write_tar(tmp_path / f"{shard}.tar", members)
        source: Source = pickle.loads(pickle.dumps(open_source(str(tmp_path))))
        assert source.num_rows == 120
        order = list(range(120)) + random.Random(0).choices(range(120), k=100)
        for number in order:
            shard, n = divmod(number, 40)
            assert source.row(number).values == {
                "__key__": f"{shard}/{n:03d}",
                "n": n,
                "s": shard,
                "image": image(f"{shard}/{n:03d}.jpg", f"{shard}/{n:03d}".encode() * n),
            }


MEMBERS = {"0.jpg": b"a" * 600, "0.txt": b"x", "1.jpg": b"b", "1.txt": b"y"}


class TestDamage:
    def refused(self, path: Path, message: str) -> None:
        with pytest.raises(SourceError, match=message) as error:
            open_source(str(path))
        assert str(error.value).startswith(f"SOURCE {path}: ")

    @pytest.mark.parametrize("size", [10, 512, 700, 1536, 2000, 2048, 2560, 3072, 3584, 4096, 4608])
    def test_a_tar_that_is_cut_off(self, tmp_path, size):
        path = write_tar(tmp_path / "rows.tar", MEMBERS)
        path.write_bytes(path.read_bytes()[:size])
        self.refused(path, "the tar is damaged or cut off")

    def test_a_damaged_header(self, tmp_path):
        path = write_tar(tmp_path / "rows.tar", MEMBERS)
        data = bytearray(path.read_bytes())
        data[1536 + 150] ^= 1  # the checksum of the second header
        path.write_bytes(data)
        self.refused(path, "the tar is damaged or cut off: at byte 1536 there is no header")

    def test_no_tar_at_all(self, tmp_path):
        (tmp_path / "rows.tar").write_bytes(b"nonsense" * 1000)
        self.refused(tmp_path / "rows.tar", "the tar is damaged or cut off")

    def test_joined_tars(self, tmp_path):
        path = write_tar(tmp_path / "rows.tar", MEMBERS)
        path.write_bytes(path.read_bytes() * 2)
        self.refused(path, r"there is data after the end mark at byte 4608. Tars that were joined")

    def test_members_of_a_sample_apart_from_each_other(self, tmp_path):
        path = write_tar(tmp_path / "rows.tar", {"0.jpg": b"a", "1.jpg": b"b", "0.txt": b"x", "1.txt": b"y"})
        self.refused(path, "0.txt is apart from the other members of sample 0.*--sort=name")

    def test_no_samples(self, tmp_path):
        self.refused(write_tar(tmp_path / "rows.tar", {"README": b"x"}), "it has no rows")


def test_chat_rows_with_images_become_a_dataset(tmp_path):
    members = {}
    for n in range(5):
        messages = [
            {"role": "user", "content": "<image>What is this?"},
            {"role": "assistant", "content": f"Noise {n}."},
        ]
        members |= {f"{n}.png": encoded_image(seed=n), f"{n}.json": json.dumps({"messages": messages}).encode()}
    members["4.json"] = b"{"
    source = write_tar(tmp_path / "chat-000.tar", members)
    dataset = open_dataset(build_dataset(source, tmp_path / "out", recipe="chat", rows_per_shard=2))
    assert dataset.manifest.totals.items == len(dataset) == 4
    assert dict(dataset.manifest.rejects) == {"malformed_row": 1}
    assert verify_dataset(tmp_path / "out").faults == []
