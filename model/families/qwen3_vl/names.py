"""The weight name table of Qwen3-VL: which Hugging Face tensors form which parameter.

The Hugging Face names are those of ``Qwen3VLForConditionalGeneration`` and ``Qwen3VLMoeForConditionalGeneration``.
Checkpoints hold the experts' matrices in one of two layouts, (experts, in, out), as published ones do, or
(experts, out, in), as transformers 5 writes them (docs/decisions/0075-layout-of-experts.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from vlmdata.model.families.hf_names import attention_layer, expert_of_whole, expert_shapes, table
from vlmdata.model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture
from vlmdata.model.weight_names.table import ParameterMap, Shape


def parameter_maps(
    architecture: Qwen3VLArchitecture,
    *,
    mtp: bool = False,
    vocab_rows: int | None = None,
    stored: Mapping[str, Shape] | None = None,
) -> dict[str, ParameterMap]:
    """Returns the table of a model; see :class:`vlmdata.model.families.base.ParameterMaps`.

    ``mtp`` is ignored, since the family has no multi-token prediction. ``stored`` tells the layout of each layer's
    experts; None gives the layout in which checkpoints are written.
    """
    language = architecture.language
    experts = partial(_expert, language, stored or {})
    layer = partial(attention_layer, language=language, experts=experts, gated=False)
    return table(architecture, vocab_rows, [layer] * language.layers)


def _expert(
    language: Qwen3VLLanguageArchitecture, stored: Mapping[str, Shape], ours: str, theirs: str, expert: int
) -> list[ParameterMap]:
    width, moe = language.hidden_size, language.moe
    assert moe is not None
    found = [stored.get(theirs + name, ()) for name in ("gate_up_proj", "down_proj")]
    transposed = _transposed(expert_shapes(width, moe), found)
    return expert_of_whole(ours, theirs, expert, width, moe, transposed=transposed)


def _transposed(shapes: Sequence[tuple[int, int]], stored: Sequence[Shape]) -> bool:
    """Whether a checkpoint holds a layer's experts as (experts, in, out), as published checkpoints do.

    The matrix that is not square tells the layout of both. Without a checkpoint, or if its shape fits neither layout,
    this is the layout to write: that of published checkpoints, which all readers turn. A square matrix is different:
    transformers from 5 on and current vLLM compare shapes, and take a square one as (experts, out, in), so both are
    written like that.
    """
    for (rows, columns), found in zip(shapes, stored, strict=True):
        if rows != columns and found[1:] in ((rows, columns), (columns, rows)):
            return found[1:] == (columns, rows)
    return all(rows != columns for rows, columns in shapes)
