"""Descriptions in the compact form for the page's script. Escapes unsafe characters in texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmdata.format.dataset import VlmDataset
from vlmdata.inspect.findings import Finding
from vlmdata.inspect.sample import SampleDescriber, SampleDescription, Span, SpanKind
from vlmdata.inspect.serialise import to_jsonable
from vlmdata.inspect.text import one_line, visible
from vlmdata.storage.versions import split_version

#: Length of a sample's first words in the list, in characters.
_WORDS = 80


def summary_payload(describe: SampleDescriber, i: int, why: str = "", thumbnail: str | None = None) -> dict[str, Any]:
    """Formats a sample's line in the list.

    ``why`` is the reason for choosing the sample; ``thumbnail`` its first image as a ``data:`` URL, for a page without
    a server.
    """
    index = describe.dataset.index
    return {
        "key": one_line(index.key(i)),
        "index": i,
        "row": int(index.source_row[i]),
        "length": int(index.lengths[i]),
        "targets": int(index.num_targets[i]),
        "share": float(describe.facts.target_shares[i]),
        "images": int(index.item_counts[i]),
        "patches": int(index.num_patches[i]),
        "turns": int(index.target_turns[i]),
        "truncated": bool(index.truncated[i]),
        "findings": [_finding(found) for found in describe.findings(i)],
        "why": why,
        "text": one_line(describe.first_words(i), _WORDS),
        "thumbnail": thumbnail,
    }


def sample_payload(sample: SampleDescription) -> dict[str, Any]:
    """Formats everything about a sample except its pixels."""
    tokens = sample.tokens
    of_spans = [sample.spans[number] for number in tokens.spans.tolist()]
    texts = zip(of_spans, tokens.texts, tokens.ids.tolist(), strict=True)
    return {
        "key": one_line(sample.key),
        "index": sample.index,
        "row": sample.source_row,
        "source": visible(sample.source),
        "shard": sample.shard,
        "offset": sample.offset,
        "size": sample.size,
        "length": sample.length,
        "padded": sample.padded_length,
        "targets": sample.num_targets,
        "share": sample.target_share,
        "truncated": sample.truncated,
        "findings": [_finding(found) for found in sample.findings],
        "images": [safe(to_jsonable(image)) for image in sample.images],
        "boxes": [safe(to_jsonable(box)) for box in sample.boxes],
        "columns": [one_line(f"{name} = {value}") for name, value in sample.columns.items()],
        "spans": [_span(sample, span) for span in sample.spans],
        "tokens": {
            # Placeholders have the text of their span.
            "text": [
                None if span.kind is SpanKind.IMAGE and id == tokens.ids[span.start] else visible(text)
                for span, text, id in texts
            ],
            "id": tokens.ids.tolist(),
            "label": tokens.labels.tolist(),
            "mask": tokens.mask.tolist(),
            # Absent if all targets weigh 1. Rounded to six digits, since weights are stored as float32.
            **({} if tokens.weights is None else {"weight": [float(f"{w:.6g}") for w in tokens.weights.tolist()]}),
            "axes": list(tokens.positions),
            **{name: axis.tolist() for name, axis in tokens.positions.items()},
        },
    }


def dataset_payload(dataset: VlmDataset, card: Any) -> dict[str, Any]:
    """Formats the card."""
    fields: dict[str, Any] = safe(to_jsonable(card))
    return {**fields, "name": dataset_name(dataset)}


def dataset_name(dataset: VlmDataset) -> str:
    """Returns the last part of a dataset's place, for headings; ``chat@2`` for its second version."""
    number = dataset.manifest.version.get("number")
    place = dataset.name if number is None else split_version(dataset.name)[0]
    name = Path(place).resolve().name or place
    return one_line(name if number is None else f"{name}@{number}")


def safe(value: Any) -> Any:
    """Escapes control and direction characters in the texts of a JSON value."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(name): safe(each) for name, each in value.items()}
    return [safe(each) for each in value] if isinstance(value, list) else value


def _span(sample: SampleDescription, span: Span) -> dict[str, Any]:
    turn = next(number for number, each in enumerate(sample.turns) if span.start < each.stop)
    fields: dict[str, Any] = to_jsonable(span)
    return {**fields, "turn": turn, "role": one_line(span.role), "text": visible(span.text)}


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "kind": one_line(found.kind),
        "severity": found.severity.value,
        "message": one_line(found.message),
        "tokens": list(found.tokens) if found.tokens else None,
    }
