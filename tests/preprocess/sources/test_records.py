"""Files read record by record: JSON lines and CSV, plain or gzipped, against plain readers of the whole file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmdata.errors import SourceError
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.sources import byte_files, counting, json_file, records
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source
from vlmdata.reasons import Reason


def opened(spec: Path | str, **options: Any) -> Source:
    return open_source(str(spec), **options)


def values(source: Source) -> list[dict[str, Any]]:
    return [dict(source.row(number).values) for number in source.numbers]


def rejected(source: Source, number: int) -> str:
    with pytest.raises(RowRejected) as rejection:
        source.row(number)
    assert rejection.value.reason is Reason.MALFORMED_ROW
    return rejection.value.message


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are remembered every 64 bytes, and decompression restarts every 64 KiB."""
    monkeypatch.setattr(counting, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(byte_files, "_LEAST_SPACING", 1 << 16)


class TestAnyOrder:
    """Rows are the same in whatever order they are read, from whatever place the reading starts."""

    @pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonl.gz", "json", "json.gz", "csv", "tsv.gz"])
    def test_of_rows(self, tmp_path, small_blocks, ending):
        generator = random.Random(ending)
        rows = [
            {"n": str(n), "text": "".join(generator.choices('ab",\n\té ', k=generator.randrange(1, 800))) + "."}
            for n in range(700)
        ]
        if ending.startswith("json") and "l" not in ending:
            data = json.dumps(rows, indent=1).encode()
        elif "json" in ending:
            data = json_lines(rows)
        else:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, ["n", "text"], delimiter="\t" if "tsv" in ending else ",")
            writer.writeheader()
            writer.writerows(rows)
            data = text.getvalue().encode()
        (tmp_path / f"rows.{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        source = opened(tmp_path / f"rows.{ending}")
        assert values(source) == rows
        worker = pickle.loads(pickle.dumps(source))
        for number in generator.choices(range(700), k=300):
            assert worker.row(number).values == rows[number]

    def test_of_several_files(self, tmp_path):
        for n in range(5):
            (tmp_path / f"{n}.jsonl.gz").write_bytes(gzip.compress(json_lines([{"n": 2 * n}, {"n": 2 * n + 1}])))
        (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(b""))
        source = opened(tmp_path / "*.jsonl.gz")
        assert [row["n"] for row in values(source)] == [0, 1, 2, 3, 6, 7, 8, 9]
        assert [source.row(number).values["n"] for number in (7, 0, 4, 3, 4)] == [9, 0, 6, 3, 6]

    def test_reading_a_row_does_not_read_what_lies_far_before_it(self, tmp_path, monkeypatch):
        rows = [{"n": n, "text": "x" * 100_000} for n in range(200)]
        (tmp_path / "rows.jsonl").write_bytes(json_lines(rows))
        source = opened(tmp_path / "rows.jsonl")
        read = 0
        original = records._RecordCursor.read

        def counted(self: Any, row: int) -> Any:
            nonlocal read
            read += row + 1 - self.next_row
            return original(self, row)

        source.row(0)  # the file stands open at its beginning
        monkeypatch.setattr(records._RecordCursor, "read", counted)
        for number in range(150, 200):
            source.row(number)
        assert read < 50 + 12, "one block of 1 MiB at most lies between"

    def test_what_workers_are_sent_is_small(self, tmp_path):
        (tmp_path / "rows.jsonl").write_bytes(b"{}\n" * 200_000)
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(os.urandom(3 << 20).hex().encode() + b"\n"))
        assert len(pickle.dumps(opened(tmp_path / "rows.jsonl"))) < 3000
        assert len(pickle.dumps(opened(tmp_path / "rows.jsonl.gz"))) < 100_000

    def test_a_file_that_shrinks_under_the_run_is_named(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b'{"n": 1}\n' * 3)
        source = opened(path)
        path.write_bytes(b'{"n": 1}\n')
        with pytest.raises(SourceError, match=r"rows.jsonl: the file was changed while it was being read"):
            source.row(2)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just('"]},[{\\'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


class TestJson:
    """A ``.json`` file has the rows that the standard library reads in it."""

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        rows=st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=4), min_size=1, max_size=8),
        indent=st.sampled_from([None, 0, 3]),
        ascii_only=st.booleans(),
        chunk=st.integers(1, 40),
        in_list=st.booleans(),
    )
    def test_of_any_rows(self, tmp_path, rows, indent, ascii_only, chunk, in_list):
        rows = [{"n": 0}, *rows]  # its first lines tell of objects one after another
        made = [json.dumps(row, indent=indent, ensure_ascii=ascii_only) for row in rows]
        text = f" [\n{' ,\n'.join(made)}\n] \n" if in_list else "\n".join(made)
        path = tmp_path / "rows.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_file, "_CHUNK", chunk)
            patch.setattr(counting, "_BLOCK_BYTES", 30)
            source = opened(path)
            assert values(source) == rows
            assert [source.row(n).values for n in reversed(range(len(rows)))] == rows[::-1]

    def test_a_bad_element_costs_one_row(self, tmp_path):
        (tmp_path / "rows.json").write_bytes(
            b'\xef\xbb\xbf[{"n": 0}, {"n": 1,}, [2], "three, ]", 4, {"n": "\xff"}, {"n": 6, "n": 7}, {"n": 8}} , '
            b'{"n": 9} x, {"n": 10} {"n": 11}, {"n": 12},\n]\n'
        )
        source = opened(tmp_path / "rows.json")
        assert source.num_rows == 11
        assert [source.row(n).values["n"] for n in (0, 10)] == [0, 12]
        said = [rejected(source, n) for n in range(1, 10)]
        expected = ["not JSON: ", "object: [2]", 'object: "three, ]"', "object: 4", "byte 7 of the element is 0xff"]
        expected += ["'n' occurs twice", "Extra data", "Extra data", "Extra data"]
        assert all(text in message for text, message in zip(expected, said, strict=True))

    def test_one_object_per_line_is_json_lines(self, tmp_path):
        (tmp_path / "rows.json").write_bytes(b'\n{"n": 0}\n{"n": [1}\n{"n": 2}\n\n')
        source = opened(tmp_path / "rows.json")
        assert source.num_rows == 4
        assert [source.row(n).values["n"] for n in (1, 3)] == [0, 2]
        assert "a blank line" in rejected(source, 0)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b'[{"n": 1}, {"n": 2}', "damaged or cut off: the element at byte 11 is not closed"),
            (b'[{"n": 1},', r"damaged or cut off: the list has no \]"),
            (b'[{"n": "1}]', "damaged or cut off: the element at byte 1 is not"),
            (b'[{"n": 1}] [{"n": 2}]', "text after the end of the list, at byte 11"),
            (b"\xff\xfe[\0]\0", "begins with 'ÿ', not with the"),
            (b" \n", "it has no rows"),
            (b"[ ]", "it has no rows"),
        ],
    )
    def test_damage(self, tmp_path, data, message):
        for name, content in (("rows.json", data), ("rows.json.gz", gzip.compress(data))):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(SourceError, match=message):
                opened(tmp_path / name)

    def test_memory_is_that_of_an_element(self, tmp_path):
        path = tmp_path / "rows.json"
        with open(path, "wb") as file:
            file.write(b"[")
            for n in range(400):
                file.write(b'%s{"n": %d, "text": "%s"}' % (b"," * (n > 0), n, b"x" * 100_000))
            file.write(b"]")
        tracemalloc.start()
        source = opened(path)
        assert [source.row(n).values["n"] for n in (399, 0, 200)] == [399, 0, 200]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert source.num_rows == 400
        assert peak < 20 << 20, "of 40 MB"


