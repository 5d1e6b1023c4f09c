"""One dataset, made by every engine and in parts, from disk and from S3, to disk and to S3: the same bytes.

Each pair of source, target and engine occurs, but for Ray and a disk, which the tests of Ray have; the runs with all
three combinations would take three times as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.conftest import cord_row, tree_bytes, write_cord_parquet
from tests.object_store import ObjectStore
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.engines.base import load_engine
from vlmdata.preprocess.run.claim import Part
from vlmdata.preprocess.run.dataset import RunResult, preprocess_dataset, preprocess_part
from vlmdata.preprocess.run.finish import finish_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.remote import auditable

pytestmark = pytest.mark.slow

ROWS, PARTS = 40, 3
#: Source, target, and what makes the dataset.
WAYS = (
    ("disk", "disk", "local"),
    ("disk", "s3", "parts"),
    ("s3", "disk", "parts"),
    ("s3", "s3", "local"),
    ("s3", "s3", "ray"),
)
CONFIG = PreprocessConfig(image=ImageConfig(1024, 65_536), rows_per_shard=6)


@pytest.fixture
def new_workers(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers started by the engines from now on, with the S3 server in their environment."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    forkserver._forkserver._stop()  # that of earlier tests keeps their environment
    yield
    forkserver._forkserver._stop()
    ray.shutdown()


def make_in_parts(spec: str, place: str) -> None:
    for number in (2, 3, 1):
        preprocess_part(Part(number, PARTS), open_source(spec), place, CONFIG)
    assert isinstance(finish_dataset(place), RunResult)


def make_with(engine: str, spec: str, place: str) -> None:
    workers = {"local": 2, "ray": 1}  # a worker of Ray costs 4 s
    preprocess_dataset(open_source(spec), place, CONFIG, workers=workers[engine], engine=load_engine(engine))


def files_of(place: str, bucket: ObjectStore) -> dict[str, bytes]:
    """All files of a dataset, its manifest as what does not depend on the place of the source."""
    if place.startswith("s3://"):
        files, root = bucket.file_system(), place.removeprefix("s3://")
        found = {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}
    else:
        found = tree_bytes(Path(place))
    manifest: dict[str, Any] = json.loads(found["manifest.json"])
    del manifest["source"]
    return found | {"manifest.json": json.dumps(manifest).encode()}


def test_the_bytes_do_not_depend_on_engine_parts_or_places(
    object_store: ObjectStore, new_workers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMDATA_CACHE", str(tmp_path / "cache"))
    rows = [cord_row(n, width=48, height=48) for n in range(ROWS)]
    rows[13]["ground_truth"] = rows[33]["ground_truth"] = "{"
    on_disk = write_cord_parquet(tmp_path / "source" / "train.parquet", rows)
    made: dict[str, dict[str, bytes]] = {}
    manifests: dict[str, set[bytes]] = {}
    sources = {"disk": str(on_disk), "s3": object_store.put(on_disk, "source")}
    targets = {"disk": str(tmp_path / "made"), "s3": f"{object_store.url}/made"}
    for source, target, how in WAYS:
        place = f"{targets[target]}/{source}-{how}"
        if how == "parts":
            make_in_parts(sources[source], place)
        else:
            make_with(how, sources[source], place)
        made[place] = files_of(place, object_store)
        with auditable(place) as (directory, open_shard):
            assert verify_dataset(directory, open_shard=open_shard).faults == [], place
            manifests.setdefault(source, set()).add((directory / "manifest.json").read_bytes())
    assert len(made) == len(WAYS)
    first, *others = made
    assert len(made[first]["rejected.jsonl"].splitlines()) == 2
    for other in others:
        assert made[other] == made[first], other
    assert [len(equal) for equal in manifests.values()] == [1, 1]  # from one place, manifests are the same bytes
