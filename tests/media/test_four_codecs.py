"""The same conversations under raw, zstd, jxl and source: equal in every batch, and each says what damages it."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import struct
import sys
import zlib
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import vlmdata
from tests.chat_rows import turn, write_jsonl
from tests.conftest import build_dataset, encoded_image, tree_bytes
from tests.loader.helpers import assert_same, epoch_of, stream, worker_pids
from tests.verify.rewriting import rewrite_manifest, sha256
from vlmdata.errors import ChangedDataError, DatasetFormatError, UsageError
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME
from vlmdata.inspect.query import sample_text
from vlmdata.inspect.sample import SampleDescriber
from vlmdata.media.codecs import IMAGE, MOST_FILE_PIXELS, RAW, REGISTRY, ItemShape, codec, decode_item
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.fault import remedies

pytestmark = pytest.mark.slow

CODECS = [name for name in REGISTRY if name != RAW]
ROWS = 20
OPTIONS: dict[str, Any] = {"recipe": "chat", "image": ImageConfig(1024, 16384), "rows_per_shard": 5}
#: Columns of the index in which datasets of one source differ by their codec.
STORED = ("offset", "size", "checksum", "item_checksums", "item_offsets", "item_bytes", "item_codecs", "json_size")


def files() -> list[bytes]:
    """Image files of many kinds."""
    turned, deep = Image.Exif(), io.BytesIO()
    turned[0x0112] = 6
    values = np.random.default_rng(5).integers(0, 65536, (50, 40), np.uint16)
    Image.fromarray(values).save(deep, "PNG")
    return [
        encoded_image(100, 70, seed=1),
        encoded_image(90, 60, seed=2, format="JPEG", exif=turned, quality=70),
        encoded_image(64, 64, seed=3, mode="RGBA"),
        encoded_image(96, 64, seed=4, mode="L", format="JPEG"),
        deep.getvalue(),
        encoded_image(128, 50, seed=6, mode="P", format="GIF"),
        encoded_image(64, 96, seed=7, format="WEBP"),
    ]


def rows() -> list[dict[str, Any]]:
    """Conversations with up to three images, many of them shared, some of other size in another row."""
    images, random = files(), np.random.default_rng(0)
    made = []
    for number in range(ROWS):
        content: list[Any] = []
        for chosen in random.integers(0, len(images), number % 4).tolist():
            uri = "data:image/png;base64," + base64.b64encode(images[chosen]).decode()
            bounds = {"max_pixels": 2048} if random.random() < 0.2 else {}
            content.append({"type": "image", "image": uri, **bounds})
        words = " ".join(["word"] * int(random.integers(1, 200)))
        made.append({"messages": [turn("user", *content, "What is it?"), turn("assistant", words)]})
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("codecs") / "chat.jsonl", rows())


@pytest.fixture(scope="module")
def datasets(source: Path) -> dict[str, Path]:
    """The dataset under each codec."""
    return {name: build_dataset(source, source.with_name(name), pixels=name, **OPTIONS) for name in REGISTRY}


@pytest.fixture(params=CODECS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def damaged(name: str, datasets: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(datasets[name], tmp_path / "dataset"))


class TestEqual:
    @given(
        name=st.sampled_from(CODECS),
        parts=st.sets(st.sampled_from(["tokens", "labels", "pixels"])).filter(lambda parts: parts != {"labels"}),
        ranks=st.integers(1, 3),
        rank=st.integers(0, 2),
        seed=st.integers(0, 9),
        verify=st.sampled_from(["pixels", "stored", "off"]),
    )
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_batches_in_every_part_and_slice(
        self,
        datasets: dict[str, Path],
        name: str,
        parts: set[str],
        ranks: int,
        rank: int,
        seed: int,
        verify: str,
    ) -> None:
        options: dict[str, Any] = {"parts": tuple(sorted(parts)), "seed": seed, "max_patches": 400}
        if ranks > 1:
            options |= {"context_parallel": ranks, "context_parallel_rank": rank % ranks}
        assert_same(epoch_of(datasets[RAW], **options), epoch_of(datasets[name], verify=verify, **options))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_blend_of_all(self, datasets: dict[str, Path], workers: int) -> None:
        opened = {path: vlmdata.open_dataset(datasets[RAW]) for path in datasets.values()}
        seen = set()
        for batch in epoch_of(list(datasets.values()), num_workers=workers):
            assert batch.patches is not None
            expected = [vlmdata.open_dataset(datasets[RAW])[0].patches[:0]]
            for origin in batch.origins:
                expected.append(list(opened.values())[origin.dataset][origin.index].patches)
                seen.add(origin.dataset)
            np.testing.assert_array_equal(batch.patches.numpy(), np.concatenate(expected))
        assert seen == set(range(len(datasets)))

    def test_a_killed_worker_changes_nothing(self, datasets: dict[str, Path]) -> None:
        found = []
        with stream(datasets["source"], num_workers=2) as loader:
            for batch in loader:
                found.append(batch)
                if len(found) == 2:
                    for pid in worker_pids()[:1]:
                        os.kill(pid, signal.SIGKILL)
        assert_same(found, epoch_of(datasets[RAW]))

    def test_the_index_but_for_where_images_lie(self, datasets: dict[str, Path], name: str) -> None:
        raw, encoded = (pq.read_table(datasets[which] / INDEX_NAME) for which in (RAW, name))
        differing = {column for column in raw.column_names if not raw.column(column).equals(encoded.column(column))}
        assert {column for column in differing if not column.endswith("_offset")} <= set(STORED)
        assert encoded.column("pixel_checksums").equals(raw.column("item_checksums"))
        assert Manifest.read(datasets[name]).features == ("images", f"patches-{name}")
        assert verify_dataset(datasets[name]).faults == []

    def test_masked_samples(self, datasets: dict[str, Path], damaged: Path, name: str) -> None:
        index = vlmdata.open_dataset(damaged).index
        owner = np.repeat(np.arange(len(index.shard)), index.item_counts)
        place = [(int(index.shard[of]), int(index.item_offsets[i])) for i, of in enumerate(owner)]
        with open(damaged / f"shard-{place[4][0]:06d}.tar", "r+b") as file:
            file.seek(place[4][1] + 30)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        hit = {int(of) for of, where in zip(owner, place, strict=True) if where == place[4]}
        with pytest.raises(ChangedDataError):
            epoch_of(damaged)
        for workers, parts in ((0, ("tokens", "labels", "pixels")), (2, ("labels",))):
            found = epoch_of(damaged, on_damage="mask", num_workers=workers, parts=parts)
            for batch, sound in zip(found, epoch_of(datasets[RAW], parts=parts), strict=True):
                masked = [i for i, origin in enumerate(sound.origins) if origin.index in hit]
                assert list(batch.masked) == masked
                assert sound.labels is not None
                assert batch.labels is not None
                for number in masked:
                    of = slice(int(sound.cu_seqlens_padded[number]), int(sound.cu_seqlens_padded[number + 1]))
                    sound.labels[0, of] = -100
                assert torch.equal(batch.labels, sound.labels)
                assert torch.equal(batch.position_ids, sound.position_ids)

    def test_the_bytes_after_losses(self, source: Path, datasets: dict[str, Path], damaged: Path, name: str) -> None:
        whole = tree_bytes(datasets[name])
        for lost in (INDEX_NAME, "shard-000001.tar"):
            (damaged / lost).unlink()
            build_dataset(source, damaged, pixels=name, **OPTIONS)
            assert tree_bytes(damaged) == whole


def test_source_holds_each_file_once_a_shard(source: Path, datasets: dict[str, Path]) -> None:
    dataset, known = vlmdata.open_dataset(datasets["source"]), set(files())
    stored, shared = 0, 0
    for shard in range(len(dataset.manifest.shards)):
        data, owners = dataset.shard_path(shard).read_bytes(), {}
        for i in np.flatnonzero(dataset.index.shard == shard).tolist():
            described = dataset.metadata(i).get("items", [])
            for number, (item, entry) in enumerate(zip(dataset.index.row(i).items, described, strict=True)):
                payload = data[item.offset : item.offset + item.bytes]
                assert payload in known
                if "same_as" in entry:
                    shared += 1
                    assert owners[entry["same_as"]["key"], entry["same_as"]["image"]] == item.offset
                else:
                    assert payload not in {data[at : at + item.bytes] for at in owners.values()}
                    stored += 1
                owners[dataset.index.key(i), number] = item.offset
    assert shared > 5
    assert stored + shared == dataset.manifest.totals.items


class TestDamage:
    def test_a_flipped_bit(self, damaged: Path, name: str) -> None:
        dataset = vlmdata.open_dataset(damaged)
        i = int(np.flatnonzero(dataset.index.item_counts >= 1)[0])
        key, item, shard = dataset.index.key(i), dataset.index.row(i).items[0], dataset.shard_path(0)
        data = bytearray(shard.read_bytes())
        data[item.offset + item.bytes // 2] ^= 16
        shard.write_bytes(data)
        faults = verify_dataset(damaged).faults
        assert ("checksum", key) in {(fault.check, fault.key) for fault in faults}
        assert [step.partition(" ")[0] for step in remedies(str(damaged), faults)] == ["Remove", "Run"]
        with pytest.raises(
            DatasetFormatError, match=f"{shard.name}: row .* patches of image .: the data changed after"
        ):
            epoch_of(damaged)

    def test_a_truncated_item(self, datasets: dict[str, Path], name: str) -> None:
        index = vlmdata.open_dataset(datasets[name]).index
        i = int(np.flatnonzero(index.item_counts >= 1)[0])
        row, shape = index.row(i), index.row(i).items[0].shape
        data = (datasets[name] / "shard-000000.tar").read_bytes()
        stored = data[row.items[0].offset :][: row.items[0].bytes]
        out = np.empty((shape.rows, FAMILY.patch_bytes), np.uint8)
        decode_item(name, stored, shape, FAMILY, out, "image 0")
        for cut in (0, 1, len(stored) // 2):
            with pytest.raises(
                DatasetFormatError, match=f"^image 0: its {cut:,} bytes do not decode with codec {name}"
            ):
                decode_item(name, stored[:cut], shape, FAMILY, out, "image 0")

    @pytest.mark.parametrize("column", ["item_offsets", "item_bytes", "pixel_checksums"])
    def test_an_index_that_points_elsewhere(self, damaged: Path, column: str) -> None:
        table = pq.read_table(damaged / INDEX_NAME)
        lists = table.column(column).to_pylist()
        sharing = next(i for i in range(len(lists)) if len(lists[i]) == 3)
        lists[sharing][2] += 1
        field = table.schema.field(column)
        changed = table.set_column(table.column_names.index(column), field, pa.array(lists, field.type))
        pq.write_table(changed, damaged / INDEX_NAME)
        rewrite_manifest(damaged, index_sha256=sha256(damaged / INDEX_NAME))
        key = table.column("key")[sharing].as_py()
        assert ("items", key) in {(fault.check, fault.key) for fault in verify_dataset(damaged).faults}


class TestHostile:
    """Bytes that declare more than the picture has are refused before memory is taken for them."""

    OUT = np.empty((16, FAMILY.patch_bytes), np.uint8)

    def refused(self, name: str, stored: bytes, why: str) -> None:
        with pytest.raises(DatasetFormatError, match=why):
            decode_item(name, stored, ItemShape(IMAGE, (1, 4, 4)), FAMILY, self.OUT, "image 0")

    @pytest.mark.parametrize("flags", [0, 1, 2, 3])
    def test_zstd(self, flags: int) -> None:
        bomb = pa.compress(bytes(10**8), codec="zstd", asbytes=True)
        self.refused("zstd", bytes([flags]) + bomb, "Destination buffer is too small")
        self.refused("zstd", b"\x08" + bomb, "its flags are 0x8")
        self.refused("zstd", b"\x04\x00" + bomb, "Destination buffer is too small")
        for told in (b"\x01", b"\x02", b""):  # the first frame, one more than the item has, none
            self.refused("zstd", b"\x04" + told, "it tells changes of other frames than the 1 of the item")

    def test_jxl(self) -> None:
        import imagecodecs

        bomb = imagecodecs.jpegxl_encode(np.zeros((4096, 4096), np.uint8), lossless=True, effort=1)
        self.refused("jxl", bomb, r"invalid out.shape=\(64, 64, 3\), shape=\(4096, 4096\)")

    def test_source(self) -> None:
        side = int(MOST_FILE_PIXELS**0.5) + 1
        head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
        self.refused("source", bomb + struct.pack(">I", 0) + b"IDAT", "image_too_large")

    def test_preprocessing_stores_no_file_that_readers_refuse(self) -> None:
        with pytest.raises(ValueError, match="max_source_pixels is 268435457; pixels=source stores image files"):
            PreprocessConfig(pixels="source", image=ImageConfig(max_source_pixels=MOST_FILE_PIXELS + 1))


class TestWithoutThePackage:
    @pytest.fixture(autouse=True)
    def _absent(self, datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "imagecodecs", None)

    NEEDS = r"codec jxl needs the package imagecodecs: pip install 'vlmdata\[jxl\]'"

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_loader_says_so_at_its_start(self, datasets: dict[str, Path], workers: int) -> None:
        with pytest.raises(UsageError, match=self.NEEDS):
            stream(datasets["jxl"], num_workers=workers)
        assert epoch_of(datasets["jxl"], parts=("tokens", "labels"))

    def test_reading_a_sample_and_preprocessing_say_so(self, datasets: dict[str, Path]) -> None:
        dataset = vlmdata.open_dataset(datasets["jxl"])
        with pytest.raises(UsageError, match=self.NEEDS):
            list(dataset)
        with pytest.raises(UsageError, match=self.NEEDS):
            PreprocessConfig(pixels="jxl")
        assert codec("source").libraries() == {}

    @pytest.mark.parametrize(("module", "package"), [("PIL", "pillow"), ("torchvision", "torchvision")])
    def test_the_loader_of_image_files_names_its_own(
        self, datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, module: str, package: str
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=f"codec source needs the package {package}: pip install {package}$"):
            stream(datasets["source"])


def test_the_help_describes_every_codec() -> None:
    from vlmdata.preprocess.cli.preprocess import preprocess

    (option,) = get_type_hints(preprocess, include_extras=True)["pixels"].__metadata__
    assert all(f"`{name}`: {codec(name).summary}" in option.help for name in REGISTRY)


def test_a_search_for_text_decodes_no_image(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = vlmdata.open_dataset(datasets["source"])
    whole = [sample.arrays() for sample in dataset]
    monkeypatch.setattr(type(codec("source")), "decode", None)
    describe = SampleDescriber(dataset)
    for i, arrays in enumerate(whole):
        for name, array in dataset.without_pixels(i).arrays().items():
            assert array.shape == arrays[name].shape
            assert name == "patches" or np.array_equal(array, arrays[name])
        assert "What is it?" in sample_text(dataset, describe.texts, i)
        assert describe.first_words(i).startswith("word")
        assert {finding.kind for finding in describe.findings(i)} <= {"low_target_share", "high_target_share"}


def test_plain_webdataset_finds_the_files(datasets: dict[str, Path]) -> None:
    import webdataset as wds

    files_by_item: dict[tuple[str, int], bytes] = {}
    urls = sorted(map(str, datasets["source"].glob("shard-*.tar")))
    for sample in wds.WebDataset(urls, shardshuffle=False):
        at = 0
        for number, item in enumerate(json.loads(sample["json"]).get("items", [])):
            if "same_as" in item:
                stored = files_by_item[item["same_as"]["key"], item["same_as"]["image"]]
            else:
                stored = sample["items.bin"][at : at + item["bytes"]]
                at += item["bytes"]
            files_by_item[sample["__key__"], number] = stored
    assert set(files_by_item.values()) <= set(files())
