"""Makes the table of models in docs/any-processor.md: `python -m tests.preprocess.processor.page`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from transformers.models.auto import image_processing_auto, processing_auto

from tests.preprocess.processor.tiny import TINY, save_tiny
from vlmdata.errors import SourceError
from vlmdata.families.processor import PER_TOKEN, TensorRule
from vlmdata.preprocess.processor import load_processor

PAGE = Path(__file__).parents[3] / "docs" / "any-processor.md"
BEGIN, END = "<!-- models -->\n", "<!-- end of models -->\n"


def described(rule: TensorRule) -> str:
    """A tensor and its rule, as short as it gets."""
    joins = "per token" if rule.rule == PER_TOKEN else f"axis {rule.axis}"
    return f"`{rule.name}` {joins}" + (", uint8" if rule.channels else "")


def outcome(model_type: str, folder: Path) -> tuple[str, str]:
    """Returns the tensors and the axes of positions of a tiny model, or why it is refused."""
    try:
        family = load_processor(str(save_tiny(model_type, folder))).family
    except SourceError as error:
        reason = str(error).partition(": it cannot be packed: ")[2] or str(error)
        return f"refused: {reason.partition('. docs/')[0].replace('|', '/')[:160]}", ""
    return "; ".join(map(described, family.tensors)), str(len(family.position_axes))


def row(model_type: str, folder: Path) -> str:
    """Returns a row of the table."""
    tensors, axes = outcome(model_type, folder)
    return f"| `{model_type}` | {tensors} | {axes} |"


def others() -> str:
    """Returns the models of transformers with an image processor that no tiny one stands for."""
    known = set(processing_auto.PROCESSOR_MAPPING_NAMES) & set(image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES)
    return ", ".join(f"`{name}`" for name in sorted(known - set(TINY)))


def table(folder: Path) -> str:
    """Returns the table, and the models that were not tried."""
    lines = ["| `model_type` | tensors: how they join, how they are stored | axes of positions |", "|---|---|---|"]
    lines += [row(model_type, folder / model_type) for model_type in sorted(TINY)]
    return "\n".join(lines) + f"\n\nNot tried, for want of a tiny model: {others()}.\n"


def main() -> None:
    """Writes the table into the page."""
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        made = table(Path(folder))
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{made}\n{END}", text, flags=re.S))


if __name__ == "__main__":
    main()
