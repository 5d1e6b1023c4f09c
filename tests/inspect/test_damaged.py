"""Samples that make no sense are described all the same: the tool is for looking at what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.inspect.conftest import Command
from tests.inspect.serving import serving
from tests.verify.rewriting import Draft, rewrite_sample
from vlmdata.format.manifest import Manifest
from vlmdata.inspect import describe_dataset, describe_sample
from vlmdata.inspect.findings import Severity
from vlmdata.storage.open import open_dataset

KEY = "000000000"


def ids_out_of_range(draft: Draft) -> None:
    draft.input_ids[5] = -7
    draft.input_ids[6] = 2**31 - 1


def mask_of_twos(draft: Draft) -> None:
    draft.loss_mask[draft.loss_mask == 1] = 2


def no_turns(draft: Draft) -> None:
    draft.input_ids[: draft.length] = draft.input_ids[draft.length - 1]


def only_turn_starts(draft: Draft) -> None:
    draft.input_ids[: draft.length] = draft.input_ids[0]


def images_everywhere(draft: Draft) -> None:
    draft.input_ids[: draft.length] = draft.input_ids[4]


def image_elsewhere(draft: Draft) -> None:
    draft.item_starts = (draft.length - 3,)


def no_image_tokens(draft: Draft) -> None:
    draft.input_ids[draft.input_ids == draft.input_ids[4]] = draft.input_ids[1]


def wild_positions(draft: Draft) -> None:
    draft.position_ids[:] = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, draft.position_ids.shape)


DAMAGE = [ids_out_of_range, mask_of_twos, no_turns, only_turn_starts, images_everywhere, image_elsewhere]
DAMAGE += [no_image_tokens, wild_positions]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_shown(
    mixed: Path, copy_of: Callable[[Path], Path], tmp_path: Path, command: Command, damage: Callable[[Draft], None]
) -> None:
    copy = copy_of(mixed)
    rewrite_sample(copy, KEY, damage)
    dataset = open_dataset(copy)
    sample = describe_sample(dataset, KEY)
    assert sample.spans[-1].stop == sample.length == len(sample.tokens.texts)
    assert sample.turns[-1].stop == sample.length
    groups = {group.kind: group for group in describe_dataset(dataset).findings if group.severity is Severity.FAULT}
    assert groups
    assert {example.key for group in groups.values() for example in group.examples} == {KEY}
    assert command(copy, "--sample", KEY, "--tokens")[0] == 0
    assert command(copy, "--html", tmp_path / "page.html")[0] == 0


def test_what_stands_before_the_first_turn_is_no_turns(mixed: Path, copy_of: Callable[[Path], Path]) -> None:
    copy = copy_of(mixed)
    rewrite_sample(copy, KEY, lambda draft: draft.input_ids.__setitem__(0, draft.input_ids[1]))
    turns = describe_sample(open_dataset(copy), KEY).turns
    assert [turn.role for turn in turns] == ["", "assistant"]
    assert (turns[0].start, turns[0].stop) == (0, turns[1].start)


def test_changed_pixels_are_shown_and_named(mixed: Path, copy_of: Callable[[Path], Path]) -> None:
    copy = copy_of(mixed)
    dataset = open_dataset(copy)
    with open(dataset.shard_path(0), "r+b") as file:
        file.seek(int(dataset.index.item_offsets[0]))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    (found,) = [each for each in describe_sample(open_dataset(copy), KEY).findings if each.kind == "checksum"]
    assert "row 0 key 000000000 patches of image 0: the data changed after preprocessing" in found.message
    assert found.severity is Severity.FAULT


def test_a_grid_that_does_not_fit_leaves_the_picture_out_and_the_rest_in(
    mixed: Path, copy_of: Callable[[Path], Path], tmp_path: Path, command: Command
) -> None:
    copy = copy_of(mixed)
    dataset = open_dataset(copy)
    # In the shard alone: offsets and counts of the index still hold.
    path = copy / Manifest.read(copy).shards[0].name
    offset = int(dataset.index.data_offsets["image_grid_thw"][0])
    data = bytearray(path.read_bytes())
    data[offset : offset + 12] = np.array([1, 3, 50], "<i4").tobytes()
    path.write_bytes(data)
    assert command(copy, "--html", tmp_path / "page.html")[0] == 0
    code, out, _ = command(copy, "--sample", 0)
    assert code == 0
    assert "✖ grid" in out
    assert "✖ checksum" in out
    assert f"{path}: row 0 key {KEY} image_grid_thw: the data changed after preprocessing" in " ".join(out.split())
    with serving(copy, check=0) as client:
        answer = client.ask("/api/samples/0/images/0")
        assert answer.status == 500
        assert "has the grid [1, 3, 50]" in answer.json()["error"]
        assert client.ask("/api/samples/0").status == 200