class TestBlankEnd:
    @pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
    @pytest.mark.parametrize("blank", [b"", b"\n", b"\n\n", b"\r\n \n\t", b"\n" * 9000])
    def test_is_no_row(self, tmp_path, ending, blank):
        data = b'{"n": 0}\n\n{"n": 2}' + blank
        path = tmp_path / f"rows.{ending}"
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        source = opened(path)
        assert source.num_rows == 3
        assert [source.row(n).values["n"] for n in (2, 0)] == [2, 0]
        assert "a blank line" in rejected(source, 1)

    def test_of_nothing_else_is_no_source(self, tmp_path):
        (tmp_path / "rows.jsonl").write_bytes(b" \n\n")
        with pytest.raises(SourceError, match="it has no rows"):
            opened(tmp_path / "rows.jsonl")


class TestGzip:
    def test_members_one_after_the_other_are_one_file(self, tmp_path):
        parts = gzip.compress(b'{"n": 1}\n{"n"') + gzip.compress(b": 2}\n")
        (tmp_path / "rows.jsonl.gz").write_bytes(parts)
        assert values(opened(tmp_path / "rows.jsonl.gz")) == [{"n": 1}, {"n": 2}]

    @pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
    def test_damage_is_found_when_the_source_is_opened(self, tmp_path, damage):
        whole = gzip.compress(json_lines([{"n": n, "r": os.urandom(8).hex()} for n in range(2000)]))
        data = {
            "cut": whole[:-100],
            "flipped": whole[:-8] + bytes([whole[-8] ^ 255]) + whole[-7:],
            "not gzip": b'{"n": 1}\n',
        }[damage]
        (tmp_path / "rows.jsonl.gz").write_bytes(data)
        with pytest.raises(SourceError, match=r"^SOURCE .*rows\.jsonl\.gz: the gzip file is damaged or cut off: "):
            opened(tmp_path / "rows.jsonl.gz")

    def test_identity_is_of_the_compressed_file(self, tmp_path):
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}\n", mtime=1))
        before = opened(tmp_path / "rows.jsonl.gz").identity
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"[]\n", mtime=1))
        assert opened(tmp_path / "rows.jsonl.gz").identity != before

    def test_in_a_folder_with_splits(self, tmp_path):
        for split, n in (("train", 1), ("validation", 2)):
            (tmp_path / f"{split}.jsonl.gz").write_bytes(gzip.compress(json_lines([{"n": n}])))
        assert values(opened(tmp_path)) == [{"n": 1}]
        assert values(opened(tmp_path, split="validation")) == [{"n": 2}]


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)


