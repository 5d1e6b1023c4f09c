"""Faults within samples whose every hash, offset and count is right: each is named by its own check.

The damaged sample has two images with nothing between them, two answers and padding, unless a case names another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.verify.rewriting import Draft, rewrite_sample, turns
from vlmdata.format.manifest import Manifest
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.verify.dataset import verify_dataset

TWO_IMAGES, TEXT_ONLY = "000000002", "000000001"
Change = Callable[[Draft, TokenizerInfo], None]
CASES: list = []


def fault(*checks: str, key: str = TWO_IMAGES) -> Callable[[Change], Change]:
    """Declares a way to damage a sample and the checks, no more and no fewer, that must object."""

    def declare(change: Change) -> Change:
        CASES.append(pytest.param(change, set(checks), key, id=change.__name__))
        return change

    return declare


def places(draft: Draft, token: int) -> np.ndarray:
    return np.flatnonzero(draft.input_ids[: draft.length] == token)


# The mask


@fault("header_target", "broken_target")
def mask_shifted_one_token_left(draft, t):
    draft.loss_mask = np.roll(draft.loss_mask, -1)


@fault("forbidden_target", "prompt_target", "broken_target", "padding")
def mask_shifted_one_token_right(draft, t):
    draft.loss_mask = np.roll(draft.loss_mask, 1)


@fault("prompt_target", "end_token")
def prompt_is_a_target(draft, t):
    question = turns(draft, t)[3]
    draft.loss_mask[question.start + 3 : question.stop] = 1


@fault("prompt_target", "broken_target")
def one_token_of_the_prompt_is_a_target(draft, t):
    draft.loss_mask[turns(draft, t)[1].start + 3] = 1


@fault("header_target")
def header_is_a_target(draft, t):
    answer = turns(draft, t)[2]
    draft.loss_mask[answer.start + 1 : answer.stop] = 1


@fault("header_target", "forbidden_target")
def header_with_its_start_token_is_a_target(draft, t):
    draft.loss_mask[turns(draft, t)[2]] = 1


@fault("broken_target", "end_token")
def end_token_is_no_target(draft, t):
    draft.loss_mask[places(draft, t.turns.end)[-1]] = 0


@fault("broken_target", "end_token")
def end_token_and_newline_are_no_targets(draft, t):
    draft.loss_mask[turns(draft, t)[2].stop - 2 : turns(draft, t)[2].stop] = 0


@fault("broken_target")
def newline_after_the_end_token_is_no_target(draft, t):
    draft.loss_mask[draft.length - 1] = 0


@fault("broken_target")
def hole_in_the_targets(draft, t):
    draft.loss_mask[places(draft, t.turns.end)[-1] - 2] = 0


@fault("padding")
def padding_is_a_target(draft, t):
    draft.loss_mask[draft.length] = 1


@fault("forbidden_target")
def pad_token_within_an_answer_is_a_target(draft, t):
    draft.input_ids[places(draft, t.turns.end)[-1] - 2] = t.pad


@fault("forbidden_target", "prompt_target", "broken_target")
def image_token_is_a_target(draft, t):
    draft.loss_mask[places(draft, t.image)[0]] = 1


@fault("forbidden_target", "prompt_target", "broken_target")
def vision_start_is_a_target(draft, t):
    draft.loss_mask[places(draft, t.items["image"].before[0])[0]] = 1


@fault("forbidden_target", "prompt_target", "broken_target")
def vision_end_is_a_target(draft, t):
    draft.loss_mask[places(draft, t.items["image"].after[0])[0]] = 1


@fault("no_target")
def nothing_is_a_target(draft, t):
    draft.loss_mask[:] = 0


@fault("no_target", key=TEXT_ONLY)
def nothing_is_a_target_and_the_metadata_agrees(draft, t):
    draft.loss_mask[:] = 0
    draft.target_turns = 0


@fault("untaught_turn")
def one_answer_is_left_out(draft, t):
    draft.loss_mask[turns(draft, t)[2]] = 0
    draft.target_turns = 1


@fault("mask", "broken_target")
def mask_holds_another_number_than_0_and_1(draft, t):
    draft.loss_mask[places(draft, t.turns.end)[-1] - 1] = 2


@fault("outside_turn")
def target_before_the_first_turn(draft, t):
    draft.input_ids[0] = 0
    draft.loss_mask[0] = 1


@fault("outside_turn")
def no_turn_begins(draft, t):
    draft.input_ids[draft.input_ids == t.turns.start] = 0


@fault("end_token")
def number_of_target_turns_is_wrong(draft, t):
    draft.target_turns = 3


@fault("end_token")
def marked_as_cut_but_is_not(draft, t):
    draft.truncated = True


# Images


@fault("image_block")
def image_block_is_cut_short(draft, t):
    draft.input_ids[places(draft, t.image)[5]] = 0


@fault("image_block")
def image_block_has_a_token_too_many(draft, t):
    draft.input_ids[places(draft, t.items["image"].after[0])[1] + 1] = t.image


@fault("image_block")
def image_block_is_interrupted(draft, t):
    at = places(draft, t.image)
    draft.input_ids[at[2]], draft.input_ids[at[-1] + 2] = 0, t.image


@fault("image_block")
def image_block_is_not_closed(draft, t):
    draft.input_ids[places(draft, t.items["image"].after[0])[0]] = 0


@fault("image_block")
def image_block_is_not_opened(draft, t):
    draft.input_ids[places(draft, t.items["image"].before[0])[1]] = 0


@fault("image_block")
def image_block_is_opened_one_token_early(draft, t):
    at = places(draft, t.items["image"].before[0])[0]
    draft.input_ids[[at - 1, at]] = draft.input_ids[[at, at - 1]]


@fault("image_block")
def image_block_is_closed_one_token_late(draft, t):
    at = places(draft, t.items["image"].after[0])[1]
    draft.input_ids[[at, at + 1]] = draft.input_ids[[at + 1, at]]


@fault("image_block")
def vision_start_without_an_image(draft, t):
    draft.input_ids[places(draft, t.items["image"].after[0])[1] + 1] = t.items["image"].before[0]


@fault("image_block", key=TEXT_ONLY)
def image_token_without_an_image(draft, t):
    draft.input_ids[4] = t.image


@fault("image_block")
def grid_asks_for_fewer_tokens_than_there_are(draft, t):
    draft.image_grid_thw[0] = (1, 4, 4)
    draft.patches = draft.patches[8:]


@fault("image_block")
def grids_of_two_images_are_exchanged(draft, t):
    draft.image_grid_thw = np.ascontiguousarray(draft.image_grid_thw[::-1])


@fault("positions")
def grid_is_transposed(draft, t):
    draft.image_grid_thw[0] = draft.image_grid_thw[0][[0, 2, 1]]


@fault("image_block")
def image_without_a_place_in_the_text(draft, t):
    draft.image_grid_thw = np.concatenate([draft.image_grid_thw, np.array([[1, 2, 2]], np.int32)])
    draft.patches = np.concatenate([draft.patches, draft.patches[:4]])
    draft.item_starts = (*draft.item_starts, 40)


@fault("shape")
def fewer_patches_than_the_grid_asks_for(draft, t):
    draft.patches = draft.patches[:-1]


@fault("shape")
def patches_of_another_size(draft, t):
    draft.patches = np.ascontiguousarray(draft.patches[:, :192])


@fault("grid")
def grid_with_an_odd_side(draft, t):
    draft.image_grid_thw[0] = (1, 3, 8)


@fault("grid")
def grid_of_negative_sides(draft, t):
    draft.image_grid_thw[0] *= (1, -1, -1)


@fault("grid", key=TEXT_ONLY)
def grid_of_no_patches(draft, t):
    draft.image_grid_thw = np.array([[1, 0, 2]], np.int32)
    draft.item_starts = (4,)


@fault("index")
def index_names_another_start_of_an_image(draft, t):
    draft.item_starts = (draft.item_starts[0], draft.item_starts[1] + 1)


# Positions


@fault("positions")
def one_position_is_wrong(draft, t):
    draft.position_ids[0, 5] += 1


@fault("positions")
def positions_start_anew_at_the_second_question(draft, t):
    start = turns(draft, t)[3].start
    draft.position_ids[:, start : draft.length] -= draft.position_ids[:, start : start + 1]


@fault("positions")
def positions_ignore_the_images(draft, t):
    draft.position_ids[:, : draft.length] = np.arange(draft.length)


@fault("positions", key=TEXT_ONLY)
def positions_start_at_one(draft, t):
    draft.position_ids[:, : draft.length] += 1


# Lengths, ids, metadata


@fault("padding")
def length_is_one_too_small(draft, t):
    draft.length -= 1


@fault("positions")
def length_is_one_too_great(draft, t):
    draft.length += 1


@fault("length")
def length_is_zero(draft, t):
    draft.length = 0


@fault("length")
def length_is_more_than_is_stored(draft, t):
    draft.length = len(draft.input_ids) + 1


@fault("length")
def stored_length_is_no_multiple_of_the_padding(draft, t):
    resize(draft, -1, t)


@fault("length")
def more_padding_than_needed(draft, t):
    resize(draft, 16, t)


@fault("padding")
def padding_is_another_token(draft, t):
    draft.input_ids[draft.length :] = t.turns.end


@fault("padding")
def padding_has_positions(draft, t):
    draft.position_ids[:, draft.length :] = 5


@fault("vocabulary")
def id_beyond_the_vocabulary(draft, t):
    draft.input_ids[4] = t.vocab_size


@fault("vocabulary")
def negative_id(draft, t):
    draft.input_ids[4] = -1


@fault("metadata")
def metadata_names_another_source_row(draft, t):
    draft.rest["source_row"] = 99


@fault("metadata")
def metadata_names_another_key(draft, t):
    draft.rest["key"] = "000000099"


def resize(draft: Draft, by: int, t: TokenizerInfo) -> None:
    size = len(draft.input_ids) + by
    for name, fill in (("input_ids", t.pad), ("loss_mask", 0), ("position_ids", 0)):
        before = getattr(draft, name)
        after = np.full((*before.shape[:-1], size), fill, before.dtype)
        kept = min(size, before.shape[-1])
        after[..., :kept] = before[..., :kept]
        setattr(draft, name, after)


@pytest.mark.parametrize(("change", "checks", "key"), CASES)
def test_fault_is_named_with_shard_row_and_key(damaged, change, checks, key):
    tokenizer = Manifest.read(damaged).tokenizer
    rewrite_sample(damaged, key, lambda draft: change(draft, tokenizer))
    faults = verify_dataset(damaged).faults
    assert {found.check for found in faults} == checks
    assert {(found.file, found.row, found.key) for found in faults} == {("shard-000000.tar", int(key), key)}
    assert all(f"shard-000000.tar row {int(key)} key {key}: " in str(found) for found in faults)


def test_rewriting_without_a_change_leaves_a_sound_dataset(damaged, sound_dataset):
    rewrite_sample(damaged, TWO_IMAGES, lambda draft: None)
    assert verify_dataset(damaged).faults == []
    assert (damaged / "shard-000000.tar").read_bytes() == (sound_dataset / "shard-000000.tar").read_bytes()
