"""The audit of one sample, a conversation or a document: checks tokens, mask, positions and patches.

Pure functions of a sample and the tokenizer ids in the manifest. No tokenizer is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError
from vlmdata.families import Family
from vlmdata.families.blocks import Blocks
from vlmdata.families.chat import IMAGE
from vlmdata.families.processor import ProcessorFamily
from vlmdata.format.index_row import IndexRow
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import DOCUMENTS, Sample
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.verify.marks import audit_marks
from vlmdata.wording import counted

Finding = tuple[str, str]
"""(check, message)."""


@dataclass(frozen=True)
class SampleRules:
    """Rules for every sample of a dataset."""

    tokenizer: TokenizerInfo  # special ids
    pad_multiple: int  # of which stored lengths are multiples
    all_turns: bool  # whether every assistant turn of a sample is a target, or the last alone
    family: Family  # the family the samples are made for
    #: Version by name of the libraries that made the pixels, for messages.
    libraries: Mapping[str, str] = field(default_factory=dict)
    documents: bool = False  # whether samples without target turns are documents. Elsewhere they are faults.
    enclosed_videos: bool = True  # whether vision marks enclose all blocks of a video with times
    fractions: bool = False  # whether positions count fractions of a second of videos

    @classmethod
    def of(cls, manifest: Manifest) -> SampleRules:
        """Reads the rules of a dataset.

        Raises:
            DatasetFormatError: If the manifest's options do not define them.
        """
        options = manifest.config.get("options")
        pad_multiple, train_turns = (
            (options.get("pad_multiple"), options.get("train_turns")) if isinstance(options, dict) else (None, None)
        )
        if not isinstance(pad_multiple, int) or pad_multiple < 1 or train_turns not in ("all", "last", "each"):
            raise DatasetFormatError(
                f"options.pad_multiple is {pad_multiple!r} and options.train_turns is {train_turns!r}; "
                "samples cannot be audited without these two"
            )
        return cls(
            manifest.tokenizer,
            pad_multiple,
            train_turns == "all",
            manifest.model_family,
            manifest.pixel_libraries,
            DOCUMENTS in manifest.features,
            manifest.encloses_videos,
            manifest.counts_fractions,
        )


def turn_weights_of(metadata: Mapping[str, Any]) -> tuple[float, ...]:
    """Reads the loss weight of each assistant turn from a sample's metadata; empty if it has none.

    Raises:
        ValueError: If ``turn_weights`` is not a list of finite numbers that are at least 0.
    """
    found = metadata.get("turn_weights", [])
    if not isinstance(found, list) or not all(
        type(each) in (int, float) and math.isfinite(each) and each >= 0 for each in found
    ):
        raise ValueError(f"turn_weights is {found!r}; it must be a list of finite numbers that are at least 0")
    return tuple(map(float, found))


def audit_sample(
    sample: Sample,
    row: IndexRow,
    rules: SampleRules,
    turn_weights: tuple[float, ...] = (),
    steps: tuple[float, ...] | None = None,
) -> list[Finding]:
    """Returns all faults of a sample.

    Args:
        sample: The sample.
        row: Its index row.
        rules: The rules of its dataset.
        turn_weights: Weight of each assistant turn in its metadata; empty if it has none.
        steps: For each item, the step of positions from one temporal patch of a block to the next; None is 1.
    """
    tokenizer, padded = rules.tokenizer, len(sample.input_ids)
    if not 0 < sample.length <= padded:
        return [("length", f"{counted(sample.length, 'token')} stored as {padded}")]  # its parts cannot be told apart
    findings = [*_lengths(sample, row, tokenizer, rules.pad_multiple), *_targets(sample, row, rules, turn_weights)]
    findings += _weights(sample)
    bad_grid = _bad_grid(sample, rules.family.merge_size)
    if bad_grid is not None:
        return [*findings, ("grid", bad_grid)]  # images of unknown size cannot be checked
    findings += _patches(sample)
    try:
        blocks = Blocks.of(rules.family, _items(sample), tokenizer.placeholders, steps)
        starts = blocks.locate(sample.input_ids[: sample.length])
    except KeyError as error:
        return [
            *findings,
            ("image_block", f"an item is of kind {error}, of which the tokenizer has no tokens"),
        ]
    except ValueError as error:
        return [*findings, ("image_block", str(error))]
    if row.item_starts != (found := tuple(starts[blocks.firsts].tolist())):
        findings.append(("index", f"images start at {list(found)}, but the index says {row.item_starts}"))
    return [
        *findings,
        *audit_marks(sample, blocks, starts, rules.family, tokenizer, rules.enclosed_videos),
        *_positions(sample, blocks, starts, rules.family),
    ]


def _items(sample: Sample) -> list[tuple[str, tuple[int, int, int]]]:
    return [(item.kind, item.grid) for item in sample.items]


def _lengths(sample: Sample, row: IndexRow, tokenizer: TokenizerInfo, pad_multiple: int) -> Iterator[Finding]:
    padded, length = len(sample.input_ids), sample.length
    if padded % pad_multiple or padded - length >= pad_multiple:
        yield "length", f"{counted(length, 'token')} stored as {padded}, with pad_multiple {pad_multiple}"
    ids = sample.input_ids
    outside = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if len(outside):
        at = int(outside[0])
        yield "vocabulary", f"token {at} is id {ids[at]}, outside [0, {tokenizer.vocab_size})"
    tail = slice(length, None)
    if (ids[tail] != tokenizer.pad).any() or sample.loss_mask[tail].any() or sample.position_ids[:, tail].any():
        yield "padding", f"tokens from {length} on must be id {tokenizer.pad} with mask 0 and positions 0"
    if row.num_targets != sample.num_targets:
        yield "index", f"the index says {counted(row.num_targets, 'target')}, but the mask has {sample.num_targets}"


def _bad_grid(sample: Sample, merge: int) -> str | None:
    grids = sample.grid_thw
    bad = np.flatnonzero((grids < 1).any(axis=1) | (grids[:, 1:] % merge != 0).any(axis=1))
    if len(bad) == 0:
        return None
    kind = sample.items[bad[0]].kind if sample.items else IMAGE
    return f"{kind} {bad[0]} has the grid {grids[bad[0]].tolist()}; sides must be positive multiples of {merge}"


def _patches(sample: Sample) -> Iterator[Finding]:
    expected = sum(item.rows for item in sample.items)
    if expected != len(sample.patches):
        yield (
            "patches",
            f"the grids need {counted(expected, 'patch')}, but {len(sample.patches):,} are stored",
        )


def _weights(sample: Sample) -> Iterator[Finding]:
    weights = sample.loss_weights
    if weights is None:
        return
    if len(odd := np.flatnonzero(~np.isfinite(weights) | (weights < 0))):
        yield "weights", f"the loss weight of token {odd[0]} is {weights[odd[0]]} ({len(odd)} such)"
    elif len(odd := np.flatnonzero((weights > 0) != (sample.loss_mask != 0))):
        at = int(odd[0])
        yield (
            "weights",
            f"token {at} has loss weight {weights[at]} and mask {sample.loss_mask[at]} ({len(odd)} such); targets must "
            "weigh more than 0, other tokens 0",
        )


def _targets(sample: Sample, row: IndexRow, rules: SampleRules, turn_weights: tuple[float, ...]) -> Iterator[Finding]:
    tokenizer = rules.tokenizer
    ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length]
    if (mask > 1).any():
        yield "mask", f"the mask contains {int(mask.max())}; only 0 and 1 are valid"
    if not mask.any():
        yield "no_target", "no token is a target, so the sample teaches nothing"
        return
    if rules.documents and row.target_turns == 0:
        yield from audit_document(sample, row, tokenizer, rules.family)
        return
    target, end = mask == 1, tokenizer.turns.end
    for name, token in special_names(tokenizer, rules.family).items():
        hits = np.flatnonzero(target & (ids == token))
        if len(hits) and token != end:  # some tokenizers pad with the end token
            yield "forbidden_target", f"token {hits[0]} is {name} and a target ({len(hits)} such)"
    begin = tokenizer.turns.begin
    if begin >= 0 and (places := np.flatnonzero(ids == begin).tolist()) != [0]:
        name = rules.family.chat.begin
        yield "begin_token", f"{name} is at the tokens {places}, but a conversation has one, at its beginning"
    yield from _target_turns(ids, target, row, rules, turn_weights)
    if turn_weights:
        yield from _turn_weights(sample, rules.tokenizer, turn_weights)


def _turn_weights(sample: Sample, tokenizer: TokenizerInfo, turn_weights: tuple[float, ...]) -> Iterator[Finding]:
    """Checks that the targets of a turn have the weight in the metadata."""
    ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length]
    weights = mask.astype(np.float32) if sample.loss_weights is None else sample.loss_weights[: sample.length]
    answers = _answers(ids, tokenizer)
    if len(answers) != len(turn_weights):
        yield (
            "turn_weights",
            f"the metadata has {counted(len(turn_weights), 'turn weight')} for "
            f"{counted(len(answers), 'assistant turn')}",
        )
        return
    for (start, stop), weight in zip(answers, turn_weights, strict=True):
        targets = start + np.flatnonzero(mask[start:stop])
        if len(wrong := targets[weights[targets] != np.float32(weight)]):
            yield (
                "turn_weights",
                f"token {wrong[0]} has loss weight {weights[wrong[0]]}, but its turn at token {start} has {weight:g} "
                "in the metadata",
            )


def _answers(ids: npt.NDArray[np.int32], tokenizer: TokenizerInfo) -> list[tuple[int, int]]:
    """Returns the first token of what each assistant message says, and one past its last.

    The header's last token may have merged with whitespace that begins the answer; the others tell whose turn it is.
    """
    header = np.array(tokenizer.turns.assistant[:-1] or tokenizer.turns.assistant, dtype=ids.dtype)
    starts = np.flatnonzero(ids == tokenizer.turns.start).tolist()
    return [
        (start + begin, start + end)
        for start, stop in pairwise([*starts, len(ids)])
        if np.array_equal(ids[start + 1 : start + 1 + len(header)], header)
        for begin, end in tokenizer.turns.spoken(ids[start:stop], tokenizer.item_ids)
    ]


def _target_turns(
    ids: npt.NDArray[np.int32],
    target: npt.NDArray[np.bool_],
    row: IndexRow,
    rules: SampleRules,
    turn_weights: tuple[float, ...],
) -> Iterator[Finding]:
    """Checks that targets are only in assistant turns, after the header, and run unbroken to the end of the turn."""
    tokenizer, marks = rules.tokenizer, rules.tokenizer.turns
    starts = np.flatnonzero(ids == marks.start).tolist()
    first = starts[0] if starts else len(ids)
    if target[:first].any():
        yield "outside_turn", "a target is before the first turn"
    body = 1 + len(marks.assistant)
    said = _answers(ids, tokenizer)
    answers = [start for start, _ in said]
    chosen = answers if rules.all_turns else answers[-1:]
    weight_of = dict(zip(answers, turn_weights, strict=False))
    taught = [start for start in chosen if weight_of.get(start, 1) > 0]
    # Other turns, and the responses of tools within those of the assistant.
    cuts = sorted({*starts, *(stop for _, stop in said), *answers, len(ids)})
    for start, stop in pairwise(cuts):
        inside = target[start:stop]
        if start in taught and not inside.any():
            yield "untaught_turn", f"the assistant turn at token {start} should be learned, but has no targets"
        if not inside.any():
            continue
        if start not in answers:
            yield (
                "prompt_target",
                f"the turn at token {start} is not the assistant's, but {inside.sum()} of its tokens are targets",
            )
        elif start not in taught:
            why = "weighs 0 in the metadata" if start in chosen else "is not the last answer"
            yield "prompt_target", f"the turn at token {start} {why}, but has targets"
        elif start in starts and (
            inside[:body].any() or ids[start + 1 : start + body].tolist() != list(marks.assistant)
        ):
            yield "header_target", f"the header of the assistant turn at token {start} is a target"
        if not _runs_to_the_end(inside, ids[start:stop], tokenizer):
            yield "broken_target", f"the targets of the turn at token {start} do not run unbroken to its end"
    supervised = int((target & np.isin(ids, marks.endings)).sum())
    # A truncated answer lacks its end token, unless only the newline after it was cut.
    missing = int(row.truncated and ids[-1] not in marks.endings)
    if supervised != row.target_turns - missing:
        yield (
            "end_token",
            f"{supervised} {_ending_texts(rules.family)} are targets for {counted(row.target_turns, 'target turn')}"
            + (" of which the last is truncated" if row.truncated else ""),
        )


def _ending_texts(family: Family) -> str:
    return " or ".join((family.chat.turn_end, *(family.chat.tool_response or ())[:1]))


def _runs_to_the_end(inside: npt.NDArray[np.bool_], turn: npt.NDArray[np.int32], tokenizer: TokenizerInfo) -> bool:
    """True if a turn's targets are one run through its end token and the newline that may follow it."""
    first, stop = int(inside.argmax()), int(inside.argmax() + inside.sum())
    if not inside[first:stop].all():
        return False
    ends = np.flatnonzero(turn == tokenizer.turns.end)
    if not len(ends):  # a truncated answer
        return stop == len(turn)
    after = int(ends[0]) + 1
    newline = tokenizer.turns.assistant[-1:]
    return stop == after + int(after < len(turn) and turn[after] in newline)


