"""Writes the demo as a Hugging Face dataset in one parquet file, which is read like other sources."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import batched
from pathlib import Path
from typing import Any, Literal, get_args

import filelock
import platformdirs
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.format.atomic import sync
from vlmdata.preprocess.demo.chat import demo_conversation
from vlmdata.preprocess.demo.row import DEMO_VERSION, DemoReceipt, demo_receipt

DemoLayout = Literal["cord_v2", "chat"]
Progress = Callable[[int], None]
"""Called after each row with the number of rows done."""
DATA_FILE = "data/train-00000-of-00001.parquet"
CACHE_VARIABLE = "VLMDATA_CACHE"
_ROWS_PER_GROUP = 100


def ensure_demo_dataset(
    layout: DemoLayout, rows: int, cache_dir: Path | None = None, progress: Progress | None = None
) -> Path:
    """Returns a cached demo dataset, in ``demo/`` of the cache; draws it first if there is none.

    The parquet file has the same bytes on every run with the same library versions. Several processes may call this at
    once: one draws, the others wait. A process killed while drawing leaves nothing that looks like a dataset. A longer
    dataset starts with the rows of a shorter one.

    The layout ``cord_v2`` has the columns ``image`` and ``ground_truth``; ``chat`` has ``messages`` and ``images``. The
    root of the cache is ``cache_dir``, else ``$VLMDATA_CACHE``, else the user's cache directory for ``vlmdata``. A
    ValueError if ``layout`` is unknown, or ``rows`` is less than 1.
    """
    if layout not in get_args(DemoLayout):
        raise ValueError(f"unknown demo layout {layout!r}; known: {', '.join(get_args(DemoLayout))}")
    if rows < 1:
        raise ValueError(f"a demo dataset has 1 row or more, got {rows}")
    root = (cache_dir or Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("vlmdata"))) / "demo"
    final = root / f"v{DEMO_VERSION}-{layout}-{rows}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(root / f".{final.name}.lock"):
        if not final.is_dir():
            partial = root / f".{final.name}.partial"
            # Only the holder of the lock gets here: existing files are left over from a process that died.
            shutil.rmtree(partial, ignore_errors=True)
            (partial / DATA_FILE).parent.mkdir(parents=True)
            _write_parquet(partial / DATA_FILE, layout, rows, progress)
            for folder in ((partial / DATA_FILE).parent, partial):
                sync(folder)
            partial.rename(final)
            sync(root)
    return final


def _write_parquet(path: Path, layout: DemoLayout, rows: int, progress: Progress | None) -> None:
    schema = _schema(layout)
    with path.open("wb") as file:
        # Images are already compressed, and all rows differ.
        with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
            for group in batched(_rows(layout, rows, progress), _ROWS_PER_GROUP):
                writer.write_table(pa.Table.from_pylist(list(group), schema=schema))
        file.flush()
        os.fsync(file.fileno())


def _schema(layout: DemoLayout) -> pa.Schema:
    """Returns the columns, with metadata that gives ``datasets`` their features."""
    # Imported here, because it takes seconds and drawing does not need it.
    from datasets import Features, Image, List, Value

    text = Value("string")
    if layout == "cord_v2":
        return Features({"image": Image(), "ground_truth": text}).arrow_schema
    messages = List({"role": text, "content": List({"type": text, "text": text}), "reasoning_content": text})
    return Features({"messages": messages, "images": List(Image())}).arrow_schema


def _rows(layout: DemoLayout, rows: int, progress: Progress | None) -> Iterator[dict[str, Any]]:
    for row in range(rows):
        if layout == "cord_v2":
            drawn = demo_receipt(row)
            yield {"image": _image(row, drawn), "ground_truth": drawn.ground_truth}
        else:
            messages, shown = demo_conversation(row)
            images = [_image(number, demo_receipt(number)) for number in shown]
            yield {"messages": messages, "images": images}
        if progress is not None:
            progress(row + 1)


def _image(row: int, drawn: DemoReceipt) -> dict[str, Any]:
    ending = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[drawn.file.container]
    return {"bytes": drawn.file.data, "path": f"receipt-{row:06d}.{ending}"}
