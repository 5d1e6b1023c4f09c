"""Documents: tokens and positions against transformers, targets, forged marks, and the cutting of long ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.chat_rows import data_uri, write_jsonl
from tests.conftest import build_dataset, encoded_image
from tests.preprocess.encode.test_parity_transformers import assert_equal, build_processor, images, texts
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.media.decode import decode_image
from vlmdata.preprocess.config import ImageConfig, Overlong, PreprocessConfig, SpecialText
from vlmdata.preprocess.conversation import Document, ImagePart, TextPart
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.encode.document import cut
from vlmdata.preprocess.reject import RowRejected
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset

SMALL = ImageConfig(min_pixels=1024, max_pixels=16_384)
MARKS = "<|vision_start|><|image_pad|><|vision_end|>"
END = "<|endoftext|>"


def encode(tokenizer: Any, document: Document, **options: Any) -> list[Any]:
    return Encoder(PreprocessConfig(image=SMALL, **options), tokenizer).encode_all(document)


def ids_of(tokenizer: Any, *names: str) -> list[int]:
    return [tokenizer.hf.convert_tokens_to_ids(name) for name in names]


@st.composite
def documents(draw: st.DrawFn) -> Document:
    parts = draw(st.lists(st.one_of(texts.map(TextPart), images), max_size=6))
    return Document((TextPart(draw(texts.filter(str.strip))), *parts))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(document=documents())
@example(document=Document((TextPart("<|vision_end|>"),)))
@example(document=Document((TextPart("a"), ImagePart(encoded_image()), TextPart("<|im_"), TextPart("end|>"))))
def test_random_documents_equal_the_processor(document: Document, tokenizer: Any) -> None:
    """Tokens, pixels and ``get_rope_index`` of transformers, on the text with placeholders and no template."""
    written = "".join(part.text if isinstance(part, TextPart) else "\n" for part in document.parts)
    if any(name in written for name in tokenizer.reserved):  # the processor would read it as that token
        with pytest.raises(RowRejected, match="special_token_text: the data spells the special token"):
            encode(tokenizer, document)
        return
    text = "".join(part.text if isinstance(part, TextPart) else MARKS for part in document.parts) + END
    pictures = [Image.fromarray(decode_image(part.data, 10**7).pixels) for part in document.images]
    processor = build_processor(tokenizer, SMALL)
    outputs = processor(images=pictures or None, text=[text], return_tensors="pt", return_mm_token_type_ids=True)
    (sample,) = encode(tokenizer, document)
    assert_equal(sample, outputs)
    ids = sample.input_ids[: sample.length]
    marks = np.isin(ids, ids_of(tokenizer, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"))
    expected = ~marks
    expected[0] = False
    assert (sample.loss_mask[: sample.length] == expected).all()
    assert not sample.loss_mask[sample.length :].any()
    assert (ids[-1], sample.target_turns, sample.truncated) == (tokenizer.info.end_of_text, 0, False)


_FORGED = st.sampled_from([END, "<|im_start|>assistant\n", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.one_of(texts, _FORGED), min_size=1, max_size=5))
@example(pieces=["<|im_", "end|>"])
@example(pieces=["<|vision_start|><|image_pad|", ">x"])
def test_text_cannot_forge_tokens(pieces: list[str], tokenizer: Any) -> None:
    image = ImagePart(encoded_image(32, 32))
    document = Document((image, *map(TextPart, pieces), image, TextPart("a")))
    spelled = [name for name in tokenizer.reserved if name in "".join(pieces)]
    (sample,) = encode(tokenizer, document, special_text=SpecialText.PLAIN)
    ids = sample.input_ids[: sample.length]
    reserved = ids_of(tokenizer, *tokenizer.reserved)
    found = ids[np.isin(ids, reserved)].tolist()
    block = ids_of(tokenizer, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    assert found == [*block, *block, tokenizer.info.end_of_text]
    if spelled:
        with pytest.raises(RowRejected, match="special_token_text: the data spells the special token"):
            encode(tokenizer, document)
    else:
        assert encode(tokenizer, document)[0].input_ids.tolist() == sample.input_ids.tolist()


@pytest.mark.parametrize("parts", [(), (TextPart(" \n"),), (ImagePart(encoded_image()),)])
def test_a_document_without_text_is_rejected(parts: tuple[Any, ...], tokenizer: Any) -> None:
    with pytest.raises(RowRejected, match="empty_document: no text to learn"):
        encode(tokenizer, Document(parts))


def test_a_weight_counts_for_all_targets(tokenizer: Any) -> None:
    text = (TextPart("some words to learn"),)
    (plain,), (weighted,) = encode(tokenizer, Document(text)), encode(tokenizer, Document(text, loss_weight=0.5))
    assert plain.loss_weights is None
    assert weighted.loss_weights is not None
    assert np.array_equal(weighted.loss_weights, plain.loss_mask * np.float32(0.5))
    with pytest.raises(RowRejected, match="no_targets"):
        encode(tokenizer, Document(text, loss_weight=0))
    with pytest.raises(RowRejected, match="loss_weight: the loss weight of the document is 1e"):
        encode(tokenizer, Document(text, loss_weight=1e30))


# --- long documents -------------------------------------------------------------------------------------------


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    at, blocks = 0, []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 12), st.integers(3, 9)), max_size=6)):
        blocks.append((at + gap, at + gap + size))
        at += gap + size
    return at + draw(st.integers(1, 30)), blocks


@given(sequence=sequences(), most=st.integers(9, 40))
def test_pieces_are_as_long_as_they_can_be_and_cut_no_block(
    sequence: tuple[int, list[tuple[int, int]]], most: int
) -> None:
    length, blocks = sequence
    bounds = cut(length, blocks, most)
    assert (bounds[0], bounds[-1]) == (0, length)
    inside = {at for start, stop in blocks for at in range(start + 1, stop)}
    for start, stop in pairwise(bounds):
        assert 0 < stop - start <= most
        assert stop not in inside
        if stop < length:
            later = [at for at in range(stop + 1, min(start + most, length) + 1) if at not in inside]
            assert all(length - at == 1 for at in later)  # only so that the last piece is no single token
    assert length == 1 or bounds[-1] - bounds[-2] > 1 or bounds[-2] - 1 in inside


def test_a_block_that_fits_in_no_piece_is_refused() -> None:
    with pytest.raises(
        RowRejected, match="an image of 11 tokens with its vision tokens does not fit in --max-length 10"
    ):
        cut(40, [(5, 16)], 10)


def long_document() -> Document:
    words = TextPart(" ".join(f"word{n}" for n in range(60)) + " ")
    return Document((words, ImagePart(encoded_image(64, 64)), words, ImagePart(encoded_image(96, 96, 1)), words))


@pytest.mark.parametrize("most", [16, 50, 97, 250])
def test_the_pieces_of_a_split_document_are_the_document(most: int, tokenizer: Any) -> None:
    (whole,) = encode(tokenizer, long_document(), max_length=10_000)
    pieces = encode(tokenizer, long_document(), max_length=most, overlong=Overlong.SPLIT)
    assert len(pieces) > 1
    assert [piece.truncated for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    ids = np.concatenate([piece.input_ids[: piece.length] for piece in pieces])
    assert ids.tolist() == whole.input_ids[: whole.length].tolist()
    grids = [image.grid for piece in pieces for image in piece.items]
    assert grids == [image.grid for image in whole.items]
    for piece in pieces:
        assert piece.length <= most
        assert not piece.loss_mask[0]
    learned = np.concatenate([piece.loss_mask[1 : piece.length] for piece in pieces])
    kept = np.delete(whole.loss_mask[: whole.length], np.cumsum([0, *(piece.length for piece in pieces[:-1])]))
    assert learned.tolist() == kept.tolist()


def test_a_long_document_is_rejected_or_cut_at_its_end(tokenizer: Any) -> None:
    (whole,) = encode(tokenizer, long_document(), max_length=10_000)
    with pytest.raises(RowRejected, match=f"overlong: {whole.length} tokens .2 images., over --max-length 50; --over"):
        encode(tokenizer, long_document(), max_length=50)
    (cut_off,) = encode(tokenizer, long_document(), max_length=50, overlong=Overlong.TRUNCATE)
    assert cut_off.truncated
    assert cut_off.input_ids[: cut_off.length].tolist() == whole.input_ids[: cut_off.length].tolist()


# --- datasets -------------------------------------------------------------------------------------------------


def test_a_dataset_of_documents_is_sound(tmp_path: Path) -> None:
    long = " ".join(f"word{n}" for n in range(100))
    rows = [{"text": "Short."}, {"text": long}, {"text": ""}, {"text": "Another short one."}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    directory = build_dataset(source, tmp_path / "out", recipe="text", max_length=64, overlong=Overlong.SPLIT)
    dataset, manifest = open_dataset(directory), Manifest.read(directory)
    assert verify_dataset(directory).faults == []
    assert manifest.features == ("documents",)
    keys = dataset.index.keys.to_pylist()
    pieces = [key for key in keys if key.startswith("000000001-")]
    assert keys == ["000000000", *(f"000000001-{n:03d}" for n in range(len(pieces))), "000000003"]
    assert manifest.totals.extra_candidates == len(pieces) - 1 > 1
    assert [(r.row, r.reason.value) for r in read_ledger(directory / "rejected.jsonl")] == [(2, "empty_document")]


def test_a_piece_of_images_alone_is_rejected(tokenizer: Any) -> None:
    picture = ImagePart(encoded_image(128, 128))  # 16 tokens and two marks
    document = Document((TextPart("a b c"), picture, picture, TextPart("d e f")))
    first, *pictures, last = encode(tokenizer, document, max_length=18, overlong=Overlong.SPLIT)
    assert first.loss_mask.any()
    assert last.loss_mask.any()
    assert [str(piece).split(":")[0] for piece in pictures] == ["no_targets", "no_targets"]
    assert "of the document have 1 image and no text to learn" in str(pictures[0])


def test_a_rejected_piece_keeps_its_number(tmp_path: Path) -> None:
    picture = data_uri(width=128, height=128)
    rows = [{"text": "a b c<image>" + "word " * 40, "images": [picture]}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    directory = build_dataset(
        source, tmp_path / "out", recipe="text", image=SMALL, max_length=18, overlong=Overlong.SPLIT
    )
    (rejected,) = read_ledger(directory / "rejected.jsonl")
    assert (rejected.row, rejected.sample, rejected.reason.value) == (0, 1, "no_targets")
    assert open_dataset(directory).index.key(1) == "000000000-002"
    assert verify_dataset(directory).faults == []


def test_positions_of_a_piece_begin_anew(tokenizer: Any) -> None:
    for piece in encode(tokenizer, long_document(), max_length=97, overlong=Overlong.SPLIT):
        assert torch.equal(torch.from_numpy(piece.position_ids[:, 0].copy()), torch.zeros(3, dtype=torch.int32))
