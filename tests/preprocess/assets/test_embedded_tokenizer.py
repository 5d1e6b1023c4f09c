import json
import socket
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from PIL import Image
from transformers import (
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    TokenizersBackend,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from tests.conftest import tree_bytes
from tools.embedded_tokenizer.build import MARKUP_TOKENS, SPECIAL_TOKENS, VOCABULARY_SIZE, build
from vlmdata.preprocess.assets import EMBEDDED_TOKENIZER
from vlmdata.preprocess.chat.tokenizer import load_tokenizer

# Unassigned code points are left out: Python and Rust may know different versions of Unicode, and so of NFC.
UNICODE = st.text(st.characters(exclude_categories=["Cn", "Cs"]))
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

type Message = dict[str, Any]


@pytest.fixture(scope="module")
def tok() -> TokenizersBackend:
    return AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER)


@pytest.fixture(scope="module")
def processor(tok: TokenizersBackend) -> Qwen3VLProcessor:
    size = {"shortest_edge": 65_536, "longest_edge": 1_003_520}
    mean_std = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size, **mean_std)
    return Qwen3VLProcessor(
        image_processor=images,
        tokenizer=tok,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=tok.chat_template,
    )


def turn(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def text(value: str) -> Message:
    return {"type": "text", "text": value}


def call(name: Any, arguments: Any) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def render(tok: TokenizersBackend, *messages: Message, **options: Any) -> str:
    rendered = tok.apply_chat_template(list(messages), tokenize=False, **options)
    assert isinstance(rendered, str)
    return rendered


class TestFiles:
    def test_rebuild_is_byte_identical(self, tmp_path: Path) -> None:
        build(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
        assert names == sorted(path.name for path in EMBEDDED_TOKENIZER.iterdir())
        for name in names:
            assert (tmp_path / name).read_bytes() == (EMBEDDED_TOKENIZER / name).read_bytes(), name

    def test_loads_without_network(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        attempts: list[object] = []

        def refuse(*args: object, **_: object) -> None:
            attempts.append(args)
            raise OSError("no network in this test")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.chdir(tmp_path)
        tok = AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER)
        assert tok.is_fast
        assert tok("x").input_ids
        assert attempts == []

    def test_is_loaded_as_auto_tokenizer_does(self, tmp_path: Path) -> None:
        ours = load_tokenizer().hf
        theirs = AutoTokenizer.from_pretrained(EMBEDDED_TOKENIZER)
        assert type(ours) is type(theirs)
        theirs.backend_tokenizer.no_truncation()
        theirs.backend_tokenizer.no_padding()
        ours.save_pretrained(tmp_path / "ours")
        theirs.save_pretrained(tmp_path / "theirs")
        assert tree_bytes(tmp_path / "ours") == tree_bytes(tmp_path / "theirs")

    def test_saving_keeps_ids_and_template(self, tok: TokenizersBackend, tmp_path: Path) -> None:
        tok.save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert again.get_vocab() == tok.get_vocab()
        assert again.chat_template == tok.chat_template
        assert again.all_special_tokens == tok.all_special_tokens


class TestVocabulary:
    def test_sizes(self, tok: TokenizersBackend) -> None:
        assert tok.vocab_size == VOCABULARY_SIZE
        assert sorted(tok.get_vocab().values()) == list(range(6_144))
        assert tok.model_max_length == 262_144

    def test_added_tokens_follow_the_vocabulary_in_order(self, tok: TokenizersBackend) -> None:
        added = [*SPECIAL_TOKENS, *MARKUP_TOKENS]
        assert len(added) == 26
        for offset, token in enumerate(added):
            assert tok(f"a{token}b").input_ids[1:-1] == [VOCABULARY_SIZE + offset], token

    def test_only_specials_vanish_on_decoding(self, tok: TokenizersBackend) -> None:
        for token in SPECIAL_TOKENS:
            assert tok.decode(tok(f"a{token}b").input_ids, skip_special_tokens=True) == "ab", token
        for token in MARKUP_TOKENS:
            assert tok.decode(tok(f"a{token}b").input_ids, skip_special_tokens=True) == f"a{token}b"
        assert set(tok.all_special_tokens) == set(SPECIAL_TOKENS)

    def test_named_tokens(self, tok: TokenizersBackend) -> None:
        assert (tok.eos_token, tok.pad_token) == ("<|im_end|>", "<|endoftext|>")
        assert (tok.bos_token, tok.unk_token) == (None, None)
        assert (tok.image_token, tok.video_token) == ("<|image_pad|>", "<|video_pad|>")
        assert (tok.vision_bos_token, tok.vision_eos_token) == ("<|vision_start|>", "<|vision_end|>")
        assert tok.image_token_id == tok.convert_tokens_to_ids("<|image_pad|>")
        assert tok("plain").input_ids == tok("plain", add_special_tokens=False).input_ids

    @pytest.mark.parametrize(
        ("sample", "characters_per_token"),
        [
            ("The waiter brought the wrong bill, and nobody noticed it until the next morning.", 3.5),
            ('{"menu": [{"nm": "ICED LATTE", "cnt": "2", "unitprice": "24,000", "price": "48,000"}]}', 1.9),
            ("<s_total><s_total_price>48,000</s_total_price><s_cashprice>50,000</s_cashprice></s_total>", 2.4),
        ],
    )
    def test_compresses(self, tok: TokenizersBackend, sample: str, characters_per_token: float) -> None:
        assert len(sample) / len(tok(sample).input_ids) > characters_per_token


class TestText:
    def test_normaliser_and_pre_tokenizer_are_qwens(self, tok: TokenizersBackend) -> None:
        ours, qwens = (json.loads(t.backend_tokenizer.to_str()) for t in (tok, Qwen3_5Tokenizer()))
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            assert ours[part] == qwens[part], part
        assert {key: ours["model"][key] for key in ours["model"] if key not in ("vocab", "merges")} == {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        }

    @settings(max_examples=300, deadline=None)
    @given(value=UNICODE)
    def test_round_trip(self, tok: TokenizersBackend, value: str) -> None:
        assert tok.decode(tok(value).input_ids) == unicodedata.normalize("NFC", value)

    def test_every_byte_has_an_entry(self, tok: TokenizersBackend) -> None:
        # Two-byte characters under U+0800, then enough others to meet every legal UTF-8 lead byte.
        rare = "".join(map(chr, [*range(1, 0x250), 0x7FF, *range(0x800, 0xD800, 997), *range(0xE000, 0x110000, 4093)]))
        normal = unicodedata.normalize("NFC", rare)
        assert tok.decode(tok(normal).input_ids) == normal

    def test_composes_accents(self, tok: TokenizersBackend) -> None:
        assert tok("Cafe\u0301").input_ids == tok("Caf\u00e9").input_ids

    def test_digits_stay_single(self, tok: TokenizersBackend) -> None:
        assert tok.tokenize("174600") == list("174600")

    @settings(max_examples=200, deadline=None)
    @given(value=UNICODE.map(lambda value: unicodedata.normalize("NFC", value)).filter(bool))
    def test_offsets_cover_the_text(self, tok: TokenizersBackend, value: str) -> None:
        spans = tok(value, return_offsets_mapping=True).offset_mapping
        assert (spans[0][0], spans[-1][1]) == (0, len(value))
        for before, after in pairwise(spans):
            # Tokens either adjoin or are bytes of one and the same character.
            assert after[0] == before[1] or (after[0] < before[1] <= after[1])

    def test_offsets_of_a_turn(self, tok: TokenizersBackend) -> None:
        value = "<|im_start|>user\nhi é<|im_end|>\n"
        spans = tok(value, return_offsets_mapping=True).offset_mapping
        parts = [value[start:end] for start, end in spans]
        assert "".join(parts) == value
        assert parts[0] == "<|im_start|>"
        assert parts[-2:] == ["<|im_end|>", "\n"]


class TestTemplate:
    def test_plain(self, tok: TokenizersBackend) -> None:
        assert render(tok, turn("system", " Be brief. "), turn("user", "\nHi \n"), turn("assistant", " Hello. ")) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nHello.<|im_end|>\n"
        )

    def test_empty_system_text_keeps_its_turn(self, tok: TokenizersBackend) -> None:
        expected = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        assert render(tok, turn("system", " "), turn("user", "Hi")) == expected

    @pytest.mark.parametrize(
        "item",
        [
            {"type": "image"},
            {"type": "image", "image": "a.png"},
            {"type": "image_url", "image_url": {"url": "a.png"}},
            {"image": "a.png"},
            {"image_url": "a.png"},
            {"type": "image_url"},
            {"type": "image", "image": None, "text": None, "video": None},
        ],
    )
    def test_image_and_text(self, tok: TokenizersBackend, item: Message) -> None:
        expected = f"<|im_start|>user\n{IMAGE}What is it?<|im_end|>\n"
        assert render(tok, turn("user", [item, text("What is it?")])) == expected
        bare = {"text": "What is it?", "image": None, "image_url": None, "video": None}
        assert render(tok, turn("user", [item, bare])) == expected

    def test_adjacent_images_and_a_video(self, tok: TokenizersBackend) -> None:
        items = [{"type": "image"}, {"type": "image"}, {"type": "video", "video": "v.mp4"}, {"video": "w.mp4"}]
        assert render(tok, turn("user", items)) == f"<|im_start|>user\n{IMAGE}{IMAGE}{VIDEO}{VIDEO}<|im_end|>\n"

    def test_vision_ids_count_over_the_conversation(self, tok: TokenizersBackend) -> None:
        first = turn("user", [{"type": "image"}, {"type": "video"}, {"type": "image"}])
        messages = (first, turn("assistant", "Two."), turn("user", [{"type": "image"}, text("And this?")]))
        assert render(tok, *messages, add_vision_id=True) == (
            f"<|im_start|>user\nPicture 1: {IMAGE}Video 1: {VIDEO}Picture 2: {IMAGE}<|im_end|>\n"
            "<|im_start|>assistant\nTwo.<|im_end|>\n"
            f"<|im_start|>user\nPicture 3: {IMAGE}And this?<|im_end|>\n"
        )

    def test_thinking_only_after_the_last_query(self, tok: TokenizersBackend) -> None:
        one, two = "<think>\none\n</think>\n\n1", "<think>\n\ntwo \n\n</think>\n\n 2"
        messages = (turn("user", "a"), turn("assistant", one), turn("user", "b"), turn("assistant", two))
        assert render(tok, *messages) == (
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n1<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n"
            "<|im_start|>assistant\n<think>\ntwo\n</think>\n\n 2<|im_end|>\n"
        )

    @pytest.mark.parametrize(
        ("message", "reasoning", "answer"),
        [
            (turn("assistant", "4", reasoning_content=" 2+2 \n"), "2+2", "4"),
            (turn("assistant", "<think>x</think>4", reasoning_content="y"), "y", "<think>x</think>4"),
            (turn("assistant", "<think>x</think>4", reasoning_content=""), "", "<think>x</think>4"),
            (turn("assistant", "<think>x</think>4", reasoning_content=None), "x", "4"),
            (turn("assistant", "2+2\n</think>\n\n4"), "2+2", "4"),
            (turn("assistant", "a<think>b</think>c</think>\nd"), "b", "d"),
            (turn("assistant", "<think>open"), "", "<think>open"),
            (turn("assistant", "<think>x</think>"), "x", ""),
        ],
    )
    def test_reasoning(self, tok: TokenizersBackend, message: Message, reasoning: str, answer: str) -> None:
        rendered = render(tok, turn("user", "2+2?"), message)
        header = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        assert rendered == f"{header}<think>\n{reasoning}\n</think>\n\n{answer}<|im_end|>\n"

    def test_tools_calls_and_results(self, tok: TokenizersBackend) -> None:
        tools = [{"type": "function", "function": {"name": name}} for name in ("add", "größe")]
        arguments = {"text": "a\nb", "items": [1, "é"], "map": {"k": None}, "yes": True, "n": 1.5}
        calls = [call("add", arguments), {"name": "now", "arguments": {}}]
        rendered = render(
            tok,
            turn("system", "Be brief."),
            turn("user", "Go."),
            turn("assistant", "Calling.", reasoning_content="Need it.", tool_calls=calls),
            turn("tool", " 3 "),
            turn("tool", [text("noon")]),
            turn("assistant", "", tool_calls=[call("again", None)]),
            turn("tool", "4"),
            turn("assistant", "Done."),
            tools=tools,
        )
        system, rest = rendered.split("<|im_end|>\n", 1)
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        assert system.startswith("<|im_start|>system\n# Tools\n\n")
        assert f"\n\n<tools>\n{listed}\n</tools>\n\n" in system
        form = "<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>"
        assert f"\n\n<tool_call>\n{form}\n</tool_call>\n\n" in system
        assert system.endswith("\n\nBe brief.")
        assert rest == (
            "<|im_start|>user\nGo.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\nNeed it.\n</think>\n\nCalling.\n\n"
            "<tool_call>\n<function=add>\n"
            "<parameter=text>\na\nb\n</parameter>\n"
            '<parameter=items>\n[1, "é"]\n</parameter>\n'
            '<parameter=map>\n{"k": null}\n</parameter>\n'
            "<parameter=yes>\ntrue\n</parameter>\n"
            "<parameter=n>\n1.5\n</parameter>\n"
            "</function>\n</tool_call>\n"
            "<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
            "<tool_call>\n<function=again>\n</function>\n</tool_call><|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nDone.<|im_end|>\n"
        )

    def test_tools_without_system_text(self, tok: TokenizersBackend) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        bare = render(tok, turn("user", "Go."), tools=tools)
        assert bare.startswith("<|im_start|>system\n# Tools\n\n")
        assert bare == render(tok, turn("system", " "), turn("user", "Go."), tools=tools)
        assert render(tok, turn("user", "Go."), tools=[]) == "<|im_start|>user\nGo.<|im_end|>\n"

    def test_a_tool_response_of_a_user_is_no_query(self, tok: TokenizersBackend) -> None:
        reply = turn("user", " <tool_response>\n3\n</tool_response>\n")
        rendered = render(tok, turn("user", "a"), turn("assistant", "b"), reply, turn("assistant", "c"))
        assert rendered.count("<think>") == 2
        for query in ("<tool_response>\n3\n</tool_response> So?", "So? <tool_response>\n3\n</tool_response>"):
            messages = (turn("user", "a"), turn("assistant", "b"), turn("user", query), turn("assistant", "c"))
            assert render(tok, *messages).count("<think>") == 1, query

    def test_generation_prompt(self, tok: TokenizersBackend) -> None:
        turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
        for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": None}):
            assert render(tok, turn("user", "Hi"), add_generation_prompt=True, **thinking) == turns
        off = render(tok, turn("user", "Hi"), add_generation_prompt=True, enable_thinking=False)
        assert off == f"{turns}\n</think>\n\n"

    def test_arrow_nulls_are_absent(self, tok: TokenizersBackend) -> None:
        items = [[{"type": "image", "image": "a.png"}, {"type": "text", "text": "Q"}], [{"type": "text", "text": "A"}]]
        later = [[{"type": "video", "video": "v.mp4"}, {"text": "R"}], None]
        calls = [{"name": "f", "arguments": {"x": 1}}]
        messages = [
            turn("user", items[0]),
            turn("assistant", items[1], reasoning_content="why"),
            turn("user", later[0]),
            turn("assistant", later[1], tool_calls=calls),
        ]
        filled = pa.table({"messages": [messages]}).to_pylist()[0]["messages"]
        assert filled != messages
        assert filled[0]["content"][0] == {"type": "image", "image": "a.png", "text": None, "video": None}
        assert render(tok, *filled) == render(tok, *messages)

    @pytest.mark.parametrize(
        ("messages", "error"),
        [
            ([turn("system", "Be brief.")], "No user query"),
            ([turn("user", "<tool_response>\n3\n</tool_response>")], "No user query"),
            ([turn("tool", "3")], "No user query"),
            ([turn("user", "a"), turn("system", "b")], "must be the first message"),
            ([turn("system", [{"type": "image"}, text("b")]), turn("user", "a")], "cannot contain images"),
            ([turn("system", [{"type": "video"}, text("b")]), turn("user", "a")], "cannot contain videos"),
            ([turn("user", [{"type": "audio"}])], "neither text nor image nor video.*role: user"),
            ([turn("user", [{"type": "text", "text": None}])], "neither text nor image nor video"),
            ([turn("user", ["a bare string"])], "must be mappings.*role: user"),
            ([turn("user", 5)], "must be a string or a list"),
            ([turn("user", {"type": "text"})], "must be a string or a list"),
            ([turn("user", "a"), turn("developer", "b")], "Unknown role: developer"),
            ([turn("user", "a"), turn("assistant", "", tool_calls=[call("f", "{}")])], "must be a mapping.*of: f"),
            ([turn("user", "a"), turn("assistant", "", tool_calls=[call(None, {})])], "needs the name"),
        ],
    )
    def test_errors(self, tok: TokenizersBackend, messages: list[Message], error: str) -> None:
        with pytest.raises(TemplateError, match=error):
            render(tok, *messages)

    def test_no_messages(self, tok: TokenizersBackend) -> None:
        with pytest.raises(TemplateError, match="no messages"):
            tok.apply_chat_template([[]], tokenize=False)


class TestProcessor:
    def test_image_pads_follow_the_grid(self, tok: TokenizersBackend, processor: Qwen3VLProcessor) -> None:
        images = [Image.new("RGB", size, "white") for size in ((320, 256), (512, 800))]
        items = [{"type": "image", "image": image} for image in images]
        messages = [turn("user", [*items, text("Compare.")]), turn("assistant", "Both are white.")]
        encoded = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        grids = encoded["image_grid_thw"].tolist()
        assert grids == [[1, 16, 20], [1, 50, 32]]
        ids = encoded["input_ids"][0].tolist()
        pads = [t * h * w // 4 for t, h, w in grids]
        assert ids.count(tok.image_token_id) == sum(pads) == 480
        blocks = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in pads)
        assert tok.decode(ids) == (
            f"<|im_start|>user\n{blocks}Compare.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nBoth are white.<|im_end|>\n"
        )
