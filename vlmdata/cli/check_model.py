"""``vlmdata check-model``: tests whether a model keeps the samples of a pack apart."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer


class Dtypes(StrEnum):
    """Dtypes of parameters."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def check_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder or hub id of a Hugging Face model; or `module:function` or `file.py:function`, which returns "
            "a model with its own forward.",
        ),
    ],
    data: Annotated[str, typer.Option(metavar="DIR", help="Dataset directory or fsspec URL.")],
    tokens: Annotated[
        int, typer.Option(min=2, help="Room of a pack, in tokens. The shortest samples are used.")
    ] = 2048,
    dtype: Annotated[
        Dtypes, typer.Option(help="Dtype of the parameters. Low precision is compared with its own measured error.")
    ] = Dtypes.FLOAT32,
    device: Annotated[str, typer.Option(help="Where to compute, such as `cuda`.")] = "cpu",
    full: Annotated[
        bool, typer.Option("--full", help="Use the checkpoint: its weights and all layers. Default: a small model.")
    ] = False,
    attention: Annotated[
        str | None, typer.Option(metavar="NAME", help="attn_implementation, such as `flash_attention_2`.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option(help="Compare gradients, too. They need as much memory as weights.")
    ] = True,
    allow_unproven: Annotated[
        bool, typer.Option("--allow-unproven", help="Skip the proof on versions of transformers that were not tried.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Test whether a model computes each sample of a pack as if it were alone.

    Compares a few samples alone with the same samples in two packs: outputs of all modules, logits, loss and gradients.
    Names the first module that differs, and the kind of fault: state, convolution, attention, position, pixels,
    deepstack, labels, mtp, stale, tokens or other.

    By default, the model is a small one with random weights, with every kind of layer of the configuration.

    **Examples**

    - `vlmdata check-model Qwen/Qwen3.5-9B --data data/cord`

    - `vlmdata check-model Qwen/Qwen3.5-9B --data data/cord --full --dtype bfloat16 --device cuda`

    - `vlmdata check-model my_trainer.py:build --data data/cord --json | jq .findings` (a forward of your own)

    **Exit codes**: 0 equal; 1 fault found; 2 the model, the dataset or an option cannot be used.
    """
    from vlmdata.cli.console import results
    from vlmdata.integrations.check.command import Options, check_named
    from vlmdata.integrations.check.report import as_dict, finding_lines, headline, verdict

    options = Options(tokens, dtype.value, device, full, attention, gradients, allow_unproven)
    subject, result = check_named(model, data, options)
    if as_json:
        print(json.dumps(as_dict(subject, result), indent=2))
    else:
        out = results(soft_wrap=True)
        for line in headline(subject, result):
            out.print(line, markup=False)
        out.print()
        out.print(f"{'part':<24}{'compared':>9}{'difference':>12}{'allowed':>10}", markup=False)
        for each in result.comparisons:
            mark = "" if each.equal else "  differs"
            numbers = f"{each.places:>9}{each.error:>12.1e}{each.tolerance:>10.1e}"
            out.print(f"{each.part:<24}{numbers}{mark}", markup=False)
        for finding in result.findings:
            out.print()
            for number, line in enumerate(finding_lines(finding)):
                out.print(("  " if number else "") + line, markup=False, style=None if number else "bold red")
        out.print()
        out.print(verdict(result), markup=False, style="bold red" if result.findings else "bold green")
    raise typer.Exit(1 if result.findings else 0)
