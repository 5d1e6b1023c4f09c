"""Widths of a model's gates, which their kernels are compiled for. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GateWidths:
    """Widths on a rank.

    Attributes:
        delta_net: Width of a delta net's output.
        projected: Width of the projection that its gate is a part of.
        attention: Width of attention's output.
        feed_forward: Width of the dense feed-forward part's inner activation; None with experts.
    """

    delta_net: int
    projected: int
    attention: int
    feed_forward: int | None
