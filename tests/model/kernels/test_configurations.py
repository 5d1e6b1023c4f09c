"""Configurations of the delta rule's kernels: which ones Triton's autotuner keeps, and which heads are refused."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from vlmdata.model.kernels import configurations
from vlmdata.model.kernels.configurations import CANDIDATES, HOPPER, Configuration, choose_configurations, miscompiled

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


def tuner(*configs: Configuration) -> Any:
    return SimpleNamespace(
        configs=[
            SimpleNamespace(num_warps=each.warps, num_stages=each.stages, kwargs=dict(each.blocks)) for each in configs
        ]
    )


class TestTheChoice:
    @pytest.fixture
    def tuners(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Autotuners of a kernel with all candidates and another, of an unknown one, and of one with others only."""
        (first, candidates), (second, _) = list(CANDIDATES.items())[:2]
        other = Configuration(64)
        found = {first: tuner(other, *candidates), "new_kernel": tuner(other, *candidates), second: tuner(other)}
        monkeypatch.setattr(configurations, "autotuners", lambda: found)
        return found

    @needs_triton
    def test_leaves_the_candidates_of_a_known_kernel(self, tuners: dict[str, Any]) -> None:
        first, second = list(CANDIDATES)[:2]
        assert choose_configurations(128, 128, HOPPER) == sorted(["new_kernel", second])
        left = tuners[first].configs
        assert len(left) == len(CANDIDATES[first])
        assert all((each.num_warps, each.num_stages, each.kwargs) in CANDIDATES[first] for each in left)
        assert len(tuners["new_kernel"].configs) == 1 + len(left)
        assert len(tuners[second].configs) == 1, "a configuration that the kernel does not have is not invented"

    @pytest.mark.parametrize(("width", "capability"), [(256, HOPPER), (128, (10, 0)), (128, (8, 0))])
    def test_is_the_autotuners_where_the_table_may_not_fit(
        self, tuners: dict[str, Any], width: int, capability: tuple[int, int]
    ) -> None:
        before = {name: list(each.configs) for name, each in tuners.items()}
        assert choose_configurations(128, width, capability) == sorted(tuners)
        assert {name: each.configs for name, each in tuners.items()} == before


@pytest.mark.parametrize(
    ("widths", "capability", "version", "wrong"),
    [
        ((64, 64), HOPPER, "3.6.0", True),
        ((128, 33), HOPPER, "3.7.0+git1", True),
        ((64, 64), HOPPER, "3.7.1", False),
        ((64, 64), HOPPER, "3.10.0", False),
        ((32, 128), HOPPER, "3.6.0", False),
        ((64, 64), (10, 0), "3.6.0", False),
    ],
)
def test_heads_for_which_triton_is_wrong(
    widths: tuple[int, int], capability: tuple[int, int], version: str, wrong: bool
) -> None:
    assert miscompiled(*widths, capability, version) is wrong
