"""A dataset under any codec holds the pixels that it holds raw, from preprocessing to the batch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Buffer, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import vlmdata
from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset, tree_bytes
from tests.format.as_earlier import as_earlier
from tests.loader.helpers import assert_same, stream
from tests.loader.rows import chat_rows
from tests.preprocess.extend_pages import write_named_file
from tests.verify.rewriting import rewrite_manifest, sha256
from vlmdata.batch import PackedBatch
from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.families import Family, family
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, LEDGER_NAME
from vlmdata.media import versions
from vlmdata.media.codecs import IMAGE, REGISTRY, VIDEO, Item, ItemShape, Unsuitable, codec, decode_item
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, VideoConfig
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.reasons import Reason
from vlmdata.verify.dataset import verify_dataset

NAME = "shuffled-zlib"
#: Columns of the index that say how items are stored.
STORAGE = [
    "item_kinds",
    "item_copies",
    "item_codecs",
    "item_offsets",
    "item_bytes",
    "item_checksums",
    "pixel_checksums",
]
#: Codecs of the pages under docs/extend: the page and the file.
ON_PAGES = {"zlib": ("codec.md", "zlib_patches.py")}
ROWS = 24
OPTIONS = {"recipe": "chat", "image": ImageConfig(1024, 16384), "rows_per_shard": 6}


@pytest.fixture(scope="module", autouse=True)
def _registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, NAME, "tests.media.shuffled_zlib:CODEC")
        patch.syspath_prepend(folder)
        for name, (page, file) in ON_PAGES.items():
            patch.setitem(REGISTRY, name, f"{write_named_file(page, file, folder)}:CODEC")
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("codecs") / "chat.jsonl", chat_rows(ROWS))


@pytest.fixture(scope="module")
def raw(source: Path) -> Path:
    return build_dataset(source, source.with_name("raw"), **OPTIONS)


@pytest.fixture(scope="module")
def encoded(source: Path, _registered: None) -> Path:
    return build_dataset(source, source.with_name("encoded"), pixels=NAME, **OPTIONS)


@pytest.fixture
def damaged(encoded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(encoded, tmp_path / "dataset"))


def with_image(directory: Path) -> tuple[str, Path, int, int]:
    """Of a sample with two images: its key, its shard, and the first byte and bytes of its second image."""
    dataset = vlmdata.open_dataset(directory)
    i = int(np.flatnonzero(dataset.index.item_counts == 2)[0])
    item = dataset.index.row(i).items[1]
    return dataset.index.key(i), dataset.shard_path(int(dataset.index.shard[i])), item.offset, item.bytes


def change_item(directory: Path, column: str, value: object) -> str:
    """Changes what the index says of that image; returns the sample's key."""
    key, table = with_image(directory)[0], pq.read_table(directory / INDEX_NAME)
    lists = table.column(column).to_pylist()
    lists[table.column("key").to_pylist().index(key)][1] = value
    field = table.schema.field(column)
    changed = table.set_column(table.column_names.index(column), field, pa.array(lists, field.type))
    pq.write_table(changed, directory / INDEX_NAME)
    rewrite_manifest(directory, index_sha256=sha256(directory / INDEX_NAME))
    return key


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


