"""The matrices that can have adapters, by their names in transformers' model, and the choice among them.

A family's weight name table lists them, so a new family needs nothing here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmdata.errors import VlmdataError
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.weight_names.table import ParameterMap

#: Groups of the language model's matrices.
GROUPS = ("attention", "delta_net", "mlp", "shared_experts", "experts", "mtp")
#: Groups that are adapted by default, where a model has them.
_DEFAULT = frozenset(GROUPS) - {"mtp"}
#: Groups by canonical names of weights, the first that fits.
_GROUP_OF = [
    (r"vision\.(merger|deepstack_mergers\.\d+)\.linear_fc[12]", "merger"),
    (r"vision\.blocks\.\d+\.(qkv|proj|linear_fc[12])", "vision"),
    (r"language\.predictor\.(eh_proj|layer\..*(linear_\w+|local_experts\.\d+\.linear_fc[12]))", "mtp"),
    (r".*\.self_attention\.(in_proj|out_proj)", "delta_net"),
    (r".*\.self_attention\.(linear_qkv|linear_proj)", "attention"),
    (r".*\.mlp\.linear_fc[12]", "mlp"),
    (r".*\.mlp\.shared_experts\.linear_fc[12]", "shared_experts"),
    (r".*\.mlp\.experts\.local_experts\.\d+\.linear_fc[12]", "experts"),
]


class LoraError(VlmdataError):
    """Adapters do not fit the model, or each other."""


@dataclass(frozen=True)
class LoraSite:
    """A matrix that can have an adapter, or the matrices of all experts of a layer.

    Attributes:
        name: Its name in transformers' model, without ".weight".
        group: One of :data:`GROUPS`, "vision" or "merger".
        rows: Output width; of one expert.
        columns: Input width; of one expert.
        experts: Number of experts; 0 for a single matrix.
    """

    name: str
    group: str
    rows: int
    columns: int
    experts: int = 0

    def parameters(self, rank: int) -> int:
        """Number of parameters of an adapter."""
        return max(1, self.experts) * rank * (self.rows + self.columns)


def sites_of(maps: Mapping[str, ParameterMap]) -> dict[str, LoraSite]:
    """Returns the sites of a model by name, from its weight name table for weights as transformers holds them."""
    found: dict[str, LoraSite] = {}
    for canonical, entry in maps.items():
        group = group_of(canonical)
        for source in entry.sources if group else ():
            name = source.name.removesuffix(".weight")
            if source.index is None:
                rows, columns = source.shape
                found[name] = LoraSite(name, group, rows, columns)
            elif name not in found:
                # The shape of the parameter, since files may hold experts transposed.
                rows, columns = entry.shape
                found[name] = LoraSite(name, group, rows, columns, source.shape[0])
    return found


def group_of(canonical: str) -> str:
    """Returns the group of a weight by its canonical name; empty if it cannot have an adapter."""
    stem = canonical.removesuffix(".weight")
    if stem == canonical:
        return ""
    return next((group for pattern, group in _GROUP_OF if re.fullmatch(pattern, stem)), "")


def chosen(sites: Mapping[str, LoraSite], options: LoraOptions, others: Sequence[str] = ()) -> dict[str, LoraSite]:
    """Returns the sites that a run adapts.

    Args:
        sites: Those of the model.
        options: The run's.
        others: Names of weights that cannot have adapters, to explain an error.

    Raises:
        LoraError: If a target fits nothing, or routed experts would have dropout.
    """
    own = {name: site for name, site in sites.items() if site.group in GROUPS}
    names: set[str] = set()
    for target in options.targets or sorted(_DEFAULT & {site.group for site in own.values()}):
        fitting = {name for name, site in own.items() if _fits(site, target)}
        if not fitting:
            raise _unfit(target, sites, others)
        names |= fitting
    names |= {name for name, site in sites.items() if site.group in options.adapted_parts}
    found = {name: site for name, site in sites.items() if name in names}
    if not found:
        raise LoraError("lora.rank is set, but nothing of this model can have adapters")
    experts = next((name for name, site in found.items() if site.experts), None)
    if options.dropout and experts is not None:
        raise LoraError(
            f"lora.dropout is {options.dropout:g}, but adapters of routed experts ({experts}) have none, as in PEFT: "
            "set it to 0, or leave the experts out of lora.targets"
        )
    return found


def _fits(site: LoraSite, target: str) -> bool:
    """Whether a target means a site. Those of multi-token prediction must be named."""
    if site.group == "mtp" and "mtp" not in target:
        return False
    return site.group == target or any(fnmatch.fnmatchcase(site.name, each) for each in (target, f"*.{target}"))


def _unfit(target: str, sites: Mapping[str, LoraSite], others: Sequence[str]) -> LoraError:
    name = target.removesuffix(".weight")
    seen = next((each for each in sites.values() if each.group in ("vision", "merger") and _fits(each, name)), None)
    if seen is not None:
        return LoraError(
            f"lora.targets: {target!r} is in the vision tower ({seen.name}); targets are those of the language model. "
            f"--set lora.{seen.group}=lora adapts the tower's part {seen.group!r}"
        )
    fixed = [each.removesuffix(".weight") for each in others]
    if any(fnmatch.fnmatchcase(each, pattern) for each in fixed for pattern in (name, f"*.{name}")):
        why = "matches only weights that cannot have adapters (routers, embeddings, output layer, norms)"
    else:
        why = "matches nothing in this model"
    return LoraError(f"lora.targets: {target!r} {why}. There are {_listed(sites)}")


def _listed(sites: Mapping[str, LoraSite]) -> str:
    by_group: dict[str, list[str]] = {}
    for site in sites.values():
        if site.group in GROUPS:
            last = by_group.setdefault(site.group, [])
            name = site.name.rpartition(".")[2]
            if name not in last:
                last.append(name)
    return "; ".join(f"{group} ({', '.join(names)})" for group, names in by_group.items())