class TestDelimited:
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.lists(FIELDS, min_size=2, max_size=2).filter(any), min_size=1, max_size=6), st.booleans())
    def test_what_the_csv_module_writes_comes_back(self, tmp_path, rows, tabs):
        path = tmp_path / ("rows.tsv" if tabs else "rows.csv")
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_ALL)
            writer.writerows([["a", "b"], *rows])
        assert values(opened(path)) == [{"a": a or None, "b": b or None} for a, b in rows]

    def test_every_value_is_text_and_an_empty_field_is_none(self, tmp_path):
        (tmp_path / "rows.csv").write_text('id,n,f,e,j\n007,1,1.50,,"[{""a"": null}]"\n')
        assert values(opened(tmp_path / "rows.csv")) == [
            {"id": "007", "n": "1", "f": "1.50", "e": None, "j": '[{"a": null}]'}
        ]

    def test_a_byte_order_mark_and_line_ends_of_windows(self, tmp_path):
        (tmp_path / "rows.csv").write_bytes('\ufeffa,b\r\n1,"x\r\ny"\r\n\r\n2,z\r\n'.encode())
        assert values(opened(tmp_path / "rows.csv")) == [{"a": "1", "b": "x\r\ny"}, {"a": "2", "b": "z"}]

    def test_a_quote_within_a_field_is_a_character(self, tmp_path):
        (tmp_path / "rows.tsv").write_text('a\tb\n5" pipe\tsays "so"\n1\t2\n')
        assert values(opened(tmp_path / "rows.tsv")) == [{"a": '5" pipe', "b": 'says "so"'}, {"a": "1", "b": "2"}]

    def test_a_bad_record_costs_one_row(self, tmp_path):
        lines = [b"a,b", b"0,x", b"1", b"2,x,y", b'3,"x"y', b"4,\xff\xfe", b"5,x"]
        (tmp_path / "rows.csv").write_bytes(b"\n".join(lines))
        source = opened(tmp_path / "rows.csv")
        assert source.num_rows == 6
        assert [source.row(n).values["a"] for n in (0, 5)] == ["0", "5"]
        assert rejected(source, 1) == "1 fields, but the header has 2: 1"
        assert rejected(source, 2) == "3 fields, but the header has 2: 2,x,y"
        assert rejected(source, 3).endswith("""rows.csv: ',' expected after '"': 3,"x"y""")
        assert rejected(source, 4) == r"b is not UTF-8: \xff\xfe"

    def test_a_quote_that_is_never_closed_is_refused(self, tmp_path):
        (tmp_path / "rows.csv").write_text('a,b\n0,x\n1,"y\n' + "2,z\n" * 1000)
        with pytest.raises(SourceError, match="the record at byte 8 opens a quote that is not closed before the end"):
            opened(tmp_path / "rows.csv")

    def test_a_field_of_megabytes(self, tmp_path):
        (tmp_path / "rows.csv").write_text("a\n" + "x" * 3_000_000 + "\n")
        assert len(values(opened(tmp_path / "rows.csv"))[0]["a"]) == 3_000_000

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "it has no rows"),
            ("a,b\n", "it has no rows"),
            ("\na,b\n1,2\n", "the header, line 1, is blank"),
            ("a,b,a\n1,2,3\n", "the header, line 1, names a twice: a, b, a"),
            ("a,,b\n1,2,3\n", "the header, line 1, has a column without a name: a, , b"),
            ("a;b\n1;2\n", "has one column, 'a;b'. Fields of .csv are separated by commas .* not by ';'"),
        ],
    )
    def test_a_file_without_a_usable_header_or_rows(self, tmp_path, text, message):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(SourceError, match=message):
            opened(tmp_path / "rows.csv")
