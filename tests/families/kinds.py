"""Families of other kinds than Qwen's, each with its tokenizer and processor, and conversations to try."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import encoded_image
from tests.families import gemma4_files, internvl_files
from tests.families.reference import TILE, TOKEN
from vlmdata.media.decode import decode_image
from vlmdata.preprocess.config import ImageConfig
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart


@dataclass(frozen=True)
class Kind:
    """A family and what transformers has for it."""

    name: str
    write_tokenizer: Callable[[Path], str]
    processor: Callable[[Any], Any]  # of a tokenizer, with the bounds of ``image``
    image: ImageConfig  # bounds to try it with
    marks: tuple[str, ...]  # texts of special tokens
    ending: str  # text that ends an assistant turn, as it is learned
    trimmed: bool  # whether the template trims messages
    writes_tools: bool  # whether the template writes definitions of tools, and has ``enable_thinking``


KINDS = {
    "internvl": Kind(
        "internvl",
        internvl_files.write_tokenizer,
        lambda hf: internvl_files.processor(hf, max_tiles=3),
        ImageConfig(TILE**2, 3 * TILE**2),
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<|im_start|>assistant\n", "<|im_end|>"),
        "<|im_end|>\n",
        trimmed=False,
        writes_tools=False,
    ),
    "gemma4": Kind(
        "gemma4",
        gemma4_files.write_tokenizer,
        lambda hf: gemma4_files.processor(hf, budget=70),
        ImageConfig(max_pixels=70 * TOKEN),
        (
            "<|image|>",
            "<|image>",
            "<image|>",
            "<bos>",
            "<|turn>model\n",
            "<turn|>",
            "<|channel>thought\n",
            "<channel|>",
            "<|tool_response>",
            "<tool_response|>",
        ),
        "<turn|>\n",
        trimmed=True,
        writes_tools=True,
    ),
}


def _special(mode: str, orientation: int) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(7).integers(0, 256, (40, 70, len(mode)), np.uint8)
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    return file.getvalue()


#: Of several aspect ratios, an extreme one among them; one that EXIF turns, and one with transparency.
PICTURES = [
    *(ImagePart(encoded_image(width, height, seed=width)) for width, height in ((64, 64), (90, 40), (2, 150))),
    ImagePart(_special("RGB", 6)),
    ImagePart(_special("RGBA", 1)),
]
#: Arguments of a template for thinking.
ARGUMENTS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@st.composite
def conversations(draw: st.DrawFn, kind: Kind) -> Conversation:
    """Turns with images between texts, of any text, empty turns and the texts of special tokens among them.

    Some have tools, calls of them and responses, also at the end, and some turns have reasoning. Empty answers are not
    learned.
    """
    words = texts | st.sampled_from(["\n\n", " ", "", *kind.marks])
    messages = []
    if draw(st.booleans()):
        messages.append(Message("system", (TextPart(draw(texts)),)))
    for _ in range(draw(st.integers(1, 3))):
        contents = draw(st.lists(words | st.sampled_from(PICTURES), min_size=1, max_size=4))
        parts = tuple(TextPart(part) if isinstance(part, str) else part for part in contents)
        messages.append(Message("user", parts))
        if kind.writes_tools:
            for _ in range(draw(st.integers(0, 2))):
                messages += draw(_exchanges(words))
            if messages[-1].role != "user" and draw(st.booleans()):
                messages = messages[: draw(st.integers(len(messages) - 1, len(messages)))]  # a call, or a response
                continue
        answer, reasoning = draw(texts) + "." + draw(words), draw(st.none() | texts)
        if messages[-1].role == "user" and draw(st.integers(0, 4)) == 0:
            answer = draw(st.sampled_from(["", " ", "\n"]))
        messages.append(
            Message("assistant", (TextPart(answer),), reasoning, loss_weight=1.0 if answer.strip() else 0.0)
        )
    if not kind.writes_tools:
        return Conversation(tuple(messages))
    functions = draw(st.lists(st.builds(_tool, texts, texts), max_size=2))
    return Conversation(tuple(messages), tuple(functions), template_arguments=draw(st.sampled_from(ARGUMENTS)))


@st.composite
def _exchanges(draw: st.DrawFn, words: st.SearchStrategy[str]) -> list[Message]:
    """Calls of tools, and their responses in any order."""
    arguments = st.dictionaries(st.sampled_from("abcd"), words | st.booleans() | st.integers(0, 9), max_size=3)
    named = draw(st.lists(st.tuples(texts, arguments), min_size=1, max_size=3))
    calls = tuple({"id": f"call {n}", "name": name, "arguments": given} for n, (name, given) in enumerate(named))
    asked = Message("assistant", (), draw(st.none() | texts), calls)
    return [
        asked,
        *(Message("tool", (TextPart(draw(words)),), call_id=call["id"]) for call in draw(st.permutations(calls))),
    ]


def written_call(message: Message, last: bool) -> str:
    """What Gemma 4 says to call tools, with its reasoning after the last question."""
    think = f"<|channel>thought\n{message.reasoning}\n<channel|>" if last and (message.reasoning or "").strip() else ""
    calls = []
    for call in message.tool_calls:
        fields = ",".join(f"{key}:{_value(each)}" for key, each in sorted(call["arguments"].items()))
        calls.append(f"<|tool_call>call:{call['name']}{{{fields}}}<tool_call|>")
    return think + "".join(calls) + "<|tool_response>"


def _value(given: Any) -> str:
    return f'<|"|>{given}<|"|>' if isinstance(given, str) else json.dumps(given)


def _tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description}}


def of_the_processor(kind: Kind, hf: Any, conversation: Conversation) -> Any:
    """What transformers' processor makes of a conversation."""
    messages = []
    for message in conversation.messages:
        content = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image", "image": _opened(part)}
            for part in message.parts
            if isinstance(part, TextPart | ImagePart)
        ]
        # As rendered for us: texts alone are one string.
        made = {"role": message.role, "content": content if any(message.images) else message.text}
        made |= {} if message.reasoning is None else {"reasoning_content": message.reasoning}
        made |= {} if message.call_id is None else {"tool_call_id": message.call_id}
        calls = [{"type": "function", "id": call["id"], "function": call} for call in message.tool_calls]
        messages.append(made | ({"tool_calls": calls} if calls else {}))
    return kind.processor(hf).apply_chat_template(
        messages,
        tools=list(conversation.tools) or None,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **conversation.template_arguments,
    )


def _opened(part: ImagePart) -> Image.Image:
    """The file as transformers loads it, turned as EXIF says; on white, where it would make transparency black."""
    from transformers.image_utils import load_image

    opened = Image.open(io.BytesIO(part.data))
    return load_image(opened) if opened.mode == "RGB" else Image.fromarray(decode_image(part.data, 1 << 20).pixels)


def spoken(conversation: Conversation) -> str:
    """All that a conversation says."""
    written = [message.text + (message.reasoning or "") for message in conversation.messages]
    defined = [
        text for tool in conversation.tools for text in (tool["function"]["name"], tool["function"]["description"])
    ]
    called = [str(call) for message in conversation.messages for call in message.tool_calls]
    return "".join(written + defined + called)
