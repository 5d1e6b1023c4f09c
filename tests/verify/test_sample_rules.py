"""What a sample must obey follows from the options it was made with: which turns are learned, where answers may end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_rows import mixed_rows, write_jsonl
from tests.verify.rewriting import rewrite_manifest, rewrite_sample, turns
from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest, canonical_hash
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.fault import Fault

TWO_ANSWERS = "000000002"


@pytest.fixture
def last_turn_only(make_dataset, tmp_path) -> Path:
    rows = write_jsonl(tmp_path / "in" / "rows.jsonl", mixed_rows())
    return make_dataset(rows, recipe="chat", train_turns="last")


def checks_of(faults: list[Fault]) -> set[str]:
    return {found.check for found in faults}


class TestLastTurnOnly:
    def test_is_sound(self, last_turn_only):
        assert verify_dataset(last_turn_only).faults == []

    def test_an_earlier_answer_may_not_be_a_target(self, last_turn_only):
        def teach_the_first_answer(draft):
            tokenizer = Manifest.read(last_turn_only).tokenizer
            answer = turns(draft, tokenizer)[2]
            draft.loss_mask[answer.start + 1 + len(tokenizer.turns.assistant) : answer.stop] = 1
            draft.target_turns = 2

        rewrite_sample(last_turn_only, TWO_ANSWERS, teach_the_first_answer)
        assert checks_of(verify_dataset(last_turn_only).faults) == {"prompt_target"}

    def test_is_not_taken_for_all_turns(self, last_turn_only):
        manifest = Manifest.read(last_turn_only)
        config = {**manifest.config, "options": {**manifest.config["options"], "train_turns": "all"}}
        rewrite_manifest(last_turn_only, config=config, config_hash=canonical_hash(config))
        assert checks_of(verify_dataset(last_turn_only).faults) == {"untaught_turn"}


@pytest.mark.parametrize("missing", [1, 2, 3, 20])
def test_cut_answers_are_sound_wherever_the_cut_falls(make_dataset, tmp_path, missing):
    rows = write_jsonl(tmp_path / "in" / "rows.jsonl", mixed_rows()[-1:])
    whole = make_dataset(rows, "whole", recipe="chat")
    length = Manifest.read(whole).totals.tokens
    cut = make_dataset(rows, "cut", recipe="chat", max_length=length - missing, overlong="truncate")
    assert Manifest.read(cut).totals.truncated == 1
    assert verify_dataset(cut).faults == []


def test_targets_of_a_cut_answer_run_to_the_cut(make_dataset, tmp_path):
    rows = write_jsonl(tmp_path / "in" / "rows.jsonl", mixed_rows()[-1:])
    cut = make_dataset(rows, recipe="chat", max_length=100, overlong="truncate")
    rewrite_sample(cut, "000000000", lambda draft: draft.loss_mask.__setitem__(99, 0))
    assert checks_of(verify_dataset(cut).faults) == {"broken_target"}


def test_rules_that_the_manifest_does_not_tell_are_a_fault_of_the_manifest(damaged):
    config = {"options": {"pad_multiple": 0, "train_turns": "all"}}
    rewrite_manifest(damaged, config=config, config_hash=canonical_hash(config))
    faults = verify_dataset(damaged).faults
    assert [(found.file, found.check) for found in faults] == [("manifest.json", "config")]
    assert "pad_multiple is 0" in faults[0].message


def test_a_dataset_without_a_manifest_cannot_be_audited(tmp_path):
    with pytest.raises(DatasetFormatError, match=r"no manifest\.json"):
        verify_dataset(tmp_path)