def _positions(sample: Sample, blocks: Blocks, starts: npt.NDArray[np.int64], family: Family) -> Iterator[Finding]:
    if isinstance(family, ProcessorFamily) and sample.items and len(family.position_axes) > 1:
        return  # only the model's own code knows them
    expected = family.position_ids(sample.length, starts, blocks.grids, blocks.steps)
    actual = sample.position_ids[:, : sample.length]
    wrong = np.flatnonzero((expected != actual).any(axis=0))
    if len(wrong):
        at = int(wrong[0])
        yield (
            "positions",
            f"{len(wrong)} positions do not follow from the grids; the first, token {at}, is "
            f"{actual[:, at].tolist()} but should be {expected[:, at].tolist()}",
        )


def special_names(tokenizer: TokenizerInfo, family: Family) -> dict[str, int]:
    """Returns the ids that are never learned in a conversation, by the family's texts: marks, placeholders, padding."""
    names = {"padding": tokenizer.pad, family.chat.turn_start: tokenizer.turns.start}
    if family.chat.begin:
        names[family.chat.begin] = tokenizer.turns.begin
    if tokenizer.turns.response and family.chat.tool_response is not None:
        names[family.chat.tool_response[1]] = tokenizer.turns.response[1]
    for item in family.items:
        own = tokenizer.items[item.kind]
        names |= dict(zip((*item.texts, *item.between), (*own.ids, *own.between), strict=True))
    return names


def audit_document(
    sample: Sample, row: IndexRow, tokenizer: TokenizerInfo, family: Family
) -> Iterator[tuple[str, str]]:
    """Finds faults in targets and special tokens of a document, as (check, message)."""
    ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length] != 0
    images = (*tokenizer.items[IMAGE].ids, *tokenizer.items[IMAGE].between)
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
