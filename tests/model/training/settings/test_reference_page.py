"""``docs/training-reference.md`` lists every setting with its default, and marks those without effect on results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vlmdata.model.training.settings.config import WITHOUT_EFFECT_ON_RESULTS, TrainConfig, flattened

PAGE = Path(__file__).parents[4] / "docs" / "training-reference.md"
ROW = re.compile(r"^\| `([a-z]+\.[a-z0-9_]+)`( \*)? \| ([^|]+) \|", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    """Name, mark and default of each row of the tables of settings."""
    return ROW.findall(PAGE.read_text().partition("## Settings")[2].partition("## Exit codes")[0])


def written(value: Any) -> str:
    """A default as the page writes it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    return "empty" if value == [] else f"{value:g}"


def test_every_setting_is_listed_with_its_default() -> None:
    listed = {name: default.strip() for name, _, default in rows()}
    assert listed == {name: written(value) for name, value in flattened(TrainConfig().to_dict())}


def test_settings_without_effect_on_results_are_marked() -> None:
    marked = {name for name, star, _ in rows() if star}
    assert marked == WITHOUT_EFFECT_ON_RESULTS
