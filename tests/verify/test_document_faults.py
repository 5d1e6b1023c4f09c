"""Faults in documents whose every hash, offset and count is right, and chats that pass themselves off as documents."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.chat_rows import build_mixed
from tests.documents import SPLIT_KEYS, build_documents
from tests.verify.rewriting import Draft, edit_manifest_json, rewrite_manifest, rewrite_sample
from vlmdata.format.manifest import Manifest
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset

PLAIN, IMAGES, WEIGHTED = "000000000", "000000001", "000000004"
Change = Callable[[Draft, TokenizerInfo], None]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture
def damaged(documents: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(documents, tmp_path / "damaged"))


def checks(directory: Path) -> set[str]:
    return {fault.check for fault in verify_dataset(directory).faults}


def test_they_are_sound_as_they_were_made(documents: Path) -> None:
    assert verify_dataset(documents).faults == []
    index = open_dataset(documents).index
    assert [key for key in index.keys.to_pylist() if key.startswith("000000002")] == SPLIT_KEYS
    assert index.truncated[[index.position_of(key) for key in SPLIT_KEYS]].tolist() == [True, True, False]


def first_text_no_target(draft: Draft, t: TokenizerInfo) -> None:
    draft.loss_mask[1] = 0


def first_token_target(draft: Draft, t: TokenizerInfo) -> None:
    draft.loss_mask[0] = 1


def vision_mark_target(draft: Draft, t: TokenizerInfo) -> None:
    draft.loss_mask[np.flatnonzero(draft.input_ids == t.items["image"].before[0])] = 1


def end_of_text_no_target(draft: Draft, t: TokenizerInfo) -> None:
    draft.loss_mask[draft.length - 1] = 0


def other_token_at_the_end(draft: Draft, t: TokenizerInfo) -> None:
    draft.input_ids[draft.length - 1] = 100


def end_of_text_within(draft: Draft, t: TokenizerInfo) -> None:
    draft.input_ids[2] = t.end_of_text


def turn_within(draft: Draft, t: TokenizerInfo) -> None:
    draft.input_ids[2] = t.turns.start


def said_to_be_cut(draft: Draft, t: TokenizerInfo) -> None:
    draft.truncated = True


def said_to_be_whole(draft: Draft, t: TokenizerInfo) -> None:
    draft.truncated = False


def said_to_have_a_turn(draft: Draft, t: TokenizerInfo) -> None:
    draft.target_turns = 1


def one_weight_changed(draft: Draft, t: TokenizerInfo) -> None:
    assert draft.loss_weights is not None
    draft.loss_weights[1] = 2


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        (first_text_no_target, PLAIN, {"document_target"}),
        (first_token_target, PLAIN, {"document_target"}),
        (vision_mark_target, IMAGES, {"document_target"}),
        (end_of_text_no_target, PLAIN, {"document_target"}),
        (other_token_at_the_end, IMAGES, {"document_end"}),
        (end_of_text_within, PLAIN, {"document_end"}),
        (turn_within, PLAIN, {"document_token"}),
        (said_to_be_cut, PLAIN, {"document_end"}),
        (said_to_be_whole, SPLIT_KEYS[0], {"document_end"}),
        (one_weight_changed, WEIGHTED, {"document_weight"}),
        (said_to_have_a_turn, PLAIN, {"outside_turn", "end_token"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_fault_is_found(damaged: Path, change: Change, key: str, expected: set[str]) -> None:
    tokenizer = Manifest.read(damaged).tokenizer
    rewrite_sample(damaged, key, lambda draft: change(draft, tokenizer))
    assert expected <= checks(damaged)


def test_a_chat_is_no_document(tmp_path: Path) -> None:
    """Whatever the index says of its turns, and even where documents are allowed."""
    mixed = build_mixed(tmp_path)
    rewrite_sample(mixed, "000000001", lambda draft: setattr(draft, "target_turns", 0))
    assert "end_token" in checks(mixed)
    rewrite_manifest(mixed, features=("documents", "images", "patches-raw"))
    assert {"document_token", "document_target"} <= checks(mixed)


def test_documents_are_faults_where_the_manifest_knows_none(damaged: Path) -> None:
    edit_manifest_json(damaged, "features", ["images", "loss-weights", "patches-raw"])
    assert "outside_turn" in checks(damaged)
