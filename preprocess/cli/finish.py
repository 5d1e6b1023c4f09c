"""``vlmdata finish``: completes a dataset that was made in parts, or lists the missing shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from vlmdata.preprocess.run.finish import Missing

#: Largest number of missing shards listed per part; ``--json`` lists all.
_SHOWN = 8


def finish(
    out: Annotated[str, typer.Argument(metavar="OUT", help="The --out of the parts.")],
    max_reject_rate: Annotated[
        float,
        typer.Option(help="Exit with code 1 if a larger share of the rows is rejected, not counting rows of weight 0."),
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary, or the missing shards, as JSON.")] = False,
) -> None:
    """Complete a dataset whose shards were made with `vlmdata preprocess --part K/N`.

    Writes the same index, ledger, tokenizer and manifest as one run without parts. Needs the tokenizer, but not the
    source. A finished dataset stays unchanged. If shards are missing, the command writes nothing and lists the parts to
    make again.

    **Examples**

    - `vlmdata finish data/chat`

    - `vlmdata finish data/chat --json | jq -r .array` (the parts to make again, for `sbatch --array`)

    **Exit codes**: 0 done; 1 shards are missing, too many rows are rejected, or all are; 2 no run to finish, or the
    tokenizer or image files have changed; 3 out of space, or parts are still at work.
    """
    import json
    import time

    from vlmdata.cli.console import messages, results
    from vlmdata.preprocess.cli.locations import output_store
    from vlmdata.preprocess.cli.report import report_of, show
    from vlmdata.preprocess.cli.run_command import quiet_libraries
    from vlmdata.preprocess.run.finish import Missing, finish_dataset

    if not 0 <= max_reject_rate <= 1:
        raise typer.BadParameter(f"max_reject_rate is {max_reject_rate}; it must be between 0 and 1")
    quiet_libraries()
    store, begun = output_store(out, "OUT"), time.monotonic()
    result = finish_dataset(store)
    if isinstance(result, Missing):
        if as_json:
            print(json.dumps({"directory": str(store), **_as_json(result)}, indent=2))
        else:
            _print_missing(results(), str(store), result)
        raise typer.Exit(1)
    command = "the `vlmdata preprocess` command, in place of --part,"
    report = report_of(store, result, time.monotonic() - begun, max_reject_rate, command)
    if as_json:
        print(json.dumps({"finished": True, **report.to_json()}, indent=2))
    show(report, messages(), as_json)
    raise typer.Exit(int(report.failure is not None))


def _as_json(missing: Missing) -> dict[str, object]:
    from vlmdata.preprocess.run.claim import job_array

    return {
        "finished": False,
        "shards": len(missing.plan.jobs),
        "parts": missing.plan.parts,
        "missing": {str(part): shards for part, shards in missing.by_part.items()},
        "array": job_array(set(missing.by_part) - set(missing.at_work)),
        "at_work": [str(part) for part in missing.at_work],
    }


def _print_missing(out: Console, directory: str, missing: Missing) -> None:
    from vlmdata.preprocess.run.claim import job_array
    from vlmdata.wording import counted

    lines = [f"{directory}: {len(missing.shards):,} of {counted(len(missing.plan.jobs), 'shard')} missing"]
    for part, shards in missing.by_part.items():
        listed = ", ".join(map(str, shards[:_SHOWN]))
        more = f", … {counted(len(shards), 'shard')} in all" if len(shards) > _SHOWN else ""
        state = " (at work)" if part in missing.at_work else ""
        lines.append(f"  part {part}{state}: {listed}{more}")
    again = set(missing.by_part) - set(missing.at_work)
    if missing.plan.parts == 1:
        lines.append("next: run the same `vlmdata preprocess` command again")
    elif again:
        lines.append(f"next: make these parts again, with the same options: {job_array(again)}")
    else:
        lines.append("next: wait for the parts that are at work")
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)
