"""The chat template of a folder is the one that AutoProcessor takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import write_jsonl
from tests.preprocess.chat.unusual import TEMPLATE, write_tokenizer
from tests.preprocess.command_line import Ended
from vlmdata.errors import SourceError
from vlmdata.preprocess.chat.tokenizer import load_tokenizer

J, L, P, T = (f"{TEMPLATE}{{# {name} #}}" for name in "JLPT")
IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "patch_size": 16}


def write_folder(folder: Path, processor: bool = True, **templates: Any) -> str:
    """Writes a tokenizer and a processor of Qwen3-VL; ``templates`` has those of each file by its first word."""
    told = {"processor_class": "Qwen3VLProcessor", "chat_template": templates.get("tok")}
    name = write_tokenizer(folder, config=told)
    (folder / "chat_template.jinja").unlink()
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
        (folder / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen3VLVideoProcessor"}')
    for kind, file in (("legacy", "chat_template.json"), ("config", "processor_config.json")):
        if kind in templates:
            fields = {"processor_class": "Qwen3VLProcessor", "chat_template": templates[kind]}
            (folder / file).write_text(json.dumps(fields))
    if "jinja" in templates:
        (folder / "chat_template.jinja").write_text(templates["jinja"])
    if "more" in templates:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates["more"])
    return name


@pytest.mark.parametrize(
    ("templates", "file", "unused"),
    [
        ({"jinja": J}, "chat_template.jinja", ()),
        ({"legacy": L}, "chat_template.json", ()),
        ({"tok": T, "jinja": J}, "chat_template.jinja", ("tokenizer_config.json",)),
        ({"tok": L, "jinja": J, "legacy": L}, "chat_template.json", ("chat_template.jinja",)),
        ({"config": P, "jinja": P, "legacy": L}, "processor_config.json", ("chat_template.json",)),
        ({"config": None, "legacy": L}, "chat_template.json", ()),
        ({"jinja": J, "more": T}, "chat_template.jinja", ()),
    ],
)
def test_the_template_is_that_of_auto_processor(
    tmp_path: Path, templates: dict[str, str], file: str, unused: tuple[str, ...]
) -> None:
    from transformers import AutoProcessor

    name = write_folder(tmp_path / "tokenizer", **templates)
    processor, tokenizer = AutoProcessor.from_pretrained(name), load_tokenizer(name, None, "qwen3_vl")
    wanted = processor.chat_template
    assert tokenizer.hf.chat_template == (wanted if isinstance(wanted, str) else wanted["default"])
    assert (tokenizer.template.file, tokenizer.template.unused) == (file, unused)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"), None, "qwen3_vl").info.chat_template == tokenizer.info.chat_template


@pytest.mark.parametrize("templates", [{"legacy": L, "more": T}, {"more": T}])
def test_what_auto_processor_refuses_is_refused(tmp_path: Path, templates: dict[str, str]) -> None:
    name = write_folder(tmp_path / "tokenizer", **templates)
    with pytest.raises(SourceError, match=r"AutoProcessor (refuses|needs one named default)"):
        load_tokenizer(name, None, "qwen3_vl")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    name = write_folder(tmp_path / "tokenizer", jinja=J)
    (tmp_path / "tokenizer" / "chat_template.json").write_text(L)
    with pytest.raises(SourceError, match=r"chat_template\.json is not of the form"):
        load_tokenizer(name, None, "qwen3_vl")


def test_the_command_says_which_file_it_takes(tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"query": "Q?", "response": "A."}])
    name = write_folder(tmp_path / "tokenizer", jinja=J, legacy=L)
    ended = vlmdata("preprocess", rows, "--tokenizer", name, "--out", tmp_path / "out", "--workers", 1)
    said = "chat template: chat_template.json, as AutoProcessor takes it; another one in chat_template.jinja is"
    assert (ended.code, said in ended.said) == (0, True), ended.said


def test_a_folder_without_processor_has_the_tokenizers_templates(tmp_path: Path) -> None:
    one = load_tokenizer(write_folder(tmp_path / "one", processor=False, tok=T), None, "qwen3_vl")
    assert (one.hf.chat_template, one.template.file) == (T, "tokenizer_config.json")
    several = load_tokenizer(write_folder(tmp_path / "several", processor=False, jinja=J, more=T), None, "qwen3_vl")
    assert several.hf.chat_template == {"default": J, "tool_use": T}
