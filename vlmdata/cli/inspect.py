"""``vlmdata inspect``: see what the model will see."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_LOOK, _PAGE, _PACKS = "What to look at", "In the browser", "Packs and steps: the loader's options"


def inspect(
    data: Annotated[
        list[str], typer.Argument(metavar="DIR", help="Dataset directory or fsspec URL (several for --pack, --step).")
    ],
    sample: Annotated[
        str | None, typer.Option(metavar="KEY|N", help="One sample, by key or number.", rich_help_panel=_LOOK)
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --sample or --row: the token table.", rich_help_panel=_LOOK)
    ] = False,
    row: Annotated[
        int | None, typer.Option(metavar="SOURCE_ROW", help="What became of a source row.", rich_help_panel=_LOOK)
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            metavar="QUERY", help="Samples that match, e.g. 'target<5% patches>4000 cash'.", rich_help_panel=_LOOK
        ),
    ] = None,
    pack: Annotated[
        int | None, typer.Option(metavar="N", help="The N-th packed batch of the rank's epoch.", rich_help_panel=_LOOK)
    ] = None,
    step: Annotated[
        str | None, typer.Option(metavar="EPOCH:STEP", help="The samples of an optimizer step.", rich_help_panel=_LOOK)
    ] = None,
    check: Annotated[
        str,
        typer.Option(metavar="N|all", help="Samples whose tokens are checked for findings.", rich_help_panel=_LOOK),
    ] = "1000",
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one self-contained page.", rich_help_panel=_PAGE)
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Samples in the page: extremes, suspects, then random.", rich_help_panel=_PAGE)
    ] = 50,
    keys: Annotated[
        str | None, typer.Option(metavar="KEY,…", help="Put these samples in the page instead.", rich_help_panel=_PAGE)
    ] = None,
    packs: Annotated[int, typer.Option(min=0, help="Packs in the page.", rich_help_panel=_PAGE)] = 8,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page over the whole dataset.", rich_help_panel=_PAGE)
    ] = False,
    host: Annotated[str, typer.Option(help="Address to serve on.", rich_help_panel=_PAGE)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to serve on; 0 is any free one.", rich_help_panel=_PAGE)
    ] = 8765,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name the server is reached by.", rich_help_panel=_PAGE)
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a pack. Default: 8192, or the longest.", rich_help_panel=_PACKS),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Packs per step. Default: one per rank.", rich_help_panel=_PACKS)
    ] = None,
    epoch: Annotated[int, typer.Option(min=0, help="For --pack, --row and pages.", rich_help_panel=_PACKS)] = 0,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.", rich_help_panel=_PACKS)] = 1,
    dp_rank: Annotated[
        int | None, typer.Option(min=0, help="One of them. Default: 0; all for --step.", rich_help_panel=_PACKS)
    ] = None,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel size.", rich_help_panel=_PACKS)] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.", rich_help_panel=_PACKS)] = 1,
    sp: Annotated[bool, typer.Option("--sp/--no-sp", help="Sequence parallelism.", rich_help_panel=_PACKS)] = True,
    pad_multiple: Annotated[int, typer.Option(min=1, help="Any further multiple.", rich_help_panel=_PACKS)] = 1,
    max_patches: Annotated[int | None, typer.Option(help="Most patches in a pack.", rich_help_panel=_PACKS)] = None,
    pad_to_capacity: Annotated[
        bool, typer.Option("--pad-to-capacity", help="Packs of exactly the capacity.", rich_help_panel=_PACKS)
    ] = False,
    last: Annotated[str, typer.Option(help="Incomplete last step: pad, keep, drop.", rich_help_panel=_PACKS)] = "pad",
    shuffle_window: Annotated[
        int | None, typer.Option(help="Shards shuffled together.", rich_help_panel=_PACKS)
    ] = None,
    balance: Annotated[
        bool, typer.Option("--balance/--no-balance", help="Spread packs by cost.", rich_help_panel=_PACKS)
    ] = True,
    cost: Annotated[str, typer.Option(help="Cost model: 0.8b, 2b, 4b, 9b.", rich_help_panel=_PACKS)] = "4b",
    weights: Annotated[
        str | None, typer.Option(help="One weight per dataset, e.g. 0.7,0.3.", rich_help_panel=_PACKS)
    ] = None,
    weights_by: Annotated[str, typer.Option(help="epochs, tokens or samples.", rich_help_panel=_PACKS)] = "tokens",
    seed: Annotated[int, typer.Option(help="The loader's, and of random samples.", rich_help_panel=_PACKS)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Look at a dataset: a card of it, one sample, a packed batch, an optimizer step, or all of it in the browser.

    **Examples**

    - `vlmdata inspect build/demo`

    - `vlmdata inspect build/demo --sample 000000017 --tokens`

    - `vlmdata inspect build/demo --pack 3 --capacity 8192 --cp 4`

    - `vlmdata inspect build/demo --step 0:12 --capacity 8192 --global-batch 64 --dp 8 --dp-rank 5`

    - `vlmdata inspect build/demo --html demo.html`

    - `vlmdata inspect build/demo --serve`

    **Exit codes**: 0 done; 2 wrong options, no dataset, no such sample, pack or step; 3 the page cannot be written.
    """
    from vlmdata.inspect.options import PackOptions
    from vlmdata.inspect.run import Run

    looks = {"--sample": sample, "--row": row, "--find": find, "--pack": pack, "--step": step, "--html": html}
    chosen = [name for name, value in looks.items() if value is not None] + ["--serve"] * serve
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)}: choose one thing to look at")
    if html is not None and "://" in html:
        raise typer.BadParameter(f"--html {html}: the page is written to a local file; give a path")
    if tokens and chosen not in (["--sample"], ["--row"]):
        raise typer.BadParameter("--tokens goes with --sample or --row")
    options = PackOptions(
        capacity=capacity,
        global_batch=global_batch if global_batch is not None else dp,
        dp_rank=dp_rank or 0,
        dp_size=dp,
        context_parallel=cp,
        tensor_parallel=tp,
        sequence_parallel=sp,
        pad_multiple=pad_multiple,
        max_patches=max_patches,
        pad_to_capacity=pad_to_capacity,
        last=last,
        shuffle_window=shuffle_window,
        seed=seed,
        balance=balance,
        cost=cost,
        weights=_weights(weights),
        weights_by=weights_by,
    )
    run = Run(data, options, epoch, as_json)
    try:
        if sample is not None:
            run.sample(sample, tokens)
        elif row is not None:
            run.row(row, tokens)
        elif find is not None:
            run.find(find, _check(check))
        elif pack is not None:
            run.pack(pack)
        elif step is not None:
            run.step(*_epoch_and_step(step), dp_rank)
        elif html is not None:
            run.html(Path(html), samples, keys.split(",") if keys else None, packs, _check(check))
        elif serve:
            run.serve(host, port, allow_host or [], _check(check))
        else:
            run.card(_check(check))
    except (ValueError, LookupError) as error:
        # A KeyError's text is quoted; its argument is not.
        raise typer.BadParameter(str(error.args[0]) if error.args else str(error)) from error


def _weights(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(weight) for weight in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--weights {text!r}: numbers with commas between, e.g. 0.7,0.3") from None


def _epoch_and_step(text: str) -> tuple[int, int]:
    epoch, colon, step = text.partition(":")
    if not (colon and epoch.isdecimal() and step.isdecimal()):
        raise typer.BadParameter(f"--step {text!r}: give EPOCH:STEP, e.g. 0:120, both from 0")
    return int(epoch), int(step)


def _check(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"--check {text!r}: a number of samples, or all")
    return int(text)
