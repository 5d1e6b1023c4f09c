"""Shards: plain tar files whose bytes depend on their samples alone and whose arrays lie aligned in place."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.schema import MEMBERS
from vlmdata.format.shard import BLOCK, Placement, ShardWriter, metadata_bytes

ALIGNMENT = 64
Arrays = dict[str, list[np.ndarray]]


def sample_arrays(length: int = 32, images: int = 1, seed: int = 0) -> Arrays:
    """Arrays of the right types with random content; the patches in one piece an image."""
    rng = np.random.default_rng(seed)
    patches = [rng.integers(0, 256, (4, FAMILY.patch_bytes), dtype=np.uint8) for _ in range(images)]
    return {
        "input_ids": [rng.integers(0, 1000, length, dtype=np.int32)],
        "loss_mask": [rng.integers(0, 2, length, dtype=np.uint8)],
        "position_ids": [rng.integers(0, 1000, (3, length), dtype=np.int32)],
        "image_grid_thw": [np.tile(np.array([[1, 2, 2]], np.int32), (images, 1))],
        "patches": patches or [np.zeros((0, FAMILY.patch_bytes), np.uint8)],
    }


def write_shard(path: Path, samples: list[tuple[str, dict[str, Any], Arrays]]) -> tuple[list[Placement], int, str]:
    with ShardWriter(path) as writer:
        placements = [writer.add(key, metadata, arrays) for key, metadata, arrays in samples]
        size, digest = writer.close()
    return placements, size, digest


def three_samples() -> list[tuple[str, dict[str, Any], Arrays]]:
    shapes = [(16, 0), (33, 1), (7, 3)]
    return [(f"{n:09d}", {"key": n}, sample_arrays(*shape, seed=n)) for n, shape in enumerate(shapes)]


def joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces)


@settings(max_examples=25, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 3)), min_size=1, max_size=4))
def test_every_array_lies_aligned_at_its_placement(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("shard") / "shard.tar"
    samples = [(f"{n:09d}", {"n": n}, sample_arrays(*shape, seed=n)) for n, shape in enumerate(shapes)]
    placements, _, _ = write_shard(path, samples)
    data = path.read_bytes()
    for (_, _, arrays), placement in zip(samples, placements, strict=True):
        for member in MEMBERS:
            whole = placement.arrays.get(member.name)
            offset = placement.patches_offset if whole is None else whole.offset
            expected = joined(arrays[member.name])
            found = np.frombuffer(data, member.dtype, expected.size, offset).reshape(expected.shape)
            assert offset % ALIGNMENT == 0
            np.testing.assert_array_equal(found, expected)


def test_samples_follow_each_other_without_gaps_on_tar_blocks(tmp_path):
    path = tmp_path / "shard.tar"
    placements, size, _ = write_shard(path, three_samples())
    starts = [placement.offset for placement in placements]
    ends = [placement.offset + placement.size for placement in placements]
    assert starts == [0, *ends[:-1]]
    assert all(end % BLOCK == 0 for end in ends)
    assert not any(path.read_bytes()[ends[-1] : size])


def test_checksum_is_xxh3_of_the_samples_own_bytes(tmp_path):
    path = tmp_path / "shard.tar"
    placements, _, _ = write_shard(path, three_samples())
    data = path.read_bytes()
    for place in placements:
        assert place.checksum == xxhash.xxh3_64_intdigest(data[place.offset : place.offset + place.size])


def test_metadata_json_lies_at_its_placement(tmp_path):
    path = tmp_path / "shard.tar"
    placements, _, _ = write_shard(path, [("000000000", {"b": "é", "a": [1, 2]}, sample_arrays())])
    place = placements[0]
    text = path.read_bytes()[place.json_offset : place.json_offset + place.json_size]
    assert json.loads(text) == {"a": [1, 2], "b": "é"}


def test_close_returns_size_and_hash_of_the_file(tmp_path):
    path = tmp_path / "shard.tar"
    _, size, digest = write_shard(path, three_samples())
    assert size == path.stat().st_size
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert size % tarfile.RECORDSIZE == 0


def test_python_tarfile_and_numpy_read_every_member(tmp_path):
    path = tmp_path / "shard.tar"
    samples = three_samples()
    write_shard(path, samples)
    with tarfile.open(path, "r:") as archive:
        expected_names = [f"{key}.{suffix}" for key, *_ in samples for suffix in ("json", *(m.suffix for m in MEMBERS))]
        assert archive.getnames() == expected_names
        for key, metadata, arrays in samples:
            assert json.load(archive.extractfile(f"{key}.json")) == metadata
            for member in MEMBERS:
                loaded = np.load(io.BytesIO(archive.extractfile(f"{key}.{member.suffix}").read()), allow_pickle=False)
                assert loaded.dtype == member.dtype
                np.testing.assert_array_equal(loaded, joined(arrays[member.name]))


def test_a_shard_without_samples_is_an_empty_archive(tmp_path):
    path = tmp_path / "shard.tar"
    write_shard(path, [])
    with tarfile.open(path, "r:") as archive:
        assert archive.getnames() == []


def test_headers_hold_no_time_user_or_host(tmp_path):
    path = tmp_path / "shard.tar"
    write_shard(path, three_samples())
    with tarfile.open(path, "r:") as archive:
        facts = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.type) for m in archive}
    assert facts == {(0, 0, 0, "", "", 0o644, tarfile.REGTYPE)}


def test_equal_samples_give_equal_bytes(tmp_path):
    first = write_shard(tmp_path / "a.tar", three_samples())
    second = write_shard(tmp_path / "b.tar", three_samples())
    assert first == second
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 12), max_size=5))
def test_pieces_are_joined_however_the_array_was_cut(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("pieces")
    whole = sample_arrays(images=3)
    whole["patches"] = [joined(whole["patches"])]
    pieces = {**whole, "patches": np.split(whole["patches"][0], sorted(cuts))}
    write_shard(folder / "a.tar", [("k", {}, whole)])
    write_shard(folder / "b.tar", [("k", {}, pieces)])
    assert (folder / "a.tar").read_bytes() == (folder / "b.tar").read_bytes()


def test_every_piece_has_its_own_checksum(tmp_path):
    arrays = sample_arrays(images=3)
    placements, _, _ = write_shard(tmp_path / "shard.tar", [("k", {}, arrays)])
    checksums = {name: [place.checksum] for name, place in placements[0].arrays.items()}
    checksums["patches"] = [item.checksum for item in placements[0].items]
    for member in MEMBERS:
        pieces = [piece.tobytes() for piece in arrays[member.name]]
        assert checksums[member.name] == [xxhash.xxh3_64_intdigest(piece) for piece in pieces]


class ShortWrites(io.RawIOBase):
    """A file that, like one on a nearly full disk, takes only a few bytes at a time."""

    def __init__(self, file: Any, most: int):
        self._file, self._most = file, most

    def write(self, data: Any) -> int:
        return self._file.write(data[: self._most])

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()


@pytest.mark.parametrize("most", [1, 100, 4096])
def test_short_writes_lose_nothing(tmp_path, most):
    expected = write_shard(tmp_path / "whole.tar", three_samples()[:1])
    with ShardWriter(tmp_path / "short.tar") as writer:
        writer._own._file = ShortWrites(writer._own._file, most)
        placement = writer.add(*three_samples()[0])
        size, digest = writer.close()
    assert ([placement], size, digest) == expected
    assert (tmp_path / "short.tar").read_bytes() == (tmp_path / "whole.tar").read_bytes()


def test_a_write_that_fails_is_an_error_and_the_file_is_closed(tmp_path):
    class Full(ShortWrites):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with ShardWriter(tmp_path / "shard.tar") as writer:
        full = writer._own._file = Full(writer._own._file, 1)
        with pytest.raises(OSError, match="No space"):
            writer.add(*three_samples()[0])
    assert full.closed


def test_metadata_is_canonical():
    assert metadata_bytes({"b": 1, "a": {"z": "ß", "y": None}}) == '{"a":{"y":null,"z":"ß"},"b":1}'.encode()


@pytest.mark.parametrize(
    ("member", "wrong"),
    [
        ("input_ids", np.zeros(32, np.int64)),
        ("loss_mask", np.zeros(32, np.bool_)),
        ("position_ids", np.zeros((32, 3), np.int32).T),
    ],
)
def test_a_piece_of_the_wrong_type_or_layout_is_refused(tmp_path, member, wrong):
    with ShardWriter(tmp_path / "shard.tar") as writer, pytest.raises(AssertionError, match=member):
        writer.add("k", {}, {**sample_arrays(), member: [wrong]})
