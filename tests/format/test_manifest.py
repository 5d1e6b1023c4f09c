"""The manifest: canonical text, a round trip, tolerance of what comes later, and clear errors for the rest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdata.errors import DatasetFormatError
from vlmdata.format.manifest import Manifest, ShardInfo, Totals, canonical_hash, differences
from vlmdata.format.schema import MANIFEST_NAME, SCHEMA_VERSION, supported_features
from vlmdata.format.tokenizer_info import ItemTokens, TokenizerInfo, TurnTokens

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)


def example() -> Manifest:
    items = {"image": ItemTokens(5, (3,), (4,)), "video": ItemTokens(6, (3,), (4,))}
    tokenizer = TokenizerInfo("embedded", "f" * 64, "c" * 64, 1000, 0, TurnTokens(1, 2, (7, 8)), items)
    config = {"options": {"pad_multiple": 16, "note": "größe"}}
    return Manifest(
        config=config,
        config_hash=canonical_hash(config),
        source={"kind": "files", "rows": 3},
        tokenizer=tokenizer,
        totals=Totals(3, 2, 1, 40, 8, 12, 2, 32, 2048, 0),
        rejects={"overlong": 1},
        shards=(ShardInfo("shard-000000.tar", 0, 3, 2, 1, 2048, "a" * 64),),
        index_sha256="b" * 64,
        ledger_sha256="d" * 64,
        features=("images", "patches-raw"),
        created_by="test",
    )


def write(directory: Path, fields: Any) -> Path:
    (directory / MANIFEST_NAME).write_text(json.dumps(fields), encoding="utf-8")
    return directory


def fields_of(manifest: Manifest) -> dict[str, Any]:
    return json.loads(manifest.to_json())


def test_it_comes_back_as_it_was(tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(example().to_json())
    assert Manifest.read(tmp_path) == example()


def test_its_text_is_canonical():
    text = example().to_json().decode()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert json.loads(text)["format"] == "vlmdata"
    assert json.loads(text)["schema_version"] == SCHEMA_VERSION


def test_its_fingerprint_changes_with_any_field():
    shards = (dataclasses.replace(example().shards[0], sha256="e" * 64),)
    changed = dataclasses.replace(example(), shards=shards)
    assert example().fingerprint == example().fingerprint
    assert changed.fingerprint != example().fingerprint


def test_a_dataset_of_this_writer_needs_only_known_features(mixed_dataset):
    assert set(Manifest.read(mixed_dataset).features) <= supported_features()


@pytest.mark.parametrize("name", [field for field in fields_of(example()) if field not in ("format", "created_by")])
def test_a_missing_field_is_a_format_error(tmp_path, name):
    fields = fields_of(example())
    del fields[name]
    with pytest.raises(DatasetFormatError, match=name.replace("schema_version", "schema version")):
        Manifest.read(write(tmp_path, fields))


def test_who_wrote_it_is_optional(tmp_path):
    fields = fields_of(example())
    del fields["created_by"]
    assert Manifest.read(write(tmp_path, fields)) == dataclasses.replace(example(), created_by="")


@pytest.mark.parametrize("part", ["tokenizer", "totals", "shards"])
def test_a_missing_field_of_a_part_is_a_format_error(tmp_path, part):
    fields = fields_of(example())
    inner = fields[part][0] if part == "shards" else fields[part]
    name = sorted(inner)[-1]
    del inner[name]
    with pytest.raises(DatasetFormatError, match=name):
        Manifest.read(write(tmp_path, fields))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), junk=JSON)
def test_whatever_stands_in_a_field_it_is_read_or_refused_with_a_format_error(tmp_path_factory, data, junk):
    fields = fields_of(example())
    part = data.draw(st.sampled_from([fields, fields["tokenizer"], fields["totals"], fields["shards"][0]]))
    name = data.draw(st.sampled_from(sorted(part)))
    usual, part[name] = type(part[name]), junk
    directory = write(tmp_path_factory.mktemp("manifest"), fields)
    with suppress(DatasetFormatError):
        Manifest.read(directory)
        assert isinstance(junk, usual), f"{name} was {usual.__name__} and may not be {junk!r}"


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "7", '{"format": "other"}', "{}", "\xff"])
def test_a_file_that_is_no_manifest_is_a_format_error(tmp_path, text):
    (tmp_path / MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(DatasetFormatError, match=r"manifest\.json: not a (readable|vlmdata) manifest"):
        Manifest.read(tmp_path)


class TestDifferences:
    @settings(max_examples=60, deadline=None)
    @given(value=JSON)
    def test_equal_values_do_not_differ(self, value):
        assert differences(value, json.loads(json.dumps(value))) == []

    @settings(max_examples=60, deadline=None)
    @given(old=JSON, new=JSON)
    def test_no_difference_means_equal(self, old, new):
        same = canonical_hash(_without_null(old)) == canonical_hash(_without_null(new))
        assert same or differences({"x": old}, {"x": new})

    def test_each_is_named_by_its_path_with_both_values(self):
        old = {"a": {"b": 1, "c": "x"}, "d": [1, 2]}
        new = {"a": {"b": 2, "c": "x"}, "d": [1, 2], "e": True}
        assert differences(old, new) == ["a.b: 1 there, 2 now", "e: null there, true now"]

    def test_a_tuple_is_the_list_it_becomes_in_json(self):
        assert differences({"a": (1, 2)}, {"a": [1, 2]}) == []


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(inner) for name, inner in value.items() if inner is not None}
    return value


def test_the_canonical_hash_knows_content_and_not_order():
    assert canonical_hash({"a": 1, "b": [1, 2]}) == canonical_hash({"b": [1, 2], "a": 1})
    assert canonical_hash({"a": 1}) != canonical_hash({"a": "1"})
    assert canonical_hash([1, 2]) != canonical_hash([2, 1])


def test_a_family_that_this_version_does_not_know_is_refused(tmp_path):
    with pytest.raises(DatasetFormatError, match="is for the model family 'llava'; this vlmdata supports qwen3_5"):
        Manifest.read(write(tmp_path, fields_of(example()) | {"family": "llava"}))
    assert Manifest.read(write(tmp_path, fields_of(example()))).model_family.name == "qwen3_5"
    known = Manifest.read(write(tmp_path, fields_of(example()) | {"family": "qwen2_5_vl"}))
    assert known.model_family.patch_size == 14


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_manifest_of_format_1_is_mapped_and_keeps_its_fingerprint(tmp_path, version):
    """Its tokenizer's fields, as the writers of these versions had them."""
    fields = fields_of(example()) | {"schema_version": version}
    later = {} if version == "1.0" else {"special_tokens": {"pad_token": "<|endoftext|>"}, "end_of_text": 9}
    marks = {"im_start": 1, "im_end": 2, "vision_start": 3, "vision_end": 4, "image": 5, "video": 6}
    common = {name: fields["tokenizer"][name] for name in ("name", "fingerprint", "chat_template", "vocab_size", "pad")}
    fields["tokenizer"] = common | marks | {"assistant_header": [7, 8]} | later
    totals = fields["totals"]
    totals["images"] = totals.pop("items")
    if "item_bytes" in totals:
        totals["image_bytes"] = totals.pop("item_bytes")
    text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (tmp_path / MANIFEST_NAME).write_text(text, encoding="utf-8")
    manifest = Manifest.read(tmp_path)
    assert manifest.tokenizer == dataclasses.replace(example().tokenizer, **later)
    assert manifest.to_json() == text.encode()
    assert manifest.fingerprint == hashlib.sha256(text.encode()).hexdigest()
    now = json.loads(dataclasses.replace(manifest, schema_version=SCHEMA_VERSION).to_json())["tokenizer"]
    assert set(now) == {*common, "turns", "items", *later}
