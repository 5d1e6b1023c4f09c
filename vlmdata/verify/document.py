"""The audit of a document's tokens: all text is learned, and there are no conversation tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vlmdata.format.index_row import IndexRow
from vlmdata.format.manifest import TokenizerInfo
from vlmdata.format.schema import Sample


def audit_document(sample: Sample, row: IndexRow, tokenizer: TokenizerInfo) -> Iterator[tuple[str, str]]:
    """Finds faults in targets and special tokens of a document, as (check, message).

    Args:
        sample: The sample.
        row: The sample's index row.
        tokenizer: Special ids.
    """
    ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length] != 0
    learned = ~np.isin(ids, (tokenizer.image, tokenizer.vision_start, tokenizer.vision_end))
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
    end = tokenizer.end_of_text
    strange = {
        "<|im_start|>": tokenizer.im_start,
        "<|im_end|>": tokenizer.im_end,
        "<|video_pad|>": tokenizer.video,
        "padding": tokenizer.pad,
    }
    for name, token in strange.items():
        if token != end and len(hits := np.flatnonzero(ids == token)):
            yield "document_token", f"token {hits[0]} is {name}, which a document must not contain ({len(hits)} such)"
    ends = np.flatnonzero(ids == end).tolist()
    expected = [] if row.truncated else [len(ids) - 1]
    if ends != expected:
        state = "is truncated" if row.truncated else "is complete"
        yield "document_end", f"the document {state}, but its end-of-text tokens are at {ends} instead of {expected}"
