"""Parquet and Arrow files read by fragment, against ``datasets``, whose reading they must equal."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json, List, Value
from datasets import Image as ImageFeature

from tests.conftest import cord_row, encoded_image, tree_bytes
from vlmdata.errors import SourceError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.shards.kept_columns import kept_values
from vlmdata.preprocess.sources import parquet
from vlmdata.preprocess.sources.datasets_library import ArrowRows
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.row_digests import row_digest
from vlmdata.preprocess.sources.rows import Rows, Source

FEATURES = Features(
    {
        "image": ImageFeature(),
        "images": List(ImageFeature()),
        "messages": List({"role": Value("string"), "content": Value("large_string")}),
        "nested": List(List({"a": Value("int32"), "b": List(Value("float64"))})),
        "any": Json(),
        "ground_truth": Value("string"),
        "when": Value("timestamp[us]"),
        "n": Value("int64"),
    }
)


def row(n: int) -> dict[str, Any]:
    some = n % 3 != 0
    return {
        "image": {"bytes": encoded_image(seed=n), "path": f"{n}.png"} if some else None,
        "images": [{"bytes": b"x" * n, "path": None}] * (n % 4),
        "messages": [{"role": "user", "content": "é" * n}, {"role": None, "content": None}] if some else None,
        "nested": [[{"a": n, "b": [0.5, None]}], [], None],
        "any": json.dumps({"k": [n, None, "s"]}) if some else None,
        "ground_truth": json.dumps({"gt_parse": {"n": n}}),
        "when": n * 1000,
        "n": n,
    }


def write_features(path: Path, numbers: range, group: int = 4) -> None:
    """What ``datasets`` would write, in row groups of a few rows."""
    rows = [row(n) for n in numbers]
    table = pa.Table.from_pylist(rows, schema=_storage(FEATURES))
    pq.write_table(table, path, row_group_size=group)


def _storage(features: Features) -> pa.Schema:
    return Dataset.from_dict({name: [] for name in features}, features=features).data.schema


def write_plain(path: Path, numbers: range, group: int = 5) -> None:
    """What other programs write: dictionaries, large and fixed types, no word of features."""
    kinds = pa.array([f"kind {n % 3}" for n in numbers]).dictionary_encode()
    columns = {
        "kind": kinds,
        "text": pa.array([None if n % 5 == 0 else f"text {n}" for n in numbers], pa.large_string()),
        "bytes": pa.array([b"\xff" * n for n in numbers], pa.large_binary()),
        "pairs": pa.array([[n, n + 1] for n in numbers], pa.list_(pa.int16(), 2)),
        "many": pa.array([[str(n)] * (n % 3) for n in numbers], pa.large_list(pa.string())),
        "image": pa.array(
            [{"bytes": encoded_image(seed=n), "path": None} for n in numbers],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
        "empty": pa.nulls(len(numbers)),
    }
    pq.write_table(pa.table(columns), path, row_group_size=group, compression="zstd")


def write_arrow_stream(path: Path, numbers: range) -> None:
    table = pa.Table.from_pylist([row(n) for n in numbers], schema=_storage(FEATURES))
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_arrow_file(path: Path, numbers: range) -> None:
    """With dictionaries that grow from batch to batch."""
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    schema = pa.schema([("kind", pa.dictionary(pa.int8(), pa.string())), ("n", pa.int64())])
    with pa.ipc.new_file(path, schema, options=options) as writer:
        words: list[str] = []
        for n in numbers:
            words.append(f"word {n}")
            kind = pa.DictionaryArray.from_arrays(pa.array([n - numbers.start, 0], pa.int8()), pa.array(words))
            writer.write_batch(pa.record_batch([kind, pa.array([n, -n])], schema=schema))


WRITERS: dict[str, tuple[str, Callable[[Path, range], None]]] = {
    "features": ("parquet", write_features),
    "plain": ("parquet", write_plain),
    "arrow stream": ("arrow", write_arrow_stream),
    "arrow file": ("arrow", write_arrow_file),
}


def through_datasets(kind: str, files: list[Path]) -> ArrowRows:
    loaded = datasets.load_dataset(kind, data_files=[str(file) for file in files], split="train")
    return ArrowRows(loaded.with_format("arrow"))


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_those_of_datasets_in_any_order(tmp_path, name):
    kind, write = WRITERS[name]
    files = [tmp_path / f"{letter}.{kind}" for letter in "abc"]
    for file, numbers in zip(files, (range(1, 12), range(12, 13), range(13, 31)), strict=True):
        write(file, numbers)
    expected = through_datasets(kind, files)
    found = open_source(str(tmp_path))
    assert found.rows.columns() == expected.columns()
    assert len(found.rows) == len(expected) > 29
    order = list(range(len(expected)))
    random.Random(0).shuffle(order)
    fresh = pickle.loads(pickle.dumps(found.rows))
    for number in (*range(len(expected)), *order):
        assert dict(found.rows.values(number)) == expected.values(number), number
        assert fresh.values(number) == expected.values(number), number


def test_a_file_with_fewer_columns_or_other_types_is_read_as_the_first(tmp_path):
    pq.write_table(pa.table({"n": pa.array([1], pa.int64()), "text": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": pa.array([2], pa.int32())}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": pa.array(["c"], pa.large_string()), "n": ["3"]}), tmp_path / "c.parquet")
    expected = through_datasets("parquet", sorted(tmp_path.glob("*.parquet")))
    found = open_source(str(tmp_path)).rows
    assert [found.values(n) for n in range(3)] == [expected.values(n) for n in range(3)]
    assert found.values(1) == {"n": 2, "text": None}


def test_columns_that_do_not_fit_are_refused_before_a_row_is_read(tmp_path):
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": [[1]], "more": [2]}), tmp_path / "b.parquet")
    with pytest.raises(
        SourceError, match=r"b.parquet: its columns \(n, more\) do not fit those of .*a.parquet \(n, more\)"
    ):
        open_source(str(tmp_path))


def test_two_columns_of_one_name_are_refused(tmp_path):
    """A row is a mapping, which would have one of them."""
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a.parquet: it has several columns 'a'"):
        open_source(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["features", "arrow stream"])
def test_shards_index_and_ledger_are_those_of_datasets(tmp_path, name):
    kind = WRITERS[name][0]
    (tmp_path / "rows").mkdir()
    rows = [row(n) | {"image": cord_row(n)["image"] if n != 5 else None, "ground_truth": cord_row(n)["ground_truth"]}
            for n in range(20)]  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=_storage(FEATURES))
    for place, part in ((0, table[:7]), (1, table[7:])):
        path = tmp_path / "rows" / f"train-0000{place}.{kind}"
        if kind == "parquet":
            pq.write_table(part, path, row_group_size=3)
        else:
            with pa.ipc.new_stream(path, part.schema) as writer:
                writer.write_table(part, max_chunksize=4)
    here = open_source(str(tmp_path / "rows"))
    reference = through_datasets(kind, sorted((tmp_path / "rows").iterdir()))
    there = Source.whole(reference, here.identity, here.image_root)
    theirs = made(tmp_path / "theirs", replace(there, files=here.files))
    assert made(tmp_path / "ours", here) == theirs
    assert b'"row": 5' in theirs["rejected.jsonl"]
    assert Manifest.read(tmp_path / "ours").totals.samples == 19


def made(directory: Path, source: Source) -> dict[str, bytes]:
    config = PreprocessConfig(image=ImageConfig(1024, 65536), rows_per_shard=6)
    preprocess_dataset(source, directory, config)
    files = tree_bytes(directory)
    assert MANIFEST_NAME in files
    return files


class TestWhatIsRead:
    """Bytes read, counted at the file."""

    @pytest.fixture
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        """Opened row groups by file and number."""
        seen: dict[str, int] = {}
        original = parquet.ParquetReader.batches

        def batches(self: parquet.ParquetReader, fragment: int) -> Any:
            name = f"{self._file.file_name}:{fragment}"
            seen[name] = seen.get(name, 0) + 1
            return original(self, fragment)

        monkeypatch.setattr(parquet.ParquetReader, "batches", batches)
        return seen

    def test_counting_reads_no_rows_and_a_job_its_row_groups(self, tmp_path, counted):
        for letter in "ab":
            pq.write_table(pa.table({"n": list(range(100))}), tmp_path / f"{letter}.parquet", row_group_size=10)
        source = open_source(str(tmp_path))
        assert (source.num_rows, counted) == (200, {})
        assert [source.row(n).values["n"] for n in range(95, 115)] == [*range(95, 100), *range(15)]
        assert counted == {"a.parquet:9": 1, "b.parquet:0": 1, "b.parquet:1": 1}

    def test_rows_of_a_large_group_in_order_are_decoded_once(self, tmp_path, counted, monkeypatch):
        monkeypatch.setattr(parquet, "_MOST_ROWS", 8)
        pq.write_table(pa.table({"n": list(range(100))}), tmp_path / "a.parquet")
        rows: Rows = open_source(str(tmp_path)).rows
        assert [rows.values(n)["n"] for n in (3, 4, 50, 51, 99)] == [3, 4, 50, 51, 99]
        assert counted == {"a.parquet:0": 1}
        assert rows.values(2)["n"] == 2
        assert counted == {"a.parquet:0": 2}

    def test_nothing_is_copied_to_a_cache(self, tmp_path):
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        before = sorted(cache.rglob("*"))
        pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
        assert open_source(str(tmp_path)).row(1).values == {"n": 2}
        assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize("when", [False, True], ids=["plain", "with a column that datasets must read"])
@pytest.mark.parametrize("first", ["a", "b"], ids=["added", "dropped"])
def test_columns_of_later_files_are_added_and_those_they_lack_are_null(tmp_path, when, first):
    old = [{"n": 1, "m": {"a": "x"}, "l": [{"k": 1}]}, {"n": 2, "m": None, "l": []}]
    new = [{"n": 3, "m": {"a": "y", "b": 4}, "l": [{"k": 2, "j": "z"}], "more": "new"}]
    for name, rows in ((first, old), ({"a": "b", "b": "a"}[first], new)):
        table = pa.Table.from_pylist(rows)
        if when:
            table = table.append_column("when", pa.array([0] * len(rows), pa.timestamp("s")))
        pq.write_table(table, tmp_path / f"{name}.parquet")
    source = open_source(str(tmp_path))
    rows_read = {row.values["n"]: row for row in map(source.row, range(3))}
    plain = {n: {name: value for name, value in row.values.items() if name != "when"} for n, row in rows_read.items()}
    assert plain == {
        1: {"n": 1, "m": {"a": "x", "b": None}, "l": [{"k": 1, "j": None}], "more": None},
        2: {"n": 2, "m": None, "l": [], "more": None},
        3: {"n": 3, "m": {"a": "y", "b": 4}, "l": [{"k": 2, "j": "z"}], "more": "new"},
    }
    # A later version knows the rows of the first file.
    alone = open_source(str(tmp_path / f"{first}.parquet"))
    assert [row_digest(alone.row(n)) for n in range(2)] == [row_digest(rows_read[n]) for n in (1, 2)]


class TestMaps:
    MAPS = pa.map_(pa.string(), pa.struct([("n", pa.int64()), ("m", pa.map_(pa.int64(), pa.string()))]))

    def write(self, path: Path, *columns: tuple[str, pa.Array]) -> None:
        values = [[("a", {"n": 1, "m": [(7, "x")]}), ("b", None)], None, [("a", None), ("a", None)]]
        named = {"n": pa.array([0, 1, 2]), "meta": pa.array(values, self.MAPS), **dict(columns)}
        pq.write_table(pa.table(named), path)

    @pytest.mark.parametrize("when", [False, True], ids=["plain", "with a column that datasets must read"])
    def test_are_mappings(self, tmp_path, when):
        times = [("when", pa.array([0, 1, 2], pa.timestamp("s")))] if when else []
        inner = pa.array([{"m": [("k", 1)]}, None, None], pa.struct({"m": pa.map_(pa.string(), pa.int32())}))
        self.write(tmp_path / "a.parquet", *times, ("in", inner))
        pq.write_table(pa.table({"n": [3], "more": ["x"]}), tmp_path / "b.parquet")
        source = pickle.loads(pickle.dumps(open_source(str(tmp_path))))
        assert source.row(0).values["meta"] == {"a": {"n": 1, "m": {"7": "x"}}, "b": None}
        assert source.row(0).values["in"] == {"m": {"k": 1}}
        assert source.row(1).values["meta"] is None
        assert (source.row(3).values["n"], source.row(3).values["more"], source.row(3).values["meta"]) == (3, "x", None)
        assert kept_values(source.row(0), ["meta.a.n"]) == {"meta.a.n": 1}
        with pytest.raises(RowRejected, match=r"a key of a map occurs twice: .*'a'"):
            source.row(2)


class TestDamage:
    @pytest.mark.parametrize("kind", ["parquet", "arrow"])
    def test_a_file_cut_off_at_any_place_is_refused(self, tmp_path, kind):
        whole = tmp_path / f"a.{kind}"
        {"parquet": write_features, "arrow": write_arrow_stream}[kind](whole, range(1, 20))
        data = whole.read_bytes()
        # An Arrow stream that ends between two messages is whole.
        for cut in random.Random(0).sample(range(len(data) - 9), 40):
            whole.write_bytes(data[:cut])
            try:
                source = open_source(str(whole))
            except SourceError as error:
                said = str(error)
            else:
                said = "" if kind == "arrow" and source.num_rows % 3 == 0 else "taken for whole"
            assert said.startswith(f"SOURCE {whole}: ") or not said

    def test_damaged_pages_are_an_error_that_names_the_file(self, tmp_path):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": [f"{n} words" * 50 for n in range(200)]}), path, compression="zstd")
        data = bytearray(path.read_bytes())
        data[60:160] = bytes(100)
        path.write_bytes(data)
        source = open_source(str(path))
        with pytest.raises(SourceError, match="parquet: the file is damaged"):
            source.row(0)

    def test_a_file_changed_after_it_was_counted_is_not_read(self, tmp_path):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"n": [1, 2]}), path)
        source = open_source(str(path))
        pq.write_table(pa.table({"n": [1, 2, 3, 4]}), path)
        with pytest.raises(SourceError, match="the file was changed while it was being read"):
            source.row(0)
