"""``vlmdata select``: makes a dataset of chosen samples of another one, with the same shards."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmdata.errors import UsageError
from vlmdata.select.duplicates import Duplicates
from vlmdata.wording import counted

if TYPE_CHECKING:
    from vlmdata.format.dataset import VlmDataset
    from vlmdata.select.choice import Chosen


def select(
    data: Annotated[str, typer.Argument(metavar="DIR", help="Finished dataset: folder or URL.")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder or URL of the new dataset.")] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help="Choose the samples for which this is true: an expression over columns of the index (`length`, "
            "`num_targets`, `num_images`, …) and over those that the recipe attached (`source.NAME`)."
        ),
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="Choose these: a text file with a key per line.")] = None,
    exclude_keys: Annotated[
        Path | None, typer.Option(help="Leave these out: a text file with a key per line, as of a quality filter.")
    ] = None,
    drop_duplicates: Annotated[
        Duplicates | None,
        typer.Option(
            help="Of samples that are equal, keep the first: equal in all that is trained on (`samples`), in their "
            "tokens (`texts`), or in the pixels of their images (`images`); or that are nearly equal in their words "
            "(`near-texts`) or in how their pictures look (`near-images`), which reads the shards."
        ),
    ] = None,
    duplicates_report: Annotated[
        Path | None,
        typer.Option(
            help="With near duplicates: write each dropped sample and the one that stays for it, as lines of JSON, for "
            "`vlmdata inspect --duplicates`."
        ),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Choose this random share, such as 0.1; each key by its own hash.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of --share.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be kept and lost.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Make a dataset of chosen samples of another one. The other stays unchanged.

    The new dataset has an index of the chosen samples, and the shards that hold any, byte for byte. On one file system
    these are hard links, which take no space. Within an object store, the store copies them; otherwise this machine
    does. A sample is chosen if it meets all criteria; they apply in the order of this help. Keys stay the same.

    Expressions have Python's operators: `== != < <= > >= in and or not is None + - * /`, and `len(x)`, `lower(x)`,
    `startswith(x, 'a')`, `endswith(x, 'a')`, `matches(x, 'regex')`. A comparison with a missing value is not true.

    **Examples**

    - `vlmdata select data/all --where "length < 4096 and source.lang == 'de'" --out data/german`

    - `vlmdata select data/all --where "num_images > 0" --share 0.1 --seed 7 --dry-run`

    - `vlmdata select data/all --exclude-keys bad.txt --drop-duplicates samples --out data/clean`

    **Exit codes**: 0 done; 2 nothing is selected, a column or key is unknown, the dataset is damaged, or --out is not
    empty; 3 out of space.
    """
    from vlmdata.cli.console import counting_bar, messages
    from vlmdata.format.atomic import write_atomically
    from vlmdata.select.choice import Choice, Keys, choose
    from vlmdata.select.dataset import select_dataset
    from vlmdata.select.marks import report_lines
    from vlmdata.storage import open_store
    from vlmdata.storage.linked import describe
    from vlmdata.storage.open import open_dataset
    from vlmdata.storage.versions import place_of_version

    if out is None and not dry_run:
        raise UsageError("give --out for the new dataset, or --dry-run to count only")
    choice = Choice(
        where=where,
        keys=None if keys is None else Keys.read(keys),
        exclude_keys=None if exclude_keys is None else Keys.read(exclude_keys),
        drop_duplicates=drop_duplicates,
        share=share,
        seed=seed,
    )
    if not choice.recorded:
        raise UsageError(
            "give a criterion: --where, --keys, --exclude-keys, --drop-duplicates or --share. Without one, the new "
            "dataset would be the old one"
        )
    if duplicates_report is not None and not (drop_duplicates is not None and drop_duplicates.is_near):
        raise UsageError("--duplicates-report needs --drop-duplicates near-texts or near-images")
    dataset = open_dataset(data)
    chosen = choose(dataset, choice)
    if duplicates_report is not None and drop_duplicates is not None:
        lines = report_lines(dataset, chosen.near, drop_duplicates)
        write_atomically(duplicates_report, "".join(lines).encode())
    fields: dict[str, Any] = _fields(dataset, chosen)
    if not as_json:
        _print(dataset, chosen)
    if out is not None and not dry_run:
        with counting_bar(messages(), time_left=False) as bar:
            task = bar.add_task("shards")
            result = select_dataset(
                dataset,
                open_store(place_of_version(data)),
                open_store(out),
                choice,
                chosen,
                on_shard=lambda done, shards: bar.update(task, completed=done, total=shards),
            )
        fields |= {
            "directory": str(open_store(out)),
            "fingerprint": result.manifest.fingerprint,
            "shards": {how.name.lower(): count for how, count in result.transferred.items()},
        }
        if not as_json:
            print(f"{open_store(out)}: {describe(result.transferred)}")
            print(f"next: vlmdata verify {shlex.quote(str(open_store(out)))}")
    if as_json:
        print(json.dumps(fields, indent=2))


def _fields(dataset: VlmDataset, chosen: Chosen) -> dict[str, Any]:
    size = _shard_bytes(dataset, chosen)
    return {
        "kept": dataclasses.asdict(chosen.kept),
        "lost": dataclasses.asdict(chosen.lost),
        "steps": [dataclasses.asdict(step) for step in chosen.steps],
        "unknown_keys_to_exclude": chosen.unknown,
        "near_duplicates": len(chosen.near),
        "bytes": {"shards": size[0], "kept": size[1]},
    }


def _shard_bytes(dataset: VlmDataset, chosen: Chosen) -> tuple[int, int]:
    """Returns the bytes of the shards with chosen samples, and those of the chosen samples."""
    index, shards = dataset.index, dataset.manifest.shards
    taken = sorted(set(index.shard[chosen.mask].tolist()))
    return sum(shards[number].bytes for number in taken), int(index.size[chosen.mask].sum())


def _print(dataset: VlmDataset, chosen: Chosen) -> None:
    print(f"{dataset.name}: {counted(len(dataset), 'sample')}")
    for step in chosen.steps:
        print(f"  {step.left:>15,} left by {step.name}")
    if chosen.unknown:
        print(f"  {counted(chosen.unknown, 'key')} to exclude {'is' if chosen.unknown == 1 else 'are'} not in it")
    print(f"{'':10}{'kept':>28}{'lost':>28}")
    for name, kept in dataclasses.asdict(chosen.kept).items():
        lost = getattr(chosen.lost, name)
        print(f"{name:10}" + "".join(f"{count:>18,}{_share(count, kept + lost):>10}" for count in (kept, lost)))
    shards, samples = _shard_bytes(dataset, chosen)
    print(f"shards: {shards / 1e6:,.1f} MB, of which {samples / 1e6:,.1f} MB are kept samples")


def _share(count: int, total: int) -> str:
    return f" ({count / total:.1%})" if total else ""
