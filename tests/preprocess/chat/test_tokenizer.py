"""Tokenizers other than the embedded one: what is read from them, what is refused, and other people's templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from vlmdata.errors import SourceError
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer, load_tokenizer
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, Message, TextPart
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason

TALK = Conversation((Message("user", (TextPart("Hi"),)), Message("assistant", (TextPart("Ho"),))))


def save_copy(tokenizer: ChatTokenizer, directory: Path, template: str | None) -> str:
    tokenizer.hf.save_pretrained(directory)
    path = directory / "chat_template.jinja"
    path.unlink()
    if template is not None:
        path.write_text(template)
    return str(directory)


@pytest.fixture
def qwen_class(tmp_path: Path) -> str:
    """The embedded vocabulary in transformers' own Qwen3.5 tokenizer class."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    parts = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
    hf = Qwen3_5Tokenizer(vocab=parts["model"]["vocab"], merges=[tuple(pair) for pair in parts["model"]["merges"]])
    hf.add_tokens([AddedToken(t["content"], special=t["special"], normalized=False) for t in parts["added_tokens"]])
    hf.chat_template = (EMBEDDED_TOKENIZER / "chat_template.jinja").read_text()
    hf.save_pretrained(tmp_path / "qwen")
    return str(tmp_path / "qwen")


def test_qwens_own_class_gives_the_same_sample(tokenizer: ChatTokenizer, qwen_class: str) -> None:
    other = load_tokenizer(qwen_class)
    assert type(other.hf).__name__ == "Qwen3_5Tokenizer"
    ours = Encoder(PreprocessConfig(), tokenizer).encode(TALK)
    theirs = Encoder(PreprocessConfig(tokenizer=qwen_class), other).encode(TALK)
    assert ours.input_ids.tolist() == theirs.input_ids.tolist()
    assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


def test_ids_come_from_the_tokenizer(tokenizer: ChatTokenizer) -> None:
    info, ids = tokenizer.info, tokenizer.hf.convert_tokens_to_ids
    assert [info.turns.start, info.turns.end, info.pad] == ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    assert (info.image, info.items["video"].token) == (ids("<|image_pad|>"), ids("<|video_pad|>"))
    assert tokenizer.hf.decode(info.turns.assistant) == "assistant\n"


def test_turn_and_media_tokens_are_reserved_and_grounding_marks_are_not(tokenizer: ChatTokenizer) -> None:
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|image_pad|>"} <= tokenizer.reserved
    assert not {"<|box_start|>", "<|object_ref_end|>", "<|quad_start|>", "<think>"} & tokenizer.reserved


def test_fingerprints_tell_tokenizers_and_templates_apart(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    template = tokenizer.hf.chat_template
    same = load_tokenizer(save_copy(tokenizer, tmp_path / "same", template))
    spoken = load_tokenizer(save_copy(tokenizer, tmp_path / "other", template.replace("\n", "\n{# #}\n", 1)))
    assert (same.info.fingerprint, same.info.chat_template) == (
        tokenizer.info.fingerprint,
        tokenizer.info.chat_template,
    )
    assert spoken.info.fingerprint == tokenizer.info.fingerprint
    assert spoken.info.chat_template != tokenizer.info.chat_template


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot load it from the folder: it has no tokenizer\.json\.\nGive a"):
        load_tokenizer(str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match=r"tokenizer\.json: cannot load it: it is a file, not a folder\."):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./no-model", "../no-model", "models/Qwen/Qwen3.5-9B"])
def test_a_path_to_nothing_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(SourceError, match="cannot load it: there is no such folder\\."):
        load_tokenizer(name)


def test_a_hub_id_without_network_is_refused_with_a_hint() -> None:
    with pytest.raises(SourceError, match=r"is the network reachable\?\), and there is no such folder: "):
        load_tokenizer("Qwen/Qwen3.5-9B-not-cached-here")


def test_a_tokenizer_without_a_template_is_refused(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no chat template"):
        load_tokenizer(save_copy(tokenizer, tmp_path / "bare", None))


def test_a_tokenizer_without_vision_tokens_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<|im_end|>")
    hf.add_tokens([AddedToken("<|im_start|>", special=True)])
    hf.chat_template = "{{ messages }}"
    hf.save_pretrained(tmp_path / "text")
    with pytest.raises(SourceError, match=r"it has no token <\|vision_start\|>"):
        load_tokenizer(str(tmp_path / "text"))


OTHER_TEMPLATES = {
    "no final newline": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
    "text between turns": "BEGIN {% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n##{% endfor %}",
    "generation marks": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% endfor %}",
}


@pytest.mark.parametrize("template", OTHER_TEMPLATES.values(), ids=OTHER_TEMPLATES.keys())
def test_any_chatml_template_is_followed(tokenizer: ChatTokenizer, tmp_path: Path, template: str) -> None:
    other = load_tokenizer(save_copy(tokenizer, tmp_path / "t", template))
    sample = Encoder(PreprocessConfig(), other).encode(TALK)
    learned = other.hf.decode(sample.input_ids[sample.loss_mask == 1])
    assert learned in ("Ho<|im_end|>", "Ho<|im_end|>\n")


BAD_TEMPLATES = {
    "no structure": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "0 <|im_start|> and 0"),
    "unclosed turns": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}",
        "2 <|im_start|> and 0",
    ),
    "a turn left out": (
        "{% for m in messages[:1] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        "0 assistant turns for 1 assistant message",
    ),
    "header merges with the answer": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n\n\n{{ m.content }}<|im_end|>\n{% endfor %}",
        "it merges with the answer",
    ),
}


@pytest.mark.parametrize(("template", "message"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES.keys())
def test_a_template_whose_turns_cannot_be_separated_rejects_rows(
    tokenizer: ChatTokenizer, tmp_path: Path, template: str, message: str
) -> None:
    other = load_tokenizer(save_copy(tokenizer, tmp_path / "t", template))
    with pytest.raises(RowRejected) as raised:
        Encoder(PreprocessConfig(), other).encode(TALK)
    assert raised.value.reason is Reason.TEMPLATE_ERROR
    assert message in raised.value.message


def test_the_saved_tokenizer_of_a_dataset_loads_and_is_the_same(
    tokenizer: ChatTokenizer, cord_parquet: Path, make_dataset: Any
) -> None:
    directory = make_dataset(cord_parquet, limit=2)
    assert load_tokenizer(str(directory / "tokenizer")).info.fingerprint == tokenizer.info.fingerprint
