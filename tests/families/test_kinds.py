"""Families of other kinds than Qwen's: their samples are transformers', and all that follows works on them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vlmdata
from tests.chat_rows import image_item, mixed_rows, turn, write_jsonl
from tests.conftest import build_dataset, encoded_image, tree_bytes
from tests.families.kinds import KINDS, PICTURES, Kind, conversations, of_the_processor, spoken, written_call
from tests.service.servers import assert_equal, serving
from vlmdata.context_parallel import partition_indices
from vlmdata.errors import SourceError, UsageError
from vlmdata.families import family
from vlmdata.inspect.page.payload import sample_payload
from vlmdata.inspect.sample import SpanKind, describe_sample, rebuild_image
from vlmdata.preprocess.chat.tokenizer import family_of, load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig, SpecialText, VideoConfig
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart, VideoPart
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.retokenize.run import old_config, retokenize_dataset
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset
from vlmdata.verify.sample import SampleRules, audit_sample

OPTIONS: dict[str, Any] = {"capacity": 4096, "global_batch": 1, "num_workers": 0}


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> str:
    return kind.write_tokenizer(tmp_path_factory.mktemp(kind.name) / "tokenizer")


@pytest.fixture(scope="module")
def encoder(kind: Kind, folder: str) -> Encoder:
    config = PreprocessConfig(
        family=kind.name, image=kind.image, special_text=SpecialText.PLAIN, max_length=1 << 17, pad_multiple=8
    )
    return Encoder(config, load_tokenizer(folder, None, kind.name))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixed rows, and one for each picture: of extreme sides, turned by EXIF, with transparency."""
    uris = ["data:image/png;base64," + base64.b64encode(picture.data).decode() for picture in PICTURES]
    pictures = [
        {"messages": [turn("user", {"type": "image", "image": uri}, "?"), turn("assistant", "Noise.")]} for uri in uris
    ]
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", [*mixed_rows(), *pictures])


