"""The chat template of a folder is the one that AutoProcessor takes; the image bounds are compared with its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_rows import mixed_rows, write_jsonl
from tests.preprocess.chat.unusual import TEMPLATE, write_tokenizer
from tests.preprocess.command_line import Ended
from vlmdata.errors import SourceError
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.cli.served import served_bounds
from vlmdata.preprocess.config import PreprocessConfig

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


PROCESSORS = {
    "qwen3_vl": {**IMAGES, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "qwen2_5_vl": {**IMAGES, "processor_class": "Qwen2_5_VLProcessor", "min_pixels": 3136, "max_pixels": 12_845_056},
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("family", PROCESSORS)
def test_the_bounds_of_the_models_processor(tmp_path: Path, family: str, nested: bool) -> None:
    from transformers import AutoImageProcessor

    fields = PROCESSORS[family]
    if nested:
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": fields}))
    else:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    size = AutoImageProcessor.from_pretrained(tmp_path).size
    found = served_bounds(PreprocessConfig(tokenizer=str(tmp_path), family=family))
    assert found == (size["shortest_edge"], size["longest_edge"])


@pytest.mark.parametrize(
    ("family", "fields", "bounds"),
    [
        ("internvl", {"min_patches": 1, "max_patches": 6}, (448**2, 6 * 448**2)),
        ("gemma4", {"max_soft_tokens": 560}, (70 * 48**2, 560 * 48**2)),
        ("qwen3_5", {}, None),
    ],
)
def test_bounds_in_units_of_the_family(
    tmp_path: Path, family: str, fields: dict[str, int], bounds: tuple[int, int] | None
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    assert served_bounds(PreprocessConfig(tokenizer=str(tmp_path), family=family)) == bounds


def test_the_summary_says_that_the_processor_makes_other_sizes(tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", mixed_rows()[:1])
    name = write_folder(tmp_path / "tokenizer", jinja=J)
    (tmp_path / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["qwen3_vl"]))
    command = ("preprocess", rows, "--tokenizer", name, "--workers", 1)
    ended = vlmdata(*command, "--out", tmp_path / "out")
    assert (
        "images have 200,704 to 1,003,520 pixels (up to 980 tokens); the model's own processor makes 65,536 to "
        "16,777,216 pixels (up to 16,384 tokens) of them serve the model with the bounds of this dataset, or repeat "
        "the command with --min-pixels 65536 --max-pixels 16777216 --max-length 32768 for those of the processor"
    ) in ended.said, ended.said
    same = vlmdata(*command, "--out", tmp_path / "same", "--min-pixels", 65_536, "--max-pixels", 16_777_216)
    assert (same.code, "own processor" in same.said) == (0, False), same.said
