"""Planted faults are found, by their right names, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.verify.rewriting import Draft, rewrite_sample
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.inspect import describe_dataset, describe_sample
from vlmdata.inspect.findings import Severity
from vlmdata.storage.open import open_dataset

KEY = "000000001"
Change = Callable[[Draft], None]


def shifted(by: int) -> Change:
    def change(draft: Draft) -> None:
        draft.loss_mask[:] = np.roll(draft.loss_mask, by)

    return change


def masked_beginning(draft: Draft) -> None:
    first = int(np.argmax(draft.loss_mask))
    draft.loss_mask[first : first + 5] = 0


def no_targets(draft: Draft) -> None:
    draft.loss_mask[:] = 0
    draft.target_turns = 0


def prompt_too(draft: Draft) -> None:
    draft.loss_mask[3 : draft.length] = 1


def hole(draft: Draft) -> None:
    where = np.flatnonzero(draft.loss_mask)
    draft.loss_mask[where[len(where) // 2]] = 0


def only_the_end(draft: Draft) -> None:
    where = np.flatnonzero(draft.loss_mask)
    draft.loss_mask[where[:-2]] = 0


def few_targets(draft: Draft) -> None:
    where = np.flatnonzero(draft.loss_mask)
    draft.loss_mask[where[:-1]] = 0


def cut(draft: Draft) -> None:
    draft.truncated = True


def grey(draft: Draft) -> None:
    draft.patches[:] = 200


PLANTED: list[tuple[Change, str, Severity]] = [
    (shifted(-1), "broken_target", Severity.FAULT),
    (shifted(1), "late_target", Severity.FAULT),
    (shifted(-9), "header_target", Severity.FAULT),
    (masked_beginning, "late_target", Severity.FAULT),
    (no_targets, "no_targets", Severity.FAULT),
    (prompt_too, "prompt_target", Severity.FAULT),
    (hole, "broken_target", Severity.FAULT),
    (only_the_end, "late_target", Severity.FAULT),
    (few_targets, "low_target_share", Severity.WARNING),
    (cut, "truncated_answer", Severity.WARNING),
]


@pytest.mark.parametrize(("change", "kind", "severity"), PLANTED)
def test_a_planted_fault_is_found(
    demo: Path, copy_of: Callable[[Path], Path], change: Change, kind: str, severity: Severity
) -> None:
    copy = copy_of(demo)
    rewrite_sample(copy, KEY, change)
    dataset = open_dataset(copy)
    groups = {group.kind: group for group in describe_dataset(dataset).findings}
    assert groups[kind].severity is severity
    assert [example.key for example in groups[kind].examples] == [KEY]
    assert kind in [found.kind for found in describe_sample(dataset, KEY).findings]
    serious = [group for group in groups.values() if group.severity is not Severity.NOTE]
    assert {example.key for group in serious for example in group.examples} == {KEY}
    order = [list(Severity).index(group.severity) for group in groups.values()]
    assert all(a <= b for a, b in pairwise(order))


@pytest.mark.parametrize("count", [1, 5])
def test_a_late_target_names_the_skipped_words(demo: Path, copy_of: Callable[[Path], Path], count: int) -> None:
    copy = copy_of(demo)
    sound = describe_sample(open_dataset(copy), KEY)
    first = int(np.argmax(sound.tokens.mask))

    def change(draft: Draft) -> None:
        draft.loss_mask[first : first + count] = 0

    rewrite_sample(copy, KEY, change)
    found = next(f for f in describe_sample(open_dataset(copy), KEY).findings if f.kind == "late_target")
    skipped = "".join(sound.tokens.texts[first : first + count])
    # The think block before the answer is left out on purpose and no part of the fault.
    assert found.tokens == (first, first + count)
    assert f'"{skipped}"' in found.message


def test_a_think_block_may_be_left_out_whole_but_not_in_part(demo: Path, copy_of: Callable[[Path], Path]) -> None:
    copy = copy_of(demo)
    sound = describe_sample(open_dataset(copy), KEY)
    first = int(np.argmax(sound.tokens.mask))
    assert "".join(sound.tokens.texts[first - 4 : first]) == "<think>\n\n</think>\n\n"
    assert "late_target" not in [found.kind for found in sound.findings]

    def learn_thinking(draft: Draft, begin: int) -> None:
        draft.loss_mask[begin:first] = 1

    rewrite_sample(copy, KEY, lambda draft: learn_thinking(draft, first - 4))
    assert "late_target" not in [f.kind for f in describe_sample(open_dataset(copy), KEY).findings]
    rewrite_sample(copy, KEY, lambda draft: draft.loss_mask.__setitem__(first - 4, 0))
    assert "late_target" in [f.kind for f in describe_sample(open_dataset(copy), KEY).findings]


def test_an_image_of_one_colour_is_found_where_pixels_are_read(demo: Path, copy_of: Callable[[Path], Path]) -> None:
    copy = copy_of(demo)
    rewrite_sample(copy, KEY, grey)
    found = [finding.kind for finding in describe_sample(open_dataset(copy), KEY).findings]
    assert "flat_image" in found


def test_a_fault_outside_the_checked_part_is_not_claimed_absent(demo: Path, copy_of: Callable[[Path], Path]) -> None:
    copy = copy_of(demo)
    rewrite_sample(copy, KEY, hole)
    card = describe_dataset(open_dataset(copy), check=0)
    assert card.checked == 0
    assert "broken_target" not in [group.kind for group in card.findings]


def test_an_unusual_share_is_measured_against_the_dataset() -> None:
    from vlmdata.inspect.findings import MIN_TARGET_SHARE, IndexFindings

    class Index:
        lengths = np.full(100, 1000, np.int32)
        grids, item_kinds = np.zeros((0, 3), np.int32), np.zeros(0, np.object_)
        grid_offsets = np.zeros(101, np.int64)
        truncated = np.zeros(100, np.bool_)
        target_turns = np.ones(100, np.int32)
        num_targets = np.linspace(280, 320, 100).astype(np.int32)

    index = Index()
    index.num_targets[7] = 90
    facts = IndexFindings(index, FAMILY)  # type: ignore[arg-type]
    assert facts.low_target_share > 0.2
    assert facts.groups["low_target_share"].tolist() == [7]
    index.lengths, index.num_targets = index.lengths[:19], index.num_targets[:19]
    index.grid_offsets = index.grid_offsets[:20]
    # Too few to have quartiles worth the name: only the absolute bound is left.
    assert IndexFindings(index, FAMILY).low_target_share == MIN_TARGET_SHARE  # type: ignore[arg-type]


def test_a_conversation_that_ends_with_a_question_is_a_finding(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
    rows = [{"messages": [asked, answered]}, {"messages": [asked, answered, asked]}]
    dataset = open_dataset(build_dataset(write_jsonl(tmp_path / "chat.jsonl", rows), tmp_path / "chat", recipe="chat"))
    found = [describe_sample(dataset, str(i)).findings for i in range(2)]
    assert "unanswered_turn" not in {each.kind for each in found[0]}
    unanswered = next(each for each in found[1] if each.kind == "unanswered_turn")
    assert unanswered.tokens is not None
    assert unanswered.tokens[1] == dataset.index.lengths[1]
