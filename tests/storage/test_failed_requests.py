"""The oldest fsspec that the extras for buckets allow leaves no failed request behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem


class Failing(AsyncFileSystem):
    cachable = False

    async def _pipe_file(self, path: str, *given: Any, **options: Any) -> None:
        raise OSError(f"{path}: no")


def test_requests_that_fail_together_are_all_awaited(caplog: pytest.LogCaptureFixture) -> None:
    """Else asyncio says "Task exception was never retrieved" beside the command's own message."""
    with pytest.raises(OSError, match="no"):
        Failing().pipe({str(number): b"" for number in range(8)})
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
