"""Samples that are too long are rejected before memory is spent on them, and references to one file share it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image
from vlmdata.preprocess.chat.tokenizer import _PIECE, ChatTokenizer
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import Encoder, image
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason
from vlmdata.verify.dataset import verify_dataset

IMAGES = ImageConfig(1024, 4096)


def talk(parts: list[Any], answer: str = "Yes.") -> Conversation:
    return Conversation((Message("user", (*parts, TextPart("?"))), Message("assistant", (TextPart(answer),))))


def picture(seed: int = 0, **more: Any) -> ImagePart:
    data = encoded_image(seed=seed, width=64, height=64)
    return ImagePart(bytes(bytearray(data)), **more)  # a copy: other references are other objects


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fields of the images that are decoded."""
    fields: list[str] = []
    before = image.decode_image
    monkeypatch.setattr(image, "decode_image", lambda data, most, what: fields.append(what) or before(data, most, what))
    return fields


def rejection(encoder: Encoder, made: Conversation | Document) -> RowRejected:
    with pytest.raises(RowRejected) as caught:
        encoder.encode_all(made)
    return caught.value


class TestReferencesToOneFile:
    def test_are_decoded_and_held_once(self, tokenizer: ChatTokenizer, decoded: list[str]) -> None:
        encoder = Encoder(PreprocessConfig(image=IMAGES), tokenizer)
        parts = [picture(field=f"images[{n}]") for n in range(100)]
        parts[7] = picture(field="images[7]", resized_height=32, resized_width=32)
        sample = encoder.encode(talk(parts))
        assert decoded == ["images[0]", "images[7]"]
        assert len({id(each.patches) for each in sample.items}) == 2
        assert [each.tokens for each in sample.items] == [4] * 7 + [4] + [4] * 92
        plain = Encoder(PreprocessConfig(image=IMAGES), tokenizer).encode(talk([picture()]))
        assert np.array_equal(sample.items[99].patches, plain.items[0].patches)

    @pytest.mark.parametrize("pixels", ["raw", "zstd", "source"])
    def test_are_read_once_and_sound_under_every_codec(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pixels: str
    ) -> None:
        for name in "ab":
            (tmp_path / f"{name}.png").write_bytes(encoded_image(seed=ord(name)))
        row = {"text": "One <image> two <image> three <image> four <image>", "images": ["a.png", "b.png"] * 2}
        read: list[str] = []
        before = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or before(path))
        source = open_source(str(write_jsonl(tmp_path / "rows.jsonl", [row, row])))
        config = PreprocessConfig(recipe="text", image=IMAGES, pixels=pixels)
        preprocess_dataset(source, tmp_path / "out", config)
        assert [name for name in read if name.endswith(".png")] == ["a.png", "b.png"] * 2
        assert verify_dataset(tmp_path / "out").faults == []


class TestOverlongByImages:
    @pytest.mark.parametrize("overlong", [Overlong.REJECT, Overlong.TRUNCATE])
    def test_a_conversation_is_rejected_from_headers(
        self, tokenizer: ChatTokenizer, decoded: list[str], monkeypatch: pytest.MonkeyPatch, overlong: Overlong
    ) -> None:
        encoder = Encoder(PreprocessConfig(image=IMAGES, max_length=100, overlong=overlong), tokenizer)
        sample = talk([picture(seed) for seed in range(60)])
        found = rejection(encoder, sample)
        assert (found.reason, decoded) == (Reason.OVERLONG, [])
        monkeypatch.setattr("vlmdata.preprocess.encode.encoder.item_tokens", lambda *_, **__: None)
        assert rejection(encoder, sample).message == found.message
        assert len(decoded) == 60

    def test_a_document_is_rejected_from_headers(
        self, tokenizer: ChatTokenizer, decoded: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoder = Encoder(PreprocessConfig(image=IMAGES, max_length=100), tokenizer)
        document = Document((*(picture(seed) for seed in range(60)), TextPart("Text.")))
        found = rejection(encoder, document)
        assert (found.reason, decoded) == (Reason.OVERLONG, [])
        monkeypatch.setattr("vlmdata.preprocess.encode.document.image_tokens", lambda *_, **__: None)
        assert rejection(encoder, document).message == found.message

    def test_the_limit_is_the_same_as_after_decoding(self, tokenizer: ChatTokenizer) -> None:
        """Photographs turned by their EXIF included."""
        turned = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", (100, 40)).save(turned, format="JPEG", exif=exif)
        made = talk([picture(), ImagePart(turned.getvalue()), picture(1, min_pixels=8192, max_pixels=16384)])
        length = Encoder(PreprocessConfig(image=IMAGES), tokenizer).encode(made).length
        assert Encoder(PreprocessConfig(image=IMAGES, max_length=length), tokenizer).encode(made).length == length
        assert rejection(
            Encoder(PreprocessConfig(image=IMAGES, max_length=length - 1), tokenizer), made
        ).message.startswith(f"{length} tokens (3 images)")

    def test_a_damaged_file_is_told_first(self, tokenizer: ChatTokenizer) -> None:
        encoder = Encoder(PreprocessConfig(image=IMAGES, max_length=100), tokenizer)
        parts = [*(picture(seed) for seed in range(60)), ImagePart(b"none", "images[60]")]
        assert rejection(encoder, talk(parts)).reason is Reason.NOT_AN_IMAGE


class TestOverlongByText:
    def test_is_rejected_before_it_is_tokenized_whole(self, tokenizer: ChatTokenizer) -> None:
        text = "A long text of words and more words. " * 110_000  # 4 MB
        longest = 0
        backend = tokenizer.hf.backend_tokenizer

        class Counting:
            def encode(self, piece: str, **options: Any) -> Any:
                nonlocal longest
                longest = max(longest, len(piece))
                return backend.encode(piece, **options)

        class Hf:
            backend_tokenizer = Counting()

            def __getattr__(self, name: str) -> Any:
                return getattr(tokenizer.hf, name)

        counted = ChatTokenizer(Hf(), tokenizer.family, tokenizer.info, tokenizer.reserved, tokenizer.specials)
        encoder = Encoder(PreprocessConfig(max_length=1000), counted)
        for made, hint in ((talk([], text), ""), (Document((TextPart(text),)), "; --overlong split makes")):
            found = rejection(encoder, made)
            assert found.reason is Reason.OVERLONG
            assert found.message.startswith("more than 2000 tokens of text (4,")
            assert f"over --max-length 1000{hint}" in found.message
        assert 0 < longest <= _PIECE

    @pytest.mark.parametrize(
        "text", ["        " * 20_000, "word " * 20_000, "a" * 160_000], ids=["spaces", "words", "a"]
    )
    def test_is_never_a_sample_that_fits(self, tokenizer: ChatTokenizer, text: str) -> None:
        made = Document((TextPart(f"x{text}x"),))
        (whole,) = Encoder(PreprocessConfig(max_length=1 << 20), tokenizer).encode_all(made)
        assert not isinstance(whole, RowRejected)
        encoder = Encoder(PreprocessConfig(max_length=whole.length), tokenizer)
        (sample,) = encoder.encode_all(made)
        assert not isinstance(sample, RowRejected)
        assert np.array_equal(sample.input_ids, whole.input_ids)

    def test_is_split_all_the_same(self, tokenizer: ChatTokenizer) -> None:
        encoder = Encoder(PreprocessConfig(max_length=1000, overlong=Overlong.SPLIT), tokenizer)
        assert len(encoder.encode_all(Document((TextPart("word " * 20_000),)))) > 4
