"""A folder and an object store keep the same promises."""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.object_store import ObjectStore
from vlmdata.errors import ResourceError, UsageError
from vlmdata.format.atomic import temporary_path
from vlmdata.storage import LockedError, Store, open_store
from vlmdata.storage.upload import Upload

#: The smallest that S3 allows, and more than two of them.
PART_BYTES = 5 << 20
LARGE = os.urandom(1 << 20) * 12


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of multipart uploads."""
    monkeypatch.setattr("vlmdata.storage.upload.PART_BYTES", PART_BYTES)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        (tmp_path / "data").mkdir()
        return open_store(tmp_path / "data")
    bucket: ObjectStore = request.getfixturevalue("object_store")
    return open_store(f"{bucket.url}/some/data/")


def everything(store: Store, folder: str = "") -> dict[str, bytes]:
    """All files below a folder."""
    found = {}
    for name, size in store.listing(folder).items():
        path = f"{folder}/{name}" if folder else name
        found |= everything(store, path) if size is None else {path: store.read(path)}
    return found


def test_what_is_put_is_there_under_its_name(store: Store) -> None:
    store.prepare("sub")
    assert everything(store) == {}
    store.put("a", b"1")
    store.put("sub/b", b"")
    store.put("a", b"22")
    assert everything(store) == {"a": b"22", "sub/b": b""}
    assert dict(store.listing()) == {"a": 2, "sub": None}
    assert (store.size("a"), store.size("sub/b"), store.size("c"), store.size("sub")) == (2, 0, None, None)
    with pytest.raises(FileNotFoundError):
        store.read("c")
    assert store.below("sub").read("b") == b""
    assert pickle.loads(pickle.dumps(store)).read("a") == b"22"
    assert store.path("a") == f"{store}/a"
    store.prepare("versions/3")
    store.put("versions/3/c", b"")
    beside = store.below("versions/3")
    for name in ("../../sub", "../../sub/", "../../"):
        assert beside.listing(name).keys() == ({"b"} if "sub" in name else {"a", "sub", "versions"})
    assert beside.read("../../sub/b") == b""


def test_a_large_file_is_there_whole_or_not_at_all(store: Store) -> None:
    with store.writing("large") as file:
        for start in range(0, len(LARGE), 3_000_000):
            file.write(memoryview(LARGE)[start : start + 3_000_000])
            assert "large" not in store.listing()
        assert file.tell() == len(LARGE)
        file.finish()
        assert store.size("large") is None
    assert store.sha256("large") == hashlib.sha256(LARGE).hexdigest()
    assert store.sha256("none") == ""

    def stop(name: str, content: bytes) -> None:
        with store.writing(name) as file:
            file.write(content)
            raise InterruptedError

    for name, content in (("large", LARGE), ("large", b"x"), ("other", LARGE), ("other", b"x")):
        with pytest.raises(InterruptedError):
            stop(name, content)
    assert dict(store.listing()) == {"large": len(LARGE)}


@pytest.mark.parametrize("new", [LARGE[::-1], b"new"], ids=["large", "small"])
@pytest.mark.parametrize("arrived", [False, True], ids=["request lost", "response lost"])
def test_an_older_object_of_equal_size_is_not_taken_for_the_new_one(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, new: bytes, arrived: bool
) -> None:
    """A completion that failed may have arrived all the same: the object's content tells."""
    store = open_store(f"{object_store.url}/data")
    store.put("shard", bytes(len(new)))
    complete = Upload.complete

    def fails(self: Upload) -> None:
        if arrived:
            complete(self)
        raise ResourceError("the connection was cut")

    def write() -> None:
        with store.writing("shard") as file:
            file.write(new)

    monkeypatch.setattr(Upload, "complete", fails)
    if arrived:
        write()
        assert store.read("shard") == new
        return
    with pytest.raises(ResourceError, match="the connection was cut"):
        write()
    assert store.read("shard") == bytes(len(new))


def test_many_files_are_read_in_order(store: Store) -> None:
    names = [f"{n:03}" for n in range(100)]
    for name in names:
        store.put(name, name.encode())
    assert [content.decode() for content in store.read_all(reversed(names))] == names[::-1]
    with pytest.raises(FileNotFoundError):
        list(store.read_all(["000", "missing", "001"]))


