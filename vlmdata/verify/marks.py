"""The audit of the tokens around the placeholders of images and videos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.blocks import Blocks
from vlmdata.format.schema import Sample
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.wording import counted


def audit_marks(
    sample: Sample,
    blocks: Blocks,
    starts: npt.NDArray[np.int64],
    family: Family,
    tokenizer: TokenizerInfo,
    enclosed_videos: bool = True,
) -> Iterator[tuple[str, str]]:
    """Checks that each block of placeholders is enclosed in its marks, and that there are no others.

    Args:
        sample: The sample.
        blocks: The blocks of its items.
        starts: int64 (B,), first token of each block.
        family: Family of the sample.
        tokenizer: Tells the ids of the marks.
        enclosed_videos: Whether marks enclose all blocks of a captioned video, too.

    Yields:
        Each fault, as (check, message).
    """
    ids, expected = sample.input_ids[: sample.length], Counter[int]()
    names: dict[int, str] = {}
    for texts in family.items:
        marks = tokenizer.items.get(texts.kind)
        if marks is None:
            continue
        around = (*zip(texts.before, marks.before, strict=True), *zip(texts.after, marks.after, strict=True))
        names |= {token: name for name, token in around}
        own = np.flatnonzero(blocks.tokens == marks.token)
        begins, ends = starts[own], starts[own] + blocks.counts[own]
        # The views of an image share its marks: those before end at the first one's start, those after follow the last.
        if family.most_views > 1:
            joined = np.flatnonzero(begins[1:] == ends[:-1])
            begins, ends = np.delete(begins, joined + 1), np.delete(ends, joined)
        before = np.arange(-len(marks.before), 0) + begins[:, None]
        after = np.arange(len(marks.after)) + ends[:, None]
        places = np.concatenate([before, after], axis=1)
        closed = ((places >= 0) & (places < len(ids))).all(axis=1)
        closed[closed] = (ids[places[closed]] == (*marks.before, *marks.after)).all(axis=1)
        if not closed.all():
            listed = " and ".join(name for name, _ in around)
            yield "image_block", f"{texts.kind} {np.flatnonzero(~closed)[0]} is not enclosed in {listed}"
        # All blocks of a captioned video stand between the marks that the chat template writes, except as in vLLM.
        outer = sum(item.kind == texts.kind for item in sample.items) if texts.caption and enclosed_videos else 0
        expected.update(dict.fromkeys((*marks.before, *marks.after), len(begins) + outer))
    for token, name in names.items():
        if (found := int((ids == token).sum())) != expected[token]:
            images = counted(len(sample.items), "image")
            wanted = "" if expected[token] == len(sample.items) else f", which need {expected[token]}"
            yield "image_block", f"{found} {name} for {images}{wanted}"
