"""The audit of a document's tokens: all text is learned, and there are no conversation tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vlmdata.families import Family
from vlmdata.families.chat import IMAGE
from vlmdata.format.index_row import IndexRow
from vlmdata.format.schema import Sample
from vlmdata.format.tokenizer_info import TokenizerInfo


def special_names(tokenizer: TokenizerInfo, family: Family) -> dict[str, int]:
    """Returns the ids that are never learned in a conversation, by the family's texts: marks, placeholders, padding."""
    names = {"padding": tokenizer.pad, family.chat.turn_start: tokenizer.turns.start}
    if family.chat.begin:
        names[family.chat.begin] = tokenizer.turns.begin
    for item in family.items:
        names |= dict(zip(item.texts, tokenizer.items[item.kind].ids, strict=True))
    return names


def audit_document(
    sample: Sample, row: IndexRow, tokenizer: TokenizerInfo, family: Family
) -> Iterator[tuple[str, str]]:
    """Finds faults in targets and special tokens of a document, as (check, message)."""
    ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length] != 0
    images = tokenizer.items[IMAGE].ids
    learned = ~np.isin(ids, images)
    learned[0] = False
    if len(wrong := np.flatnonzero(mask != learned)):
        at = int(wrong[0])
        yield (
            "document_target",
            f"token {at} is {'a' if mask[at] else 'not a'} target ({len(wrong)} such); in a document, all tokens are "
            "targets except the first and images with their marks",
        )
    if sample.loss_weights is not None and len(np.unique(sample.loss_weights[: sample.length][mask])) > 1:
        yield "document_weight", "the targets have several loss weights, but a document has one"
    end, begin = tokenizer.end_of_text, tokenizer.turns.begin
    strange = special_names(tokenizer, family) | {family.chat.turn_end: tokenizer.turns.end}
    for name, token in strange.items():
        hits = np.flatnonzero(ids == token)
        if token == begin:
            hits = hits[hits > 0]  # the first piece of a document begins with it
        if token not in (end, *images) and len(hits):
            yield "document_token", f"token {hits[0]} is {name}, which a document must not contain ({len(hits)} such)"
    ends = np.flatnonzero(ids == end).tolist()
    expected = [] if row.truncated else [len(ids) - 1]
    if ends != expected:
        state = "is truncated" if row.truncated else "is complete"
        yield "document_end", f"the document {state}, but its end-of-text tokens are at {ends} instead of {expected}"
