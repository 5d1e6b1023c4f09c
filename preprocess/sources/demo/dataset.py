"""Writes the demo as a Hugging Face dataset in one parquet file, to be read like any other source."""

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import batched
from pathlib import Path
from typing import Any, Literal, get_args

import filelock
import platformdirs
import pyarrow as pa
import pyarrow.parquet as pq

from preprocess.sources.demo.chat import demo_conversation
from preprocess.sources.demo.receipt import DEMO_VERSION, DemoReceipt, demo_receipt

DemoLayout = Literal["cord_v2", "chat"]
Progress = Callable[[int], None]
"""Called after each row with the number of rows done."""

DATA_FILE = "data/train-00000-of-00001.parquet"
CACHE_VARIABLE = "VLMDATA_CACHE"
_ROWS_PER_GROUP = 100


def write_demo_dataset(
    directory: Path, layout: DemoLayout, rows: int, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Draws rows and writes them below ``directory``, with a README beside; memory holds one row group.

    The parquet file appears under its name only when it is complete, and is the same byte for byte on every run with
    the same library versions.

    Args:
        directory: made if missing.
        layout: ``cord_v2`` has the columns ``image`` and ``ground_truth``; ``chat`` has ``messages`` and ``images``.
        rows: how many, 1 or more; a longer dataset begins with the rows of a shorter one.
        seed: another seed gives another dataset.
        progress: see ``Progress``.

    Returns:
        The parquet file.

    Raises:
        ValueError: ``layout`` is unknown or ``rows`` is less than 1.
    """
    _check(layout, rows)
    target = directory / DATA_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _write_parquet(partial, layout, rows, seed, progress)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    (directory / "README.md").write_text(_readme(layout, rows, seed), encoding="utf-8")
    for folder in (target.parent, directory):
        _sync(folder)
    return target


def ensure_demo_dataset(
    layout: DemoLayout,
    rows: int,
    seed: int = 0,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Returns a cached demo dataset, drawing it first where there is none.

    Several processes may ask at once: one draws, the others wait. A process killed while drawing leaves nothing that
    could be taken for a dataset.

    Args:
        layout: as for ``write_demo_dataset``.
        rows: as for ``write_demo_dataset``.
        seed: as for ``write_demo_dataset``.
        cache_dir: root of the cache; by default ``$VLMDATA_CACHE``, else the user's cache directory for ``vlmdata``.
        progress: as for ``write_demo_dataset``; not called when the dataset is there already.

    Returns:
        The dataset's directory, below ``demo/`` in the cache.

    Raises:
        ValueError: as for ``write_demo_dataset``.
    """
    _check(layout, rows)
    root = (cache_dir or Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("vlmdata"))) / "demo"
    final = root / f"v{DEMO_VERSION}-{layout}-{rows}-seed{seed}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(root / f".{final.name}.lock"):
        if not final.is_dir():
            partial = root / f".{final.name}.partial"
            # Only the holder of the lock is ever here, so what lies about was left by one that died.
            shutil.rmtree(partial, ignore_errors=True)
            write_demo_dataset(partial, layout, rows, seed, progress)
            partial.rename(final)
            _sync(root)
    return final


def _check(layout: str, rows: int) -> None:
    known = get_args(DemoLayout)
    if layout not in known:
        raise ValueError(f"unknown demo layout {layout!r}; known: {', '.join(known)}")
    if rows < 1:
        raise ValueError(f"a demo dataset has 1 row or more, got {rows}")


def _write_parquet(path: Path, layout: DemoLayout, rows: int, seed: int, progress: Progress | None) -> None:
    schema = _schema(layout)
    with path.open("wb") as file:
        # Images are compressed already, and no two rows are alike.
        with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
            for group in batched(_rows(layout, rows, seed, progress), _ROWS_PER_GROUP):
                writer.write_table(pa.Table.from_pylist(list(group), schema=schema))
        file.flush()
        os.fsync(file.fileno())


def _schema(layout: DemoLayout) -> pa.Schema:
    """The columns, with the metadata that tells ``datasets`` their features."""
    # Imported here: it takes seconds, and drawing alone does not need it.
    from datasets import Features, Image, List, Value

    if layout == "cord_v2":
        return Features({"image": Image(), "ground_truth": Value("string")}).arrow_schema
    text = Value("string")
    content = List({"type": text, "text": text})
    messages = List({"role": text, "content": content, "reasoning_content": text})
    return Features({"messages": messages, "images": List(Image())}).arrow_schema


def _rows(layout: DemoLayout, rows: int, seed: int, progress: Progress | None) -> Iterator[dict[str, Any]]:
    for row in range(rows):
        yield _cord_row(row, seed) if layout == "cord_v2" else _chat_row(row, seed)
        if progress is not None:
            progress(row + 1)


def _cord_row(row: int, seed: int) -> dict[str, Any]:
    drawn = demo_receipt(row, seed)
    return {"image": _image(drawn), "ground_truth": drawn.ground_truth}


def _chat_row(row: int, seed: int) -> dict[str, Any]:
    conversation = demo_conversation(row, seed)
    return {
        "messages": [turn.as_message() for turn in conversation.turns],
        "images": [_image(demo_receipt(number, seed)) for number in conversation.receipts],
    }


def _image(drawn: DemoReceipt) -> dict[str, Any]:
    ending = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[drawn.image_format]
    return {"bytes": drawn.image_bytes, "path": f"receipt-{drawn.row:06d}.{ending}"}


def _readme(layout: DemoLayout, rows: int, seed: int) -> str:
    columns = {
        "cord_v2": "`image` and `ground_truth`, as in CORD-V2",
        "chat": "`messages` (role, content, reasoning_content) and `images`",
    }
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---

# Demo receipts

{rows} rows of made-up receipts in the layout `{layout}`: {columns[layout]}. Drawn by vlmdata's demo source,
version {DEMO_VERSION}, seed {seed}, with Pillow {version("pillow")} and numpy {version("numpy")}.
Shops, people and purchases are invented. Some images are in unusual modes (palette, 1-bit, CMYK, 16-bit, transparent,
rotated by EXIF) on purpose.
"""


def _sync(directory: Path) -> None:
    """Makes names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
