"""Fills parameters of which a rank may hold only some rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def assign(parameter: Any, value: Tensor) -> None:
    """Copies a value to a parameter; to a fully sharded one (:mod:`model.parallel.sharding`), the rows of this rank.

    Args:
        parameter: The parameter.
        value: Of the parameter's whole shape.
    """
    start: int | None = getattr(parameter, "first_row", None)
    if start is None:
        parameter.copy_(value)
    else:
        rows = parameter.to_local()
        rows.copy_(value[start : start + rows.shape[0]])
