"""The dataset card: identity, totals, distributions, extremes and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.format.dataset import VlmDataset
from vlmdata.format.ledger import Rejection, first_rejections
from vlmdata.format.manifest import Totals
from vlmdata.format.schema import LEDGER_NAME, SELECTED
from vlmdata.format.selection import SELECTION, origin
from vlmdata.format.source_columns import source_types
from vlmdata.inspect.findings import COUNTED, KINDS, ContentCheck, IndexFindings, Severity
from vlmdata.inspect.histogram import Histogram, histogram
from vlmdata.inspect.tokens import TokenTexts

#: Default number of samples whose tokens the card checks; takes a second or two.
DEFAULT_CHECK = 1000
EXAMPLES = 5
_LISTED = 1000


@dataclass(frozen=True)
class TokenizerCard:
    """The tokenizer: its name, sha256 of vocabulary and template, and number of ids."""

    name: str
    fingerprint: str
    chat_template: str
    vocab_size: int


@dataclass(frozen=True)
class Extreme:
    """A sample at the end of a distribution; the value is in tokens or patches, or a share."""

    key: str
    index: int
    source_row: int
    value: float


@dataclass(frozen=True)
class Extremes:
    """The samples at one end of one distribution, the most extreme first."""

    name: str
    title: str
    kind: str
    samples: tuple[Extreme, ...]


@dataclass(frozen=True)
class RejectGroup:
    """Rejected rows of one reason."""

    reason: str  # as in the ledger
    count: int
    examples: tuple[tuple[int, str], ...]  # (source row, message) of the first rows


@dataclass(frozen=True)
class FindingExample:
    """A sample with a finding."""

    key: str
    index: int
    source_row: int
    message: str


@dataclass(frozen=True)
class FindingGroup:
    """All findings of one kind."""

    kind: str
    severity: Severity
    meaning: str
    count: int  # number of samples with it
    examples: tuple[FindingExample, ...]  # the worst samples, or the first
    samples: tuple[int, ...]  # positions of these samples in the same order, at most 1,000


@dataclass(frozen=True)
class DatasetCard:
    """Overview of a dataset. Units: tokens, patches, images, bytes."""

    directory: str
    fingerprint: str  # sha256 of its whole content
    config_hash: str  # sha256 of its configuration
    created_by: str
    schema_version: str
    features: tuple[str, ...]  # that a reader must support
    source: Mapping[str, Any]  # identity of the source
    source_name: str  # short form of the source
    options: Mapping[str, Any]  # of preprocessing
    tokenizer: TokenizerCard
    shards: int
    totals: Totals
    histograms: tuple[Histogram, ...]  # of length, target share, images and patches per sample, aspect ratio per image
    rejects: tuple[RejectGroup, ...]  # rejected rows by reason, the most frequent first
    extremes: tuple[Extremes, ...]  # the samples at the ends of the distributions
    findings: tuple[FindingGroup, ...]  # the worst first
    checked: int  # samples whose tokens were checked; the index was checked for all
    source_columns: Mapping[str, str] = field(default_factory=dict)  # Arrow type of each kept column of the source
    #: Number, parent and changed rows of a version after the first; empty for the first.
    version: Mapping[str, Any] = field(default_factory=dict)


def describe_dataset(dataset: VlmDataset, *, check: int | None = DEFAULT_CHECK, seed: int = 0) -> DatasetCard:
    """Describes a dataset from its manifest, index and ledger, and the tokens of some samples.

    Args:
        dataset: The dataset.
        check: Number of samples whose tokens are checked: the extremes, then random ones; None means all.
        seed: Seed of the random choice.

    Raises:
        DatasetFormatError: If the ledger, the tokenizer or a checked shard cannot be read.
    """
    manifest, tokens = dataset.manifest, dataset.manifest.tokenizer
    facts = IndexFindings(dataset.index, dataset.family)
    extremes = _extremes(dataset, facts)
    chosen = _chosen(facts, extremes, check, seed)
    options = manifest.config.get("options")
    return DatasetCard(
        directory=dataset.name,
        fingerprint=manifest.fingerprint,
        config_hash=manifest.config_hash,
        created_by=manifest.created_by,
        schema_version=manifest.schema_version,
        features=manifest.features,
        source=manifest.source,
        source_name=source_name(manifest.source),
        options=options if isinstance(options, Mapping) else {},
        tokenizer=TokenizerCard(tokens.name, tokens.fingerprint, tokens.chat_template, tokens.vocab_size),
        shards=len(manifest.shards),
        totals=manifest.totals,
        histograms=_histograms(dataset, facts),
        rejects=_rejects(dataset),
        extremes=extremes,
        findings=_findings(dataset, facts, chosen),
        checked=len(chosen),
        source_columns={name: str(kind) for name, kind in source_types(dataset.index.table.schema).items()},
        version={name: value for name, value in manifest.version.items() if name != "source"},
    )


def suspicious_samples(card: DatasetCard) -> tuple[int, ...]:
    """Returns the positions of samples with findings worse than a note, as far as listed in the card."""
    found = {i for group in card.findings if group.severity is not Severity.NOTE for i in group.samples}
    return tuple(sorted(found))


def source_name(source: Mapping[str, Any]) -> str:
    """Describes the source briefly: hub id, or kind and files, the split, and the side of a holdout."""
    if isinstance(joined := source.get("datasets"), list):
        return f"{len(joined)} joined datasets"
    if source.get("kind") == SELECTED:
        return f"selected from {source_name(source['dataset']['source'])}"
    listed = source.get("files")
    files = [str(each.get("name")) for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    name = str(source.get("id") or source.get("kind", "unknown"))
    if not source.get("id") and files:
        name += f": {files[0]}" + (f" and {len(files) - 1:,} more" if len(files) > 1 else "")
    for part in ("config", "split"):
        name += f", {part} {source[part]}" if source.get(part) else ""
    selection = source.get(SELECTION)
    # That of a version has no side unless the dataset is one of a holdout.
    if isinstance(selection, Mapping) and "holdout" in selection:
        name += f", {selection.get('side')} of --holdout {selection.get('holdout')}"
        name += f" --holdout-by {selection['by']}" if "by" in selection else ""
    return name


def source_of_row(source: Mapping[str, Any], row: int) -> str:
    """Describes the source of a row. In a joined dataset, also names the dataset and the row's number in it."""
    name, source = source_name(source), origin(source)
    if not isinstance(joined := source.get("datasets"), list):
        return name
    # The last dataset that begins at or before the row: one without rows begins where the next does.
    number, found = [(n, each) for n, each in enumerate(joined, start=1) if each["row_offset"] <= row][-1]
    inner = row - found["row_offset"]
    return f"{name}: row {inner:,} of dataset {number}, {source_of_row(found['source'], inner)}"


