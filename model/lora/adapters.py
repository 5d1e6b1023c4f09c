"""Low-rank adapters of linear layers and of experts.

A layer's weight may join several matrices of transformers' model, such as queries, keys and values. Each of them has
its own adapter there, so a layer has one input matrix with r rows for each, and one output matrix with the rows of
all, in transformers' order.

Shapes: input width k, output width n, rank r, adapted matrices p, their rows N, experts e, tokens t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdata.model.lora.sites import LoraSite
from vlmdata.model.network.grouped import ExpertRows
from vlmdata.model.network.wrapping import ExpertsWrapper, LinearWrapper

#: An adapter as PEFT has it: input matrix (r, k) and output matrix (n, r); of experts (e, r, k) and (e, n, r).
Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AdapterForm:
    """What all adapters share."""

    rank: int
    scale: float  # factor of the product
    dropout: float


class LinearAdapter(LinearWrapper):
    """Adapters of the matrices that a layer's weight joins.

    Args:
        sites: The adapted matrices, in the order in which the weight joins them.
        form: Rank, scale and dropout.
        like: The layer's weight: dtype and device.
        rows: int64 (n,): for each row of this rank's weight its row of ``b``.
        owner: int64 (n,): for each of these rows the number of its matrix; -1 if that is not adapted.
        columns: First and last of this rank's columns; None for all.
    """

    def __init__(
        self,
        sites: tuple[LoraSite, ...],
        form: AdapterForm,
        like: Tensor,
        rows: Tensor,
        owner: Tensor,
        columns: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.adapted, self.form, self.columns = sites, form, columns
        of: Any = {"dtype": like.dtype, "device": like.device}
        self.a = nn.Parameter(torch.empty(len(sites) * form.rank, sites[0].columns, **of))
        self.b = nn.Parameter(torch.zeros(sum(site.rows for site in sites), form.rank, **of))
        self.narrowing = frozenset(["a"])
        whole = owner.min() >= 0 and len(sites) == 1
        mask = None if whole else (owner[:, None] == torch.arange(len(sites))).to(like.dtype)
        same = len(rows) == len(self.b) and bool((rows == torch.arange(len(rows))).all())
        index = torch.device("cpu") if like.is_meta else like.device
        # Not part of the state: both follow from the layout.
        self.register_buffer("order", None if same else rows.clamp(min=0).to(index), persistent=False)
        self.register_buffer("mask", None if mask is None else mask.to(index), persistent=False)

    def narrow(self, x: Tensor) -> Tensor:
        """Multiplies the dropped-out input by the input matrices: (…, p * r)."""
        if self.form.dropout and self.training:
            x = F.dropout(x, self.form.dropout)
        return F.linear(x, self.a if self.columns is None else self.a[:, slice(*self.columns)])

    def widen(self, narrow: Tensor, out: Tensor) -> Tensor:
        """Adds the products with the output matrices: (…, n)."""
        width = out.shape[-1]
        flat = torch.addmm(
            out.reshape(-1, width), narrow.reshape(-1, narrow.shape[-1]), self._wide(self.b).T, alpha=self.form.scale
        )
        return flat.view(out.shape)

    def _wide(self, b: Tensor) -> Tensor:
        """Returns the output matrices in the layer's order, each in its own columns: (n, p * r)."""
        order: Any = self.order
        mask: Any = self.mask
        rows = b if order is None else b.index_select(0, order)
        return rows if mask is None else (rows[:, None] * mask[:, :, None]).flatten(1)

    def added(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns what whole factors add to the layer's weight, float32 (n, k)."""
        return self.form.scale * (self._wide(b.float()) @ a.float())

    def split(self, a: Tensor, b: Tensor) -> dict[str, Factors]:
        """Returns the factors of each matrix by name."""
        sizes = [site.rows for site in self.adapted]
        parts = zip(a.split(self.form.rank), b.split(sizes), strict=True)
        return {site.name: part for site, part in zip(self.adapted, parts, strict=True)}

    @torch.no_grad()
    def fill(self, factors: Mapping[str, Factors]) -> None:
        """Sets the parameters from the factors of each matrix by name."""
        self.a.copy_(torch.cat([factors[site.name][0] for site in self.adapted]))
        self.b.copy_(torch.cat([factors[site.name][1] for site in self.adapted]))


class ExpertAdapters(ExpertsWrapper):
    """Adapters of the experts of a layer that a rank holds.

    Args:
        sites: By name of the layer in an expert, "linear_fc1" or "linear_fc2".
        form: Rank, scale and dropout, which must be 0.
        like: A weight of an expert: dtype and device.
        experts: Numbers of the first expert and of the one after the last.
    """

    def __init__(
        self, sites: Mapping[str, LoraSite], form: AdapterForm, like: Tensor, experts: tuple[int, int]
    ) -> None:
        super().__init__()
        assert not form.dropout
        self.sites, self.form, self.experts = dict(sites), form, experts
        self.adapted = tuple(sites.values())
        count = experts[1] - experts[0]
        of: Any = {"dtype": like.dtype, "device": like.device}
        for layer, site in sites.items():
            self.register_parameter(f"{layer}_a", nn.Parameter(torch.empty(count, form.rank, site.columns, **of)))
            self.register_parameter(f"{layer}_b", nn.Parameter(torch.zeros(count, site.rows, form.rank, **of)))

    def of_one(self, layer: str, expert: int, x: Tensor, out: Tensor) -> Tensor:
        """Adds the product of one expert's adapter."""
        if layer not in self.sites:
            return out
        a, b = self.factors(layer)
        return out + self.form.scale * F.linear(F.linear(x, a[expert]), b[expert])

    def of_all(self, layer: str, counts: Any, x: Tensor, out: Tensor) -> Tensor:
        """Adds the products of all experts' adapters, in two grouped products."""
        if layer not in self.sites:
            return out
        a, b = self.factors(layer)
        if not len(x):
            return out + 0.0 * (a.sum() + b.sum())  # all parameters get a gradient on each rank
        ends = ExpertRows.of(counts, x.device).ends
        narrow = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
        return torch.add(out, F.grouped_mm(narrow, b.transpose(1, 2), offs=ends), alpha=self.form.scale)

    def factors(self, layer: str) -> Factors:
        """Returns the factors of this rank's experts, (e, r, k) and (e, n, r)."""
        return self.get_parameter(f"{layer}_a"), self.get_parameter(f"{layer}_b")

    @torch.no_grad()
    def fill(self, factors: Mapping[str, Factors]) -> None:
        """Sets the parameters from the factors of all experts by name of the site."""
        for layer, site in self.sites.items():
            for own, whole in zip(self.factors(layer), factors[site.name], strict=True):
                own.copy_(whole[slice(*self.experts)])