@st.composite
def items(draw: st.DrawFn) -> Item:
    """Frames of some kind: flat, grey, of smooth columns, or noise; in families of both patch sizes."""
    made = draw(st.sampled_from([family("qwen3_5"), family("qwen2_5_vl")]))
    rows, columns, channels = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 3]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    frames, copies = draw(st.sampled_from([(1, 1), (1, 1), (3, 1), (2, made.temporal_patch_size)]))
    shape = (channels, frames * copies * rows * made.factor, columns * made.factor)
    steps = random.integers(0, draw(st.sampled_from([1, 2, 256])), shape, np.uint8)
    picture = np.add.accumulate(steps, axis=1, dtype=np.uint8) if draw(st.booleans()) else steps
    if draw(st.booleans()):  # a still: all frames are the first, but for the last row
        still = np.tile(picture[:, : shape[1] // (frames * copies)], (1, frames * copies, 1))
        still[:, -1] = picture[:, -1]
        picture = still
    patches = made.patchify(np.broadcast_to(picture, (3, *shape[1:])))
    if copies > 1:  # the copies of a patch are adjacent
        patches = patches.reshape(frames, copies, -1, made.patch_bytes).swapaxes(1, 2).reshape(patches.shape)
    kind = IMAGE if frames * copies == 1 else VIDEO
    item = Item(patches, ItemShape(kind, (frames, 2 * rows, 2 * columns), copies), made)
    np.testing.assert_array_equal(item.picture(), np.broadcast_to(picture, (3, *shape[1:])))
    return item


@pytest.mark.parametrize("name", [*(name for name in REGISTRY if not codec(name).needs_file), NAME, *ON_PAGES])
@given(item=items())
def test_every_codec_gives_back_the_patches(name: str, item: Item) -> None:
    stored = bytes(codec(name).encode(item))
    assert bytes(codec(name).encode(item)) == stored
    out = np.full_like(item.patches, 7)
    codec(name).decode(stored, item.shape, item.family, out)
    np.testing.assert_array_equal(out, item.patches)
    with pytest.raises(DatasetFormatError, match=f"image 0: its .* bytes do not decode with codec {name}"):
        decode_item(name, stored[:-1], item.shape, item.family, out, "image 0")


class TestOfADataset:
    def test_samples_are_those_stored_raw(self, raw: Path, encoded: Path) -> None:
        plain, dataset = vlmdata.open_dataset(raw), vlmdata.open_dataset(encoded)
        assert set(plain.index.item_counts.tolist()) == {0, 1, 2}
        for one, other in zip(plain, dataset, strict=True):
            assert (one.key, one.length) == (other.key, other.length)
            for name, array in one.arrays().items():
                np.testing.assert_array_equal(getattr(other, name), array)
            assert not other.patches.flags.writeable

    def test_it_is_sound_and_says_what_it_uses(self, raw: Path, encoded: Path) -> None:
        assert verify_dataset(encoded).faults == []
        assert Manifest.read(raw).features == ("images", "patches-raw")
        manifest = Manifest.read(encoded)
        assert manifest.features == ("images", f"patches-{NAME}")
        assert manifest.config["options"]["pixels"] == NAME

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_batches_are_those_of_raw_pixels(self, raw: Path, encoded: Path, workers: int, ranks: int) -> None:
        """Whole packs, and each context-parallel rank's slice."""
        for rank in range(ranks):
            options = {"context_parallel": ranks, "context_parallel_rank": rank} if ranks > 1 else {}
            assert_same(batches(raw, **options), batches(encoded, num_workers=workers, **options))

    def test_a_rank_reads_only_its_items(self, encoded: Path) -> None:
        index = vlmdata.open_dataset(encoded).index
        stored = []
        for rank in range(2):
            bytes_read = []
            for parts in (("tokens", "labels"), ("tokens", "labels", "pixels")):
                with stream(encoded, parts=parts, context_parallel=2, context_parallel_rank=rank) as loader:
                    list(loader)
                    bytes_read.append(loader.stats.bytes_read)
            stored.append(bytes_read[1] - bytes_read[0])
        assert min(stored) > 0
        assert sum(stored) == int(index.item_bytes.sum())

    def test_a_blend_of_both_is_read(self, raw: Path, encoded: Path) -> None:
        found = {False: 0, True: 0}
        opened = vlmdata.open_dataset(raw)
        with stream([raw, encoded]) as loader:
            for batch in loader:
                assert batch.patches is not None
                expected = [opened[0].patches[:0], *(opened.sample(key).patches for key in batch.sample_keys)]
                np.testing.assert_array_equal(batch.patches.numpy(), np.concatenate(expected))
                for origin in batch.origins:
                    found[bool(origin.dataset)] += 1
        assert found[False] == found[True] == len(opened)

    def test_one_image_is_found_by_the_index_alone(self, encoded: Path) -> None:
        """As a reader in another language would."""
        row = next(r for r in pq.read_table(encoded / INDEX_NAME).to_pylist() if len(r["item_grids"]) == 2)
        assert row["item_kinds"] == ["image", "image"]
        assert row["item_codecs"] == [NAME, NAME]
        assert row["patches_offset"] == -1
        checksums = row["pixel_checksums"]
        data = (encoded / f"shard-{row['shard']:06d}.tar").read_bytes()
        begin, size = row["item_offsets"][1], row["item_bytes"][1]
        t, h, w = row["item_grids"][1]
        out = np.empty((t * h * w, FAMILY.patch_bytes), np.uint8)
        codec(NAME).decode(data[begin : begin + size], ItemShape(IMAGE, (t, h, w)), FAMILY, out)
        stored = vlmdata.open_dataset(encoded).sample(row["key"]).patches
        np.testing.assert_array_equal(out, stored[-len(out) :])
        assert xxhash.xxh3_64_intdigest(out) == checksums[1]

    def test_plain_webdataset_opens_the_shards(self, encoded: Path) -> None:
        urls = sorted(map(str, encoded.glob("shard-*.tar")))
        counts = []
        for sample in wds.WebDataset(urls, shardshuffle=False):
            described = json.loads(sample["json"]).get("items", [])
            assert ("items.bin" in sample) == bool(described)
            assert ("patches.npy" in sample) == (not described)
            assert sum(item["bytes"] for item in described) == len(sample.get("items.bin", b""))
            counts.append(len(described))
        assert counts == vlmdata.open_dataset(encoded).index.item_counts.tolist()

    def test_a_lost_index_and_a_lost_shard_are_made_again_as_they_were(self, damaged: Path, source: Path) -> None:
        whole = tree_bytes(damaged)
        (damaged / INDEX_NAME).unlink()
        build_dataset(source, damaged, pixels=NAME, **OPTIONS)
        assert tree_bytes(damaged) == whole
        (damaged / "shard-000001.tar").unlink()
        build_dataset(source, damaged, pixels=NAME, **OPTIONS)
        assert tree_bytes(damaged) == whole


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_index_of_an_earlier_schema_is_completed(raw: Path, tmp_path: Path, version: str) -> None:
    directory, dataset = Path(shutil.copytree(raw, tmp_path / "dataset")), vlmdata.open_dataset(raw)
    as_earlier(directory, version)
    completed = vlmdata.open_dataset(directory)
    assert completed.index.table.equals(dataset.index.table)
    assert not verify_dataset(directory).faults
    assert_same(batches(directory), batches(raw))


class TestDamage:
    def test_a_flipped_byte_is_found(self, damaged: Path) -> None:
        key, shard, offset, size = with_image(damaged)
        flip(shard, offset + size // 2)
        assert {(fault.check, fault.key) for fault in verify_dataset(damaged).faults} >= {("checksum", key)}
        with pytest.raises(DatasetFormatError, match=f"key {key} patches of image 1: the data changed"):
            batches(damaged)

    def test_bytes_that_do_not_decode_name_the_image(self, damaged: Path) -> None:
        key, shard, offset, _ = with_image(damaged)
        flip(shard, offset)
        dataset = vlmdata.open_dataset(damaged)
        with pytest.raises(DatasetFormatError, match=f"key {key} image 1: its .* bytes do not decode with codec"):
            dataset.as_stored(dataset.index.position_of(key))
        with pytest.raises(DatasetFormatError, match=f"key {key} patches of image 1: its .* bytes do not decode"):
            batches(damaged, verify="off")

    def test_other_pixels_are_found_where_pixels_are_checked(
        self, encoded: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As another version of a decoder might give them; the stored bytes are sound."""
        decode = type(codec(NAME)).decode

        def one_brighter(self: object, stored: Buffer, shape: ItemShape, family: Family, out: Any) -> None:
            decode(self, stored, shape, family, out)
            out[-1, -1] ^= 1

        whole = batches(encoded)
        monkeypatch.setattr(type(codec(NAME)), "decode", one_brighter)
        monkeypatch.setattr(versions, "pixel_libraries", lambda: {"pillow": "0.1"})
        pillow = Manifest.read(encoded).pixel_libraries["pillow"]
        other = rf"decodes to other pixels .* made with pillow {pillow} \(here 0.1\), "
        for verify in ("pixels", True):
            with pytest.raises(DatasetFormatError, match=f"shard-00000.*: row .* patches of image .: {other}"):
                batches(encoded, verify=verify)
        with pytest.raises(DatasetFormatError, match=other):
            list(vlmdata.open_dataset(encoded))
        for verify in ("stored", "off", False):
            assert [batch.sample_keys for batch in batches(encoded, verify=verify)] == [b.sample_keys for b in whole]
        assert {fault.check for fault in verify_dataset(encoded).faults} == {"items"}
        assert verify_dataset(encoded, pixels=False).faults == []

    def test_stored_bytes_are_checked_without_decoding(self, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(codec(NAME)), "decode", None)
        assert verify_dataset(damaged, pixels=False).faults == []
        key, shard, offset, size = with_image(damaged)
        flip(shard, offset + size // 2)
        assert ("checksum", key) in {(fault.check, fault.key) for fault in verify_dataset(damaged, pixels=False).faults}

    @pytest.mark.parametrize("column", STORAGE)
    def test_an_index_that_says_otherwise_is_found(self, damaged: Path, column: str) -> None:
        key = change_item(damaged, column, {"item_kinds": "video", "item_codecs": "raw"}.get(column, 17))
        faults = {(fault.check, fault.key) for fault in verify_dataset(damaged).faults}
        assert {("items", key), ("metadata", key)} & faults

    @pytest.mark.parametrize("column", STORAGE)
    def test_an_index_of_raw_pixels_that_says_otherwise_is_found(self, raw: Path, tmp_path: Path, column: str) -> None:
        copy = Path(shutil.copytree(raw, tmp_path / "dataset"))
        key = change_item(copy, column, {"item_kinds": "video", "item_codecs": NAME}.get(column, 17))
        check = "shape" if column in ("item_kinds", "item_copies") else "index"
        assert (check, key) in {(fault.check, fault.key) for fault in verify_dataset(copy).faults}

    def test_a_codec_that_this_vlmdata_lacks_is_named(self, encoded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(REGISTRY, NAME)
        with pytest.raises(DatasetFormatError, match=f"needs features this vlmdata lacks: patches-{NAME}") as caught:
            vlmdata.open_dataset(encoded)
        assert f"Codec {NAME} is neither built in nor installed here. " in str(caught.value)
        assert "Upgrade" not in str(caught.value)

    def test_a_codec_that_cannot_encode_is_named_with_the_sample(
        self, source: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def encode(self: object, item: Item) -> Buffer:
            raise OSError(f"no codes for {item.shape.grid}")

        monkeypatch.setattr(type(codec(NAME)), "encode", encode)
        found = rf"--pixels {NAME}: the codec cannot encode key 0000000\d\d, %s \(\d+x\d+ patches\): no codes for"
        with pytest.raises(UsageError, match=found % r"images\[0\]"):
            build_dataset(source, tmp_path / "out", pixels=NAME, **OPTIONS)
        with pytest.raises(UsageError, match=found % "image 0"):
            recode_dataset(raw, tmp_path / "recoded", NAME)

    def test_an_item_that_a_codec_does_not_store_is_rejected_and_the_run_goes_on(
        self, source: Path, raw: Path, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encode = type(codec(NAME)).encode

        def only_wide(self: object, item: Item) -> Buffer:
            if item.shape.grid[1] > item.shape.grid[2]:
                raise Unsuitable(f"{item.shape.grid[1]} patches high, at most {item.shape.grid[2]}")
            return encode(self, item)

        monkeypatch.setattr(type(codec(NAME)), "encode", only_wide)
        made = vlmdata.open_dataset(build_dataset(source, tmp_path / "out", pixels=NAME, **OPTIONS))
        before = vlmdata.open_dataset(encoded)
        tall = {
            int(before.index.source_row[i])
            for i in range(len(before))
            if any(item.grid[1] > item.grid[2] for item in before.index.shapes(i))
        }
        assert 0 < len(tall) < len(before)
        assert set(before.index.source_row.tolist()) - tall == set(made.index.source_row.tolist())
        rejected = {each.row: each for each in read_ledger(made.directory / LEDGER_NAME) if each.row in tall}
        assert rejected.keys() == tall
        for each in rejected.values():
            assert each.reason is Reason.UNSUITABLE_ITEM
            assert re.fullmatch(
                rf"images\[\d\]: the codec {NAME} does not store it: \d+ patches high, at most \d+. Choose another "
                "--pixels to keep the row",
                each.message,
            )
        assert verify_dataset(made.directory).faults == []
        with pytest.raises(UsageError, match=rf"{NAME}: the codec does not store key 0.*, image \d: \d+ patches"):
            recode_dataset(raw, tmp_path / "recoded", NAME)

    def test_an_unknown_codec_is_refused_as_an_option(self) -> None:
        with pytest.raises(ValueError, match=r"--pixels webp: unknown codec\. Known: raw, "):
            PreprocessConfig(pixels="webp")
        with pytest.raises(ValueError, match=r"^--video-pixels webp: unknown codec\. Known: raw, "):
            PreprocessConfig(video=VideoConfig(pixels="webp"))


def batches(directory: Path, **options: object) -> list[PackedBatch]:
    with stream(directory, **options) as loader:
        return list(loader)