def test_only_one_of_several_creates_a_file(store: Store) -> None:
    made: list[int] = []
    starting = threading.Barrier(6)

    def create(number: int) -> None:
        starting.wait()
        if store.create("lock", str(number).encode()):
            made.append(number)

    # A process has one temporary name for a file, so in a folder they go one after another.
    numbers = range(6)
    threads = [threading.Thread(target=create, args=(number,)) for number in numbers]
    if store.keeps_times:
        made = [number for number in numbers if store.create("lock", str(number).encode())]
    else:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1
    assert store.read("lock") == str(made[0]).encode()


def test_files_are_moved_and_removed(store: Store) -> None:
    store.prepare("sub/deep")
    for name in ("a", "sub/b", "sub/c", "sub/deep/d"):
        store.put(name, name.encode())
    store.move("sub/b", "a")
    assert everything(store) == {"a": b"sub/b", "sub/c": b"sub/c", "sub/deep/d": b"sub/deep/d"}
    store.delete(["a", "none", "sub/none"])
    store.delete_folder("sub", keep=["c"])
    assert everything(store) == {"sub/c": b"sub/c"}
    store.put("e", b"")
    store.delete_folder("", keep=["sub"])
    assert everything(store) == {"sub/c": b"sub/c"}
    store.delete_folder("sub")
    store.delete_folder("none")
    store.delete([])
    assert dict(store.listing()) == {}


def test_a_folder_is_replaced_as_one(store: Store) -> None:
    for content in (b"old", b"new"):
        with store.writing_folder("tokenizer") as folder:
            (folder / content.decode()).mkdir()
            (folder / content.decode() / "x").write_bytes(content)
    assert everything(store) == {"tokenizer/new/x": b"new"}

    def stop() -> None:
        with store.writing_folder("tokenizer") as folder:
            (folder / "y").write_bytes(b"")
            raise InterruptedError

    with pytest.raises(InterruptedError):
        stop()
    assert everything(store) == {"tokenizer/new/x": b"new"}


def test_files_can_be_had_in_a_local_folder(store: Store) -> None:
    store.prepare("sub")
    store.put("a", b"1")
    store.put("sub/b", b"2")
    with store.local("a", "sub/b", "none") as folder:
        assert (folder / "a").read_bytes() + (folder / "sub" / "b").read_bytes() == b"12"
        assert not (folder / "none").exists()
    assert store.read("a") == b"1"


def test_a_second_run_is_kept_out_until_the_first_ends(store: Store) -> None:
    store.prepare(".progress")
    with store.lock(".progress/lock") as lock:
        lock.check()
        with pytest.raises(LockedError), store.lock(".progress/lock"):
            pass
        lock.check()
    with store.lock(".progress/lock"):
        pass


def test_what_killed_processes_left_is_removed(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store.put("a", b"")
    if store.keeps_times:
        folder = Path(str(store))
        temporary_path(folder / "shard-000000.tar").write_bytes(b"half")
        temporary_path(folder / "tokenizer").mkdir()
        assert {store.final_name(name) for name in store.listing()} == {"a", "shard-000000.tar", "tokenizer"}
        store.tidy()
        assert [path.name for path in folder.iterdir()] == ["a"]
        return
    files = request.getfixturevalue("object_store").file_system()
    bucket, key = str(store).removeprefix("s3://").split("/", 1)
    foreign = {"another", f"{key}2/shard-000000.tar", f"{key}/v2/shard-000000.tar", f"{key}/.progress/v2/x"}
    for name in (f"{key}/shard-000000.tar", f"{key}/.progress/x", *foreign):
        files.call_s3("create_multipart_upload", Bucket=bucket, Key=name)
    store.tidy(".progress")
    left = files.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]
    assert {each["Key"] for each in left} == foreign


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("memory://bucket/data", "memory:// does not promise that. Give a local folder"),
            ("sftp://host/data", "sftp:// does not promise that"),
            ("s3://bucket/a*", "no dataset can be made at a URL with *"),
        ],
    )
    def test_of_other_kinds_are_refused(self, url: str, words: str) -> None:
        with pytest.raises(UsageError) as caught:
            open_store(url)
        assert str(caught.value).startswith(f"{url}: ")
        assert words in str(caught.value)

    def test_of_files_are_folders(self, tmp_path: Path) -> None:
        assert str(open_store(f"file://{tmp_path}/")) == str(tmp_path)

    def test_without_a_bucket_are_reported(self, object_store: ObjectStore) -> None:
        store = open_store("s3://no-such-bucket/data")
        assert dict(store.listing()) == {}
        write: list[Callable[[], object]] = [lambda: store.put("a", b""), lambda: store.create("a", b"")]
        for each in write:
            with pytest.raises(
                ResourceError, match=r"s3://no-such-bucket/data/a: cannot be written: .*Is there a buck"
            ):
                each()
