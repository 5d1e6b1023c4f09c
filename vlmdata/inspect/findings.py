"""Findings about samples: faults and unusual values.

There are two sources. The index covers all samples in a few column operations. The tokens tell more, but one sample at
a time: the audit of ``vlmdata verify`` and a few checks of this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import ChangedDataError, DatasetFormatError
from vlmdata.families import Family
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.index import DatasetIndex
from vlmdata.format.manifest import DROPPED_REASONING, ROWS_WITH_DROPPED_REASONING
from vlmdata.format.schema import Sample
from vlmdata.inspect.boxes import boxes_of, pictures_of
from vlmdata.inspect.text import one_line
from vlmdata.inspect.tokens import TokenTexts, TurnSpan, find_turns
from vlmdata.verify.sample import SampleRules, audit_sample, turn_weights_of
from vlmdata.verify.video import steps_of
from vlmdata.wording import counted

#: Below this share of targets, a sample computes more than 100 tokens for each learned one.
MIN_TARGET_SHARE = 0.01
#: Tukey's "far out": number of interquartile ranges below the first quartile, on a log scale.
_FAR_OUT = 3.0
#: With fewer samples, quartiles are not meaningful.
_ENOUGH = 20
_QUOTED = 40


class Severity(StrEnum):
    """Severity of a finding."""

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"


#: Kind -> (severity, meaning). Kinds not listed are checks of ``vlmdata verify``: faults.
KINDS: dict[str, tuple[Severity, str]] = {
    "no_targets": (Severity.FAULT, "no token is a target, so the sample teaches nothing"),
    "no_turn": (Severity.FAULT, "there is no turn, so the tokens are not a conversation"),
    "late_target": (Severity.FAULT, "the targets of an answer start after its first words"),
    "wrong_box": (Severity.WARNING, "a box or point that is reversed, empty or outside of its image"),
    "low_target_share": (Severity.WARNING, "unusually few of the tokens are targets"),
    "unanswered_turn": (Severity.WARNING, "the last turn is the user's, so its tokens teach nothing"),
    "only_end_token": (Severity.WARNING, "an answer whose only target is its end: empty, or masked"),
    "truncated_answer": (Severity.WARNING, "the last answer is truncated, so its end is never learned"),
    "dropped_reasoning": (Severity.WARNING, "the chat template dropped reasoning, so it is not learned"),
    "flat_image": (Severity.WARNING, "an image of nearly one colour"),
    "image_larger_than_text": (Severity.NOTE, "the images take more tokens than the text"),
}
#: Kinds of findings in the tokens that the manifest counts for all rows, as well.
COUNTED = {"dropped_reasoning": ROWS_WITH_DROPPED_REASONING}


@dataclass(frozen=True)
class Finding:
    """A finding about a sample."""

    kind: str
    severity: Severity
    message: str  # what was found, with its numbers
    tokens: tuple[int, int] | None = None  # tokens [start, stop) that it concerns


def finding(kind: str, message: str, tokens: tuple[int, int] | None = None) -> Finding:
    """Creates a finding with the severity of its kind."""
    severity = KINDS[kind][0] if kind in KINDS else Severity.FAULT
    return Finding(kind, severity, message, tokens)


@dataclass(frozen=True, eq=False)
class IndexFindings:
    """Findings from the index alone, for all n samples."""

    index: DatasetIndex
    family: Family

    @cached_property
    def target_shares(self) -> npt.NDArray[np.float64]:
        """Targets over true tokens, float64 (n,)."""
        return self.index.num_targets / np.maximum(self.index.lengths, 1)

    @cached_property
    def image_tokens(self) -> npt.NDArray[np.int64]:
        """Image tokens, int64 (n,)."""
        counts = np.zeros(len(self.index.grids), np.int64)
        for kind in (item.kind for item in self.family.items):
            own = self.index.item_kinds == kind
            counts[own] = self.family.item_tokens(kind, self.index.grids[own])
        before = np.concatenate([[0], np.cumsum(counts)])
        of_samples: npt.NDArray[np.int64] = np.diff(before[self.index.grid_offsets])
        return of_samples

    @cached_property
    def low_target_share(self) -> float:
        """Share below which a sample is unusual: far below the quartiles of this dataset, or below 1 %."""
        shares = self.target_shares[self.target_shares > 0]
        if len(shares) < _ENOUGH:
            return MIN_TARGET_SHARE
        low, high = np.percentile(np.log(shares), (25, 75))
        return max(MIN_TARGET_SHARE, float(np.exp(low - _FAR_OUT * (high - low))))

    @cached_property
    def groups(self) -> dict[str, npt.NDArray[np.int64]]:
        """Returns the positions of samples by kind of finding, the most extreme first."""
        shares, lengths = self.target_shares, self.index.lengths
        low = (shares > 0) & (shares < self.low_target_share)
        text = lengths - self.image_tokens
        return {
            "no_targets": np.flatnonzero(shares == 0),
            "low_target_share": _ordered(low, shares),
            # A split document continues in the next sample.
            "truncated_answer": np.flatnonzero(self.index.truncated & (self.index.target_turns > 0)),
            "image_larger_than_text": _ordered(self.image_tokens > text, -self.image_tokens / np.maximum(text, 1)),
        }

    def of(self, i: int) -> list[Finding]:
        """Returns the findings of sample ``i``."""
        share, images, length = float(self.target_shares[i]), int(self.image_tokens[i]), int(self.index.lengths[i])
        found = []
        if share == 0:
            found.append(finding("no_targets", f"none of {counted(length, 'token')} is a target"))
        elif share < self.low_target_share:
            message = f"{int(self.index.num_targets[i]):,} of {counted(length, 'token')} are targets: {share:.2%}"
            found.append(finding("low_target_share", f"{message}; below {self.low_target_share:.2%} is unusual here"))
        if self.index.truncated[i] and self.index.target_turns[i]:
            found.append(finding("truncated_answer", f"the last answer was truncated at {counted(length, 'token')}"))
        if images > length - images:
            found.append(
                finding("image_larger_than_text", f"{counted(images, 'image token')} and {length - images:,} of text")
            )
        return found


@dataclass(frozen=True, eq=False)
class ContentCheck:
    """Findings from the tokens of single samples. Reads only token arrays, never pixels."""

    dataset: VlmDataset
    texts: TokenTexts

    @cached_property
    def _rules(self) -> SampleRules | None:
        try:
            return SampleRules.of(self.dataset.manifest)
        except DatasetFormatError:
            return None  # made by another writer: skip checks that need its options

    def of(self, i: int) -> list[Finding]:
        """Returns the findings of sample ``i``: the audit of ``vlmdata verify``, and the starts of its answers."""
        sample = self.dataset.as_stored(i, pixels=False)
        return [*changed_data_of(lambda: self.dataset.without_pixels(i)), *self._of(i, sample)]

    def _of(self, i: int, sample: Sample) -> list[Finding]:
        document = self._rules is not None and self._rules.documents and int(self.dataset.index.target_turns[i]) == 0
        start = self.dataset.manifest.tokenizer.turns.start
        if not document and not (sample.input_ids[: sample.length] == start).any():
            # The audit assumes that there is a turn.
            name = self.dataset.family.chat.turn_start
            return [finding("no_turn", f"none of {counted(sample.length, 'token')} is {name}, so there is no turn")]
        audited, metadata = [], self._metadata(i)
        if self._rules is not None:
            audited = self._audited(i, sample, metadata, self._rules)
        # The index reports "no_target" for every sample.
        found = [finding(check, message) for check, message in audited if check != "no_target"]
        if 0 < sample.length <= len(sample.input_ids) and not document:
            found += self._answers(sample, bool(self.dataset.index.truncated[i]))
        if isinstance(dropped := metadata.get(DROPPED_REASONING), int) and dropped:
            message = f"the chat template dropped the reasoning of {dropped} of the assistant's turns"
            found.append(finding("dropped_reasoning", message))
        return found + list(self._boxes(i, sample, metadata))

    def _audited(
        self, i: int, sample: Sample, metadata: Mapping[str, Any], rules: SampleRules
    ) -> list[tuple[str, str]]:
        """Returns the findings of ``vlmdata verify``, as (check, message)."""
        row, steps, found = self.dataset.index.row(i), None, list[tuple[str, str]]()
        try:
            steps = steps_of(metadata, row, rules.family)
        except ValueError as error:
            found.append(("metadata", str(error)))
        return [*found, *audit_sample(sample, row, rules, _turn_weights(metadata), steps)]

    def _boxes(self, i: int, sample: Sample, metadata: Mapping[str, Any]) -> Iterator[Finding]:
        """Finds boxes and points that cannot be right, of which there is one finding for the sample."""
        family, ids = self.dataset.family, sample.input_ids[: sample.length]
        text = self.texts.decode(ids[~np.isin(ids, self.dataset.manifest.tokenizer.all_placeholders)].tolist())
        if family.grounding is None or not family.grounding.may_be_in(text):
            return
        pictures = pictures_of(sample.items, self.dataset.index.row(i).item_starts, family, metadata)
        boxes = boxes_of(self.texts.decode_each(ids.tolist()), family.grounding, pictures, metadata)
        wrong = [box for box in boxes if box.fault]
        if wrong:
            first = wrong[0]
            numbers = ", ".join(f"{number:g}" for number in first.written)
            more = f"; {len(wrong)} of {len(boxes)} are wrong" if len(wrong) > 1 else ""
            what = "box" if len(first.written) > 2 else "point"
            message = f"{what} [{numbers}]: {first.fault}{more}"
            yield finding("wrong_box", message, (first.start, first.stop))

    def _metadata(self, i: int) -> Mapping[str, Any]:
        try:
            metadata = self.dataset.metadata(i)
        except ValueError:
            return {}  # `vlmdata verify` reports unreadable metadata
        return metadata if isinstance(metadata, Mapping) else {}

    def _answers(self, sample: Sample, truncated: bool) -> Iterator[Finding]:
        """Finds answers whose targets start too late, or of which only the end is learned, and missing answers."""
        info = self.dataset.manifest.tokenizer
        ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length]
        turns = find_turns(ids, mask, info, self.texts)
        if (last := turns[-1]).role == "user" and not truncated:
            message = f"the last turn, from token {last.start}, is the user's: no answer follows"
            yield finding("unanswered_turn", message, (last.start, last.stop))
        for turn in turns:
            if turn.role != "assistant" or not turn.targets:
                continue
            first = turn.start + int(np.argmax(mask[turn.start : turn.stop] != 0))
            begin, skipped = self._skipped(ids, turn, first)
            if skipped:
                message = f'targets start at token {first}, but the answer starts at {begin} with "{skipped}"'
                yield finding("late_target", message, (begin, first))
            elif ids[first] == info.turns.end:
                yield finding("only_end_token", f"of the answer at token {turn.body} only its end is a target")

    def _skipped(self, ids: npt.NDArray[np.int32], turn: TurnSpan, first: int) -> tuple[int, str]:
        """Returns the start of an answer (after a fully excluded think block) and its text before the first target."""
        pieces = self.texts.decode_each(ids[turn.body : first].tolist())
        text = "".join(pieces)
        think = self.dataset.family.chat.think
        marks = [re.escape(mark.strip()) for mark in think or ()]
        thought = re.match(r"\s*" + ".*?".join(marks) + r"\n*", text, re.DOTALL) if marks else None
        begin = thought.end() if thought else 0
        skipped_tokens = int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), begin, side="right"))
        return turn.body + (skipped_tokens if begin else 0), one_line(text[begin:], _QUOTED)


def changed_data_of(read: Callable[[], object]) -> Iterator[Finding]:
    """Finds stored bytes that do not have their checksum, by reading them."""
    try:
        read()
    except ChangedDataError as error:
        yield finding("checksum", str(error))


def _turn_weights(metadata: Mapping[str, Any]) -> tuple[float, ...]:
    try:
        return turn_weights_of(metadata)
    except ValueError:
        return ()  # `vlmdata verify` reports it


def flat_images(sample: Sample) -> Iterator[Finding]:
    """Finds images of nearly one colour: an empty scan or a failed decode. Reads the pixels."""
    stops = np.cumsum([item.rows for item in sample.items]).tolist()
    for number, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        spread = float(sample.patches[start:stop].std()) if stop > start else 0.0
        if spread < 2.0:
            yield finding(
                "flat_image", f"{sample.items[number].kind} {number}: grey levels spread by only {spread:.1f} of 255"
            )


def _ordered(chosen: npt.NDArray[np.bool_], by: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    where = np.flatnonzero(chosen)
    return where[np.argsort(by[where], kind="stable")]
