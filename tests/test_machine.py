"""Resources that systems name in different ways."""

from __future__ import annotations

import os
import resource
import sys

import pytest

from vlmdata.machine import available_cores, free_descriptors, open_file_limit, raise_open_file_limit


@pytest.mark.parametrize(("now", "expected"), [(256, 10240), (65536, 65536)])
def test_a_mac_grants_fewer_files_than_it_names(monkeypatch: pytest.MonkeyPatch, now: int, expected: int) -> None:
    limits = [now, resource.RLIM_INFINITY]

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    raise_open_file_limit()
    assert open_file_limit() == expected


def test_open_files_are_counted() -> None:
    before = free_descriptors()
    file = os.open(os.devnull, os.O_RDONLY)
    after = free_descriptors()
    os.close(file)
    assert before is not None
    assert after == before - 1 or open_file_limit() == sys.maxsize


def test_cores_are_counted_where_none_are_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert available_cores() == 12