def _histograms(dataset: VlmDataset, facts: IndexFindings) -> tuple[Histogram, ...]:
    index = dataset.index
    grids = index.grids.astype(np.int64)
    found = (
        histogram("length", "length (tokens per sample)", "integer", index.lengths),
        histogram("target_share", "target share (targets of a sample's tokens)", "share", facts.target_shares),
        histogram("images", "images (per sample)", "integer", index.item_counts),
        histogram("patches", "patches (per sample)", "integer", index.num_patches),
        histogram("aspect_ratio", "aspect ratio (width / height per image)", "ratio", grids[:, 2] / grids[:, 1]),
    )
    return tuple(each for each in found if each is not None)


def _extremes(dataset: VlmDataset, facts: IndexFindings) -> tuple[Extremes, ...]:
    index = dataset.index
    wanted: tuple[tuple[str, str, str, npt.NDArray[np.number], bool], ...] = (
        ("longest", "longest", "integer", index.lengths, True),
        ("most_patches", "most patches", "integer", index.num_patches, True),
        ("smallest_target_share", "smallest target share", "share", facts.target_shares, False),
        ("shortest", "shortest", "integer", index.lengths, False),
    )
    found = []
    for name, title, kind, values, largest in wanted:
        order = _first(-values.astype(np.float64) if largest else values.astype(np.float64), EXAMPLES)
        number = int if kind == "integer" else float
        samples = tuple(Extreme(index.key(i), i, int(index.source_row[i]), number(values[i])) for i in order)
        found.append(Extremes(name, title, kind, samples))
    return tuple(found)


