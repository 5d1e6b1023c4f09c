"""Each field of each file of a dataset with hostile values: a clear error or a result, nothing else.

No file outside the dataset, the cache and the output changes, no module that a field names is imported, and no field is
taken for the size of an allocation.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chat_rows import build_mixed
from tests.conftest import tree_bytes
from tests.media.video.clips import clip
from vlmdata import open_dataset
from vlmdata.errors import VlmdataError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.format.shard import read_npy
from vlmdata.format.writing import sha256_of
from vlmdata.media.error import MediaError
from vlmdata.media.video import read_contents
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.retokenize.run import old_config
from vlmdata.preprocess.run.directory import ShardPlan, read_identity
from vlmdata.preprocess.run.versions import Newest, VersionInfo, read_version
from vlmdata.preprocess.shards.job import RUN_FILE, ShardRecord, finished_records, plan_shards, progress_name
from vlmdata.storage.folder import Folder
from vlmdata.storage.prune import plan_prune
from vlmdata.storage.versions import Version, versions_to_json
from vlmdata.verify.dataset import verify_dataset

#: More than anything here needs, and less than any of the hostile sizes.
MOST_BYTES = 64 << 20
DEEP = "[" * 50_000 + "]" * 50_000
VALUES: tuple[Any, ...] = (
    *("../../.profile", "/etc/passwd", "canary:R", "canary.py:R", "C:\\x", "\0", "", "x" * 10_000),
    *(-1, 0, 10**15, 2**63, -(2**70), 1e308, True, None, [], {}, [[]], {"": {}}),
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that nobody changes."""
    return build_mixed(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def place(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, two folders below one with a canary and a file that must stay what it is."""
    ran = tmp_path / "ran"
    (tmp_path / "canary.py").write_text(f"open({str(ran)!r}, 'w')\nclass R: pass\n")
    (tmp_path / ".profile").write_text("mine")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    copy = Path(shutil.copytree(sound, tmp_path / "downloads" / "dataset"))
    outside = {path: content for path, content in tree_bytes(tmp_path).items() if not path.startswith("downloads/d")}
    yield copy
    now = {path: content for path, content in tree_bytes(tmp_path).items() if not path.startswith("downloads/d")}
    assert now == outside
    assert "canary" not in sys.modules


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a JSON value, also of those with others in them."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from leaves(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """A copy of a JSON value with another one at a place."""
    if not path:
        return to
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], to)
    return copy


def hostile(content: bytes, values: int) -> Iterator[tuple[str, bytes]]:
    """Versions of a JSON text: each field with some of the values in turn, each name as another, and deep nesting."""
    fields, number = json.loads(content), 0
    for path in leaves(fields):
        for _ in range(values):
            number += 1
            value = VALUES[number * 7 % len(VALUES)]
            yield f"{path} = {value!r}"[:200], json.dumps(changed(fields, path, value)).encode()
        if path and isinstance(path[-1], str):
            parent = fields
            for key in path[:-1]:
                parent = parent[key]
            other = {"../../.profile" if name == path[-1] else name: each for name, each in parent.items()}
            yield f"{path} named otherwise", json.dumps(changed(fields, path[:-1], other)).encode()
    yield "deep", DEEP.encode()
    yield "big", b'{"format": ' + b"9" * 10_000 + b"}"
    yield "text", b"\xff\xfe"


def harmless(what: str, use: Callable[[], object]) -> bool:
    """Uses a hostile file. Returns whether it was read without an error.

    Fails for errors that are not ours, and for memory.
    """
    tracemalloc.reset_peak()
    before, arrow = tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()
    try:
        use()
    except (VlmdataError, MediaError):
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES, what
        assert pa.total_allocated_bytes() - arrow < MOST_BYTES, what
    return True


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


def read_all(directory: Path) -> None:
    """What readers do with a dataset: its samples, its options, an audit."""
    dataset = open_dataset(directory)
    dataset[0]
    dataset.metadata(0)
    old_config(OldDataset.open(directory))


def test_the_manifest(place: Path) -> None:
    path, read = place / "manifest.json", 0
    sound = path.read_bytes()
    for number, (what, content) in enumerate(hostile(sound, 1)):
        if harmless(what, lambda content=content: Manifest.from_json(content, str(path))) and number % 2:
            path.write_bytes(content)
            use = verify_dataset if number % 32 == 1 else read_all
            read += harmless(what, lambda use=use: use(place))
    assert read > 20  # notes that no reader uses
    path.write_bytes(sound)
    read_all(place)


def test_the_index(place: Path) -> None:
    manifest, path = place / "manifest.json", place / "index.parquet"
    table, fields = pq.read_table(path), json.loads(manifest.read_bytes())
    refused = []
    for name in table.column_names:
        column = table[name].to_pylist()
        for value in (-1, 2**31 - 1, 2**62, "canary:R"):
            with_value = [_put(column[0], value), *column[1:]]
            try:
                array = pa.array(with_value, table[name].type)
            except (pa.ArrowException, OverflowError, TypeError):
                continue  # no value of this column
            pq.write_table(table.set_column(table.column_names.index(name), table.schema.field(name), array), path)
            manifest.write_text(json.dumps(fields | {"index_sha256": sha256_of(path)}))
            what = f"{name} = {value!r}"
            if not harmless(what, lambda: read_all(place)):
                refused.append(name)
            if value == 2**31 - 1:
                harmless(what, lambda: verify_dataset(place))
    assert {"shard", "length", "padded_length", "num_patches", "item_grids", "item_bytes", "json_size"} <= {*refused}


def _put(old: Any, value: Any) -> Any:
    """A value of a column with another one, in lists as the first."""
    return [_put(old[0], value), *old[1:]] if isinstance(old, list) and old else value


def test_a_count_of_rows_that_the_file_cannot_hold(place: Path) -> None:
    """Repeated values take no bytes in Parquet."""
    table = pq.read_table(place / "index.parquet")
    many = table.take(pa.array(np.zeros(500_000, np.int64)))
    pq.write_table(many, place / "index.parquet", compression="zstd")
    with pytest.raises(VlmdataError, match="rows"):
        DatasetIndex.read(place / "index.parquet")


def test_the_ledger_and_the_list_of_versions(place: Path) -> None:
    line = (place / "rejected.jsonl").read_bytes().splitlines()[0]
    for what, content in hostile(line, len(VALUES)):
        (place / "rejected.jsonl").write_bytes(content + b"\n")
        harmless(what, lambda: list(read_ledger(place / "rejected.jsonl")))
    manifest = Manifest.read(place)
    listed = versions_to_json([Version(1, manifest.fingerprint), Version(2, "f" * 64)])
    store, out = Folder(place), place.parent / "dataset-out"
    for what, content in hostile(listed, len(VALUES)):
        (place / "versions.json").write_bytes(content)
        for use in (lambda: open_dataset(place), lambda: Newest.read(store), lambda: plan_prune(store, [1])):
            harmless(what, use)
    assert not out.exists()


def test_the_journal_of_a_run(place: Path) -> None:
    store = Folder(place)
    store.prepare(".progress")
    info = VersionInfo(2, "f" * 64, 10, 1, 1, 1, "a" * 64)
    run = {"config": {"options": {"recipe": "chat"}, "fingerprints": {}}, "source": {}, "version": asdict(info)}
    record = ShardRecord(Manifest.read(place).shards[0], Manifest.read(place).totals, {}, features=())
    plan = asdict(ShardPlan(10, 3))
    pq.write_table(pa.table({"row": [0], "source_row": [0]}), place / info.kept_file)
    jobs = plan_shards(10, 3)
    for what, content in hostile(json.dumps(run).encode(), 3):
        store.put(RUN_FILE, content)

        def read() -> None:
            if (identity := read_identity(store)) is not None and "version" in identity:
                read_version(store, identity)

        harmless(what, read)
    store.put(RUN_FILE, json.dumps(run).encode())
    for what, content in hostile(json.dumps(plan).encode(), len(VALUES)):
        store.put(".progress/plan.json", content)
        harmless(what, lambda: (found := ShardPlan.read(store)) and found.jobs[:1])
    for what, content in hostile(record.to_json(), 3):
        store.put(progress_name(0, "json"), content)
        harmless(what, lambda: finished_records(store, jobs))


def test_the_arrays_of_a_shard() -> None:
    array = BytesIO()
    np.save(array, np.arange(8, dtype="<i4"))
    assert read_npy(array.getvalue()).tolist() == list(range(8))
    for shape in ("(99999999999999,)", "(-1,)", "(8, 1000000000)", "(9,)"):
        header = array.getvalue()[:128].replace(b"(8,), }" + b" " * (len(shape) - 4), f"{shape}, }}".encode())
        assert len(header) == 128
        with pytest.raises(ValueError, match="its header tells"):
            read_npy(header + array.getvalue()[128:])


@pytest.mark.parametrize("container", ["mp4", "fragmented", "webm", "avi", "gif"])
def test_the_headers_of_videos(container: str) -> None:
    muxer = {"movflags": "frag_keyframe+empty_moov"} if container == "fragmented" else {}
    codecs = {"webm": "libvpx", "avi": "mjpeg", "gif": "gif"}
    data = clip(codecs.get(container, "libx264"), 6, size=(16, 16), muxer=muxer)
    begin = data.find(b"moov") if container == "mp4" else 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, at in enumerate(range(begin, min(len(data) - 4, begin + 1200), 4)):
        value = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x02\x62\x5a\0")[number % 4]
        harmless(f"byte {at}", lambda at=at, value=value: read_contents(data[:at] + value + data[at + 4 :]))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 4 * MOST_BYTES
