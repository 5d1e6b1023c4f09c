"""The page lists what is learned of tiny processors of transformers' models; `page.py` makes it, of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.preprocess.processor.page import BEGIN, END, PAGE, others, row
from tests.preprocess.processor.tiny import TINY

PROVEN = "5.17"
#: One of each kind: cut into tiles, padded, an image that changes in company, and refused. All would take 15 s.
SOME = ("aya_vision", "lfm2_vl", "llava_onevision", "mllama")


@pytest.mark.skipif(not transformers.__version__.startswith(PROVEN), reason=f"the page is of transformers {PROVEN}")
def test_the_page_lists_what_is_learned(tmp_path: Path) -> None:
    listed = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = listed.splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `") and "model_type" not in line] == sorted(TINY)
    for model_type in SOME:
        assert row(model_type, tmp_path / model_type) in lines, "run `python -m tests.preprocess.processor.page`"
    assert others() in listed
    assert listed.count("refused") == 2
