"""Images by path in a bucket: the dataset of the same images on disk, and failures in the ledger."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import encoded_image, tree_bytes
from tests.object_store import forget_file_systems
from tests.proxy import Request, Trouble
from tests.web import serving_files
from vlmdata import attempts
from vlmdata.errors import SourceError
from vlmdata.format.schema import IMAGE_FILES_NAME, LEDGER_NAME, MANIFEST_NAME
from vlmdata.preprocess.config import ImageConfig, MediaConfig, PreprocessConfig
from vlmdata.preprocess.recipes.file_kinds import IMAGES, VIDEOS
from vlmdata.preprocess.recipes.media import MediaLoader, require_image_root
from vlmdata.preprocess.recipes.remote_root import FetchProblem, RemoteRoot
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason

PATHS = ["a.png", "sub/b.png", "./sub/../c.png", "sub/./missing.png", "../out.png", "empty.png", "a.png", "é ü.png"]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSES", (0.01, 0.02))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for n, name in enumerate(("a.png", "sub/b.png", "c.png", "é ü.png")):
        (folder / name).write_bytes(encoded_image(seed=n))
    (folder / "empty.png").write_bytes(b"")
    (tmp_path / "out.png").write_bytes(encoded_image())
    return folder


def chats(path: Path, images: list[str]) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": f"{n}?"}]},
                {"role": "assistant", "content": f"It is {n}."},
            ]
        }
        for n, image in enumerate(images)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(source: str, out: Path, root: str | None, **options: object) -> dict[str, bytes]:
    config = PreprocessConfig(
        recipe="chat", image=ImageConfig(1024, 65536), media=MediaConfig(image_root=root), rows_per_shard=5
    )
    preprocess_dataset(open_source(source), out, config, **options)  # type: ignore[arg-type]
    return {name: data for name, data in tree_bytes(out).items() if name != MANIFEST_NAME}


def test_a_dataset_of_images_in_a_bucket_is_that_of_images_on_disk(tmp_path, object_store, images):
    rows = chats(tmp_path / "chats.jsonl", PATHS)
    there = object_store.put(images, "some/images")
    here = made(str(rows), tmp_path / "here", str(images))
    assert made(str(rows), tmp_path / "there", f"{there}/") == here
    assert len(here[LEDGER_NAME].splitlines()) == 3
    assert IMAGE_FILES_NAME in here
    # The folder of a source in a bucket is the root by default.
    object_store.put(rows, "some/images")
    assert made(f"{there}/chats.jsonl", tmp_path / "beside", None) == here


def test_a_fetch_that_fails_for_good_is_in_the_ledger_with_row_and_url(
    tmp_path, object_store, images, proxy, monkeypatch
):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore waits for seconds between its own
    forget_file_systems()
    root = object_store.put(images)
    rows = chats(tmp_path / "chats.jsonl", ["a.png", "sub/b.png", "c.png"])
    proxy.trouble = lambda number, request: Trouble(status=503) if request.path.endswith("/b.png") else None
    (line,) = made(str(rows), tmp_path / "out", root)[LEDGER_NAME].splitlines()
    rejection = json.loads(line)
    assert (rejection["row"], rejection["reason"]) == (1, "image_fetch")
    assert f"{root}/sub/b.png: 3 attempts failed" in rejection["message"]


def test_images_are_fetched_side_by_side_but_not_all_at_once(tmp_path, object_store, proxy):
    folder = tmp_path / "many"
    folder.mkdir()
    for n in range(40):
        (folder / f"{n}.png").write_bytes(encoded_image(seed=n))
    root = object_store.put(folder)
    rows = chats(tmp_path / "chats.jsonl", [f"{n}.png" for n in range(40)])
    at_once, most, lock = 0, 0, threading.Lock()

    def trouble(number: int, request: Request) -> Trouble | None:
        nonlocal at_once, most
        if not request.path.endswith(".png"):
            return None
        with lock:
            at_once += 1
            most = max(most, at_once)
        threading.Timer(0.05, leave).start()
        return Trouble(delay=0.3) if number % 10 == 0 else None

    def leave() -> None:
        nonlocal at_once
        with lock:
            at_once -= 1

    proxy.trouble = trouble
    made(str(rows), tmp_path / "out", root)
    assert 1 < most <= 16
    assert len([each for each in proxy.requests if each.path.endswith(".png")]) == 40, "each was fetched once"


def test_an_image_that_changed_since_is_found(tmp_path, object_store, images):
    root = object_store.put(images)
    rows = chats(tmp_path / "chats.jsonl", PATHS)
    before = made(str(rows), tmp_path / "out", root)
    assert made(str(rows), tmp_path / "out", root) == before
    object_store.file_system().pipe_file(f"{object_store.bucket}/sub/b.png", encoded_image(seed=9))
    made(str(rows), tmp_path / "out", root)
    changed = pq.read_table(tmp_path / "out" / "versions" / "2" / "rows.parquet")["files"].to_pylist()[-1]
    assert changed == ["sub/b.png"]


@pytest.mark.parametrize("path", ["../a.png", "sub/../../a.png", "/a.png", "s3://other/a.png", "..", "a\0.png"])
def test_a_path_may_not_leave_the_root(path):
    with pytest.raises(FetchProblem) as problem:
        RemoteRoot("s3://bucket/images").name_of(path)
    assert problem.value.reason is Reason.IMAGE_PATH
    with pytest.raises(RowRejected, match=r"image: .* is outside the image root"):
        MediaLoader("s3://bucket/images", False).load(path, "image")


class TestWebAddress:
    """An image root on a web server, where a path may be read in several ways."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Iterator[str]:
        """``tmp_path/images`` behind a server; ``tmp_path/secret.png`` is outside."""
        (tmp_path / "images" / "sub").mkdir(parents=True)
        (tmp_path / "secret.png").write_bytes(b"secret")
        for name in self.NAMES:
            (tmp_path / "images" / name).write_bytes(name.encode())

        with serving_files(tmp_path) as web:
            yield f"{web.url}/images"

    NAMES = ("a.png", "a b.png", "what?.png", "a#1.png", "100%.png", "a%20b.png", "é.png", "a+b;c&d.png", "sub/b.png")

    @pytest.mark.parametrize("name", NAMES)
    def test_a_path_is_the_name_of_a_file(self, root, name):
        assert MediaLoader(root, False).load(name, "image") == name.encode()
        assert MediaLoader(root, False).load(f"sub/../{name}", "image") == name.encode()

    @pytest.mark.parametrize(
        "path",
        [
            "%2e%2e/secret.png", "%2E%2e/secret.png", ".%2e/secret.png", "sub/%2e%2e/%2e%2e/secret.png",
            "%2e%2e%2fsecret.png", "..%2fsecret.png", "%252e%252e/secret.png", "%25252e%25252e/secret.png",
            "..\\secret.png", "..%5csecret.png", "%2525252525252e", "a.png%00", "../secret.png", "%2e%2e",
        ],
    )  # fmt: skip
    def test_a_path_that_a_server_may_read_as_leaving_the_root(self, root, path):
        with pytest.raises(RowRejected, match="is outside the image root") as rejected:
            MediaLoader(root, False).load(path, "image")
        assert rejected.value.reason is Reason.IMAGE_PATH

    @pytest.mark.parametrize("path", ["?/../secret.png", "a.png?b", "a.png#b", "#/../../secret.png"])
    def test_a_query_or_fragment_is_part_of_the_name(self, root, path):
        with pytest.raises(RowRejected) as rejected:
            MediaLoader(root, False).load(path, "image")
        assert rejected.value.reason in (Reason.MISSING_IMAGE, Reason.IMAGE_PATH)


def test_the_url_itself_is_a_path():
    assert RemoteRoot("s3://bucket/images").name_of("s3://bucket/images/a/./b.png") == "a/b.png"


@pytest.mark.parametrize("kind", [IMAGES, VIDEOS])
def test_a_file_over_the_limit_is_not_kept(object_store, kind):
    object_store.file_system().pipe_file(f"{object_store.bucket}/big.png", b"12345")
    with pytest.raises(RowRejected, match=r"big.png has more than 3 bytes") as rejected:
        MediaLoader(object_store.url, False).load("big.png", "image", replace(kind, most_bytes=3))
    assert rejected.value.reason is kind.too_large


def test_a_root_without_anything_below_it_is_refused(object_store):
    object_store.file_system().pipe_file(f"{object_store.bucket}/images/a.png", b"x")
    require_image_root(f"{object_store.url}/images/")
    with pytest.raises(SourceError, match="nothing found below it"):
        require_image_root(f"{object_store.url}/imags")