def _first(values: npt.NDArray[np.float64], count: int) -> list[int]:
    """Returns the positions of the smallest values, ties in storage order, without a full sort."""
    if not len(values):
        return []
    last = min(count, len(values)) - 1
    candidates = np.flatnonzero(values <= np.partition(values, last)[last])
    order: list[int] = candidates[np.argsort(values[candidates], kind="stable")][:count].tolist()
    return order


def _rejects(dataset: VlmDataset) -> tuple[RejectGroup, ...]:
    found = first_rejections(dataset.directory / LEDGER_NAME, dataset.manifest.rejects, EXAMPLES)

    def example(each: Rejection) -> tuple[int, str]:
        return each.row, ("" if each.sample is None else f"sample {each.sample}: ") + each.message

    rejects = dataset.manifest.rejects.items()
    groups = (RejectGroup(reason, count, tuple(map(example, found[reason]))) for reason, count in rejects)
    return tuple(sorted(groups, key=lambda group: (-group.count, group.reason)))


def _chosen(facts: IndexFindings, extremes: tuple[Extremes, ...], check: int | None, seed: int) -> list[int]:
    """Chooses the samples to check: extremes and findings of the index first, then random ones."""
    total = len(facts.index)
    if check is None or check >= total:
        return list(range(total))
    first = [sample.index for group in extremes for sample in group.samples]
    first += [i for where in facts.groups.values() for i in where[:EXAMPLES].tolist()]
    chosen = dict.fromkeys(first)
    rest = np.random.default_rng(seed).permutation(total)[:check].tolist()
    return sorted(list(dict.fromkeys([*chosen, *rest]))[:check])


def _findings(dataset: VlmDataset, facts: IndexFindings, chosen: list[int]) -> tuple[FindingGroup, ...]:
    index = dataset.index

    def group(kind: str, count: int, positions: list[int], message: Callable[[int], str]) -> FindingGroup:
        severity, meaning = KINDS.get(kind, (Severity.FAULT, f"`vlmdata verify`'s check {kind}"))
        shown = (FindingExample(index.key(i), i, int(index.source_row[i]), message(i)) for i in positions[:EXAMPLES])
        return FindingGroup(kind, severity, meaning, count, tuple(shown), tuple(positions[:_LISTED]))

    groups = []
    for kind, where in facts.groups.items():
        if len(where):
            messages = partial(_index_message, facts, kind)
            groups.append(group(kind, len(where), where[:_LISTED].tolist(), messages))
    known = {kind: count for kind, name in COUNTED.items() if (count := dataset.manifest.turns.get(name, 0))}
    content: dict[str, dict[int, str]] = {kind: {} for kind in known}
    if chosen:
        check = ContentCheck(dataset, TokenTexts(dataset.directory, dataset.manifest))
        for i in chosen:
            for found in check.of(i):
                content.setdefault(found.kind, {}).setdefault(i, found.message)
    for kind, told in content.items():
        groups.append(group(kind, max(len(told), known.get(kind, 0)), list(told), told.__getitem__))
    order = list(Severity)
    return tuple(sorted(groups, key=lambda group: (order.index(group.severity), group.kind)))


def _index_message(facts: IndexFindings, kind: str, i: int) -> str:
    return next(found.message for found in facts.of(i) if found.kind == kind)