@pytest.fixture(scope="module")
def made(kind: Kind, folder: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Preprocesses the source once with each set of options."""
    place, done = tmp_path_factory.mktemp("made"), dict[str, Path]()

    def make(**options: Any) -> Path:
        name = "-".join(map(str, options.values())) or "raw"
        if name not in done:
            given = {"family": kind.name, "tokenizer": folder, "image": kind.image, "pad_multiple": 8, **options}
            done[name] = build_dataset(source, place / name, recipe="chat", rows_per_shard=4, **given)
        return done[name]

    return make


def _teaches(conversation: Conversation) -> bool:
    return any(message.loss_weight != 0 for message in conversation.answers)


class TestSamples:
    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_equal_those_of_transformers_processor(self, kind: Kind, encoder: Encoder, data: st.DataObject) -> None:
        conversation = data.draw(conversations(kind).filter(_teaches))
        sample, rules = encoder.encode(conversation), encoder.config.model_family
        n, tokens = sample.length, sum(item.tokens for item in sample.items)
        is_image = sample.input_ids[:n] == encoder.tokenizer.info.image
        assert is_image.sum() == tokens
        assert sample.position_ids.tolist() == [[*range(n), *[0] * (len(sample.input_ids) - n)]]
        if any(mark in spoken(conversation) for mark in encoder.tokenizer.specials):
            return  # the processor takes them for its own
        wanted = of_the_processor(kind, encoder.tokenizer.hf, conversation)
        assert sample.input_ids[:n].tolist() == wanted["input_ids"][0].tolist()
        if "mm_token_type_ids" in wanted:
            assert is_image.astype(int).tolist() == wanted["mm_token_type_ids"][0].tolist()
        if sample.items:
            values = rules.pixel_values(torch.from_numpy(np.concatenate(sample.patches)))
            for name, value in rules.image_inputs(values, torch.from_numpy(sample.image_grid_thw)).items():
                assert torch.equal(value, wanted[name][:, : value.shape[1]]), name  # Gemma's are padded further

    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_learn_answers_with_their_ends_and_nothing_else(
        self, kind: Kind, encoder: Encoder, data: st.DataObject
    ) -> None:
        conversation = data.draw(conversations(kind).filter(_teaches))
        sample = encoder.encode(conversation)
        n, hf = sample.length, encoder.tokenizer.hf
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask[:n], [0]]).astype(np.int8)))
        runs = [hf.decode(sample.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]
        asked = max(n for n, message in enumerate(conversation.messages) if message.role == "user")
        answers = [
            written_call(message, n > asked)
            if message.tool_calls
            else (message.text.strip() if kind.trimmed else message.text) + kind.ending
            for n, message in enumerate(conversation.messages)
            if message.role == "assistant" and message.loss_weight != 0
        ]
        normal = hf.backend_tokenizer.normalizer
        assert runs == [normal.normalize_str(each) if normal else each for each in answers]

    def test_text_that_forges_a_mark_is_refused(self, kind: Kind, folder: str) -> None:
        encoder = Encoder(PreprocessConfig(family=kind.name), load_tokenizer(folder, None, kind.name))
        for mark in kind.marks:
            for asked, said in ((f"a {mark}", "b"), ("a", f"b {mark}")):
                talk = Conversation((Message("user", (TextPart(asked),)), Message("assistant", (TextPart(said),))))
                with pytest.raises(RowRejected) as caught:
                    encoder.encode(talk)
                assert caught.value.reason is Reason.SPECIAL_TOKEN_TEXT

    def test_a_size_that_the_data_requests_is_refused(self, kind: Kind, encoder: Encoder) -> None:
        picture = ImagePart(encoded_image(), resized_height=64, resized_width=64)
        talk = Conversation((Message("user", (picture,)), Message("assistant", (TextPart("b"),))))
        with pytest.raises(RowRejected, match=rf"resized_height 64 .* not of the family {kind.name}.* drop them"):
            encoder.encode(talk)

    def test_videos_are_refused(self, kind: Kind, encoder: Encoder) -> None:
        asked = Message("user", (VideoPart(b"", field="videos[0]"),))
        message = rf"videos\[0\] is a video, and vlmdata has no videos in the family {kind.name}\. Drop the row, or"
        with pytest.raises(RowRejected, match=message):
            encoder.encode(Conversation((asked, Message("assistant", (TextPart("b"),)))))

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_setting_of_the_processor_in_a_row_is_named(self, kind: Kind, encoder: Encoder, strict: bool) -> None:
        picture = image_item() | {"max_soft_tokens": 70}
        made = load_recipe("chat")(Row(0, {"messages": [turn("user", picture, "?"), turn("assistant", "b")]}))
        assert isinstance(made, Conversation)
        assert list(made.unknown) == ["messages[].content[].max_soft_tokens"]
        checked = Encoder(replace(encoder.config, strict=strict), encoder.tokenizer)
        if strict:
            with pytest.raises(RowRejected, match=r"max_soft_tokens.* --strict rejects such rows; drop the keys"):
                checked.encode(made)
        else:
            assert checked.encode(made).items


class TestTokenizers:
    def test_tell_their_family(self, kind: Kind, folder: str) -> None:
        assert family_of(folder) == kind.name

    def test_of_another_family_are_refused(self, kind: Kind, tmp_path: Path) -> None:
        with pytest.raises(
            SourceError, match=f"it has no token .*, so it is not a tokenizer of the family {kind.name}"
        ):
            load_tokenizer(family_name=kind.name)
        with pytest.raises(SourceError, match="so it is not a tokenizer of the family qwen3_5"):
            load_tokenizer(KINDS["gemma4"].write_tokenizer(tmp_path / "tokenizer"))


class TestDatasets:
    def test_are_sound_under_every_codec(self, made: Callable[..., Path]) -> None:
        assert verify_dataset(made()).faults == []
        raw, packed = vlmdata.open_dataset(made()), made(pixels="zstd")
        assert verify_dataset(packed).faults == []
        for mine, theirs in zip(vlmdata.open_dataset(packed), raw, strict=True):
            assert np.array_equal(mine.patches, theirs.patches)

    def test_are_recoded_and_retokenized(self, made: Callable[..., Path], source: Path, tmp_path: Path) -> None:
        """A copy has the bytes that preprocessing makes, but no table of the source's rows."""
        zstd, padded = tmp_path / "zstd", tmp_path / "padded"
        recode_dataset(made(), open_store(zstd), "zstd")
        old, rows = OldDataset.open(made()), open_source(str(source), recipe="chat")
        retokenize_dataset(old, open_store(padded), replace(old_config(old), pad_multiple=16), source=rows)
        for copy, wanted in ((zstd, made(pixels="zstd")), (padded, made(pad_multiple=16))):
            found, expected = (
                {name: content for name, content in tree_bytes(each).items() if name.endswith(".tar")}
                for each in (copy, wanted)
            )
            assert found == expected != {}
            assert verify_dataset(copy).faults == []

    @pytest.mark.parametrize("context_parallel", [1, 2])
    def test_load_within_both_limits(self, kind: Kind, made: Callable[..., Path], context_parallel: int) -> None:
        dataset, rules = vlmdata.open_dataset(made()), family(kind.name)
        most = int(dataset.index.num_patches.max())
        options = {"capacity": 4096, "max_patches": most, "global_batch": 1, "num_workers": 0}
        with vlmdata.StreamingLoader(made(), context_parallel=context_parallel, **options) as loader:
            batches = list(loader)
        assert sum(batch.num_samples for batch in batches) == len(dataset)
        for batch in batches:
            samples = [dataset.sample(key) for key in batch.sample_keys]
            assert batch.position_ids.shape == (1, 1, batch.total_tokens)
            assert batch.host.image_grid_thw.prod(axis=1).sum() <= most
            stored = [sample.patches for sample in samples if len(sample.patches)]
            if context_parallel == 1 and stored:
                values = rules.pixel_values(torch.from_numpy(np.concatenate(stored)))
                assert torch.equal(batch.pixel_values(), values)
                for name, value in rules.image_inputs(values, batch.image_grid_thw).items():
                    assert torch.equal(batch.image_inputs()[name], value)

    def test_slices_have_their_tokens_and_images(self, made: Callable[..., Path]) -> None:
        options = OPTIONS | {"context_parallel": 2}
        with vlmdata.StreamingLoader(made(), **options) as loader:
            whole = list(loader)
        held: list[list[int]] = [[] for _ in whole]
        for rank in range(2):
            with vlmdata.StreamingLoader(made(), context_parallel_rank=rank, **options) as loader:
                for found, full, images in zip(loader, whole, held, strict=True):
                    at = partition_indices(full.host.cu_seqlens_padded, full.total_tokens, 2, rank)
                    for name in ("input_ids", "labels", "loss_mask", "padding_mask"):
                        assert torch.equal(getattr(found, name), getattr(full, name)[:, at]), name
                    assert torch.equal(found.position_ids, full.position_ids)
                    mine = found.image_indices.tolist()
                    image_of = np.repeat(np.arange(len(full.image_grid_thw)), full.host.image_grid_thw.prod(axis=1))
                    values = full.pixel_values()[torch.from_numpy(np.isin(image_of, mine))]
                    assert torch.equal(found.pixel_values(), values)
                    wanted = full.family.image_inputs(values, full.image_grid_thw[mine])
                    for name, value in found.image_inputs().items():
                        assert torch.equal(value, wanted[name])
                    images += mine
        assert [sorted(images) for images in held] == [list(range(len(full.image_starts))) for full in whole]
        assert any(held)

    @pytest.mark.parametrize("options", [{}, {"context_parallel": 2, "context_parallel_rank": 1}])
    def test_are_served_as_they_are_loaded(self, made: Callable[..., Path], options: dict[str, int]) -> None:
        options = OPTIONS | options
        with (
            serving(made(), "-j", 1, "--memory", "64M") as server,
            vlmdata.StreamingLoader(made(), **options) as local,
            vlmdata.StreamingLoader(server.url, **options) as served,
        ):
            assert len(local) == len(served) > 0
            for one, two in zip(local, served, strict=True):
                assert_equal(one, two)
                inputs = two.image_inputs()
                assert all(torch.equal(value, inputs[name]) for name, value in one.image_inputs().items())

    def test_are_joined(self, kind: Kind, folder: str, made: Callable[..., Path], tmp_path: Path) -> None:
        row = {"messages": [turn("user", image_item(seed=9), "Else?"), turn("assistant", "More noise.")]}
        other = write_jsonl(tmp_path / "rows.jsonl", [row])
        options = {"family": kind.name, "tokenizer": folder, "image": kind.image, "pad_multiple": 8}
        parts = [made(), build_dataset(other, tmp_path / "other", recipe="chat", **options)]
        join_datasets([open_store(part) for part in parts], open_store(tmp_path / "joined"))
        assert verify_dataset(tmp_path / "joined").faults == []
        joined = vlmdata.open_dataset(tmp_path / "joined")
        assert joined.family is family(kind.name)
        samples = [sample for part in parts for sample in vlmdata.open_dataset(part)]
        for found, wanted in zip(joined, samples, strict=True):
            assert np.array_equal(found.input_ids, wanted.input_ids)
            assert np.array_equal(found.patches, wanted.patches)

    def test_are_shown(self, kind: Kind, made: Callable[..., Path]) -> None:
        dataset, rules = vlmdata.open_dataset(made()), family(kind.name)
        number = int(np.argmax(dataset.index.item_counts))
        sample = describe_sample(dataset, number)
        spans = [span for span in sample.spans if span.kind is SpanKind.IMAGE]
        assert [(span.start, span.stop) for span in spans] == [
            (image.start, image.start + image.tokens) for image in sample.images
        ]
        assert sample_payload(sample)["tokens"]["axes"] == ["position"]
        for image in sample.images:
            assert rebuild_image(dataset[number], image.number, rules).shape == (image.height, image.width, 3)

    def test_that_lost_a_mark_are_found(self, kind: Kind, made: Callable[..., Path]) -> None:
        dataset = vlmdata.open_dataset(made())
        number = int(np.argmax(dataset.index.item_counts))
        sample, row, rules = dataset[number], dataset.index.row(number), SampleRules.of(dataset.manifest)
        assert audit_sample(sample, row, rules) == []
        for token in dataset.manifest.tokenizer.items["image"].ids:
            ids = sample.input_ids.copy()
            ids[np.flatnonzero(ids == token)[0]] = 0
            found = audit_sample(replace(sample, input_ids=ids), row, rules)
            assert {check for check, _ in found} == {"image_block"}


def test_options_for_videos_are_refused_in_families_without(kind: Kind) -> None:
    config = PreprocessConfig(family=kind.name, image=kind.image, video=VideoConfig(fps=1.0))
    message = f"`fps` has no effect: vlmdata has no videos in the family {kind.name}; drop it"
    with pytest.raises(UsageError, match=message):
        config.to_json()
