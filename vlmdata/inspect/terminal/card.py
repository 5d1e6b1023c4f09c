"""The dataset card in the terminal."""

from __future__ import annotations

import shlex

from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vlmdata.format.manifest import item_sizes
from vlmdata.format.schema import LEDGER_NAME
from vlmdata.inspect.dataset import DatasetCard, Extremes, FindingGroup, RejectGroup
from vlmdata.inspect.findings import Severity
from vlmdata.inspect.terminal.draw import SEVERITY, add_row, columns, data, facts, histogram_table, number
from vlmdata.media.codecs import codecs_of
from vlmdata.wording import counted

_HASH_DIGITS = 16
_MESSAGE = 90


def print_card(console: Console, card: DatasetCard) -> None:
    """Prints a dataset card."""
    console.print(data(card.directory, "bold"), soft_wrap=True)
    console.print(_identity(card))
    console.print()
    console.print(_totals(card))
    console.print()
    console.print(Columns([Padding(histogram_table(each), (0, 4, 1, 0)) for each in card.histograms]))
    if card.rejects:
        console.print(_rejects(card.rejects))
        console.print()
    if not card.totals.samples:
        console.print(Text("no samples", "bold red"), f"({LEDGER_NAME} gives the reason for each row)")
        return
    console.print(Columns([Padding(_extremes(each), (0, 4, 1, 0)) for each in card.extremes]))
    _print_findings(console, card)


def _identity(card: DatasetCard) -> Table:
    options = card.options
    image = options.get("image") if isinstance(options.get("image"), dict) else {}
    turns = options.get("train_turns", "?")
    targets = "each turn in its own sample" if turns == "each" else f"{turns} turns"
    recipe = f"recipe {options.get('recipe', '?')}, targets {targets}"
    pixels = f"{image.get('min_pixels', 0):,}–{image.get('max_pixels', 0):,} pixels per image" if image else ""
    kept = ", ".join(f"{name} ({kind})" for name, kind in card.source_columns.items())
    changes = ", ".join(f"{count:,} {what}" for what, count in card.version.get("rows", {}).items())
    version = [("version", str(card.version["number"]), f"rows: {changes}")] if card.version else []
    return facts(
        *version,
        ("fingerprint", card.fingerprint[:_HASH_DIGITS], "of the whole content"),
        ("configuration", card.config_hash[:_HASH_DIGITS], data(f"{recipe}, {pixels}" if pixels else recipe)),
        ("source", data(card.source_name), ""),
        *([("source columns", data(kept), "for expressions of vlmdata select")] if kept else []),
        (
            "tokenizer",
            data(card.tokenizer.name),
            f"{card.tokenizer.fingerprint[:_HASH_DIGITS]}, {counted(card.tokenizer.vocab_size, 'id')}",
        ),
        ("written by", data(card.created_by or "unknown"), f"format {card.schema_version}"),
    )


def _totals(card: DatasetCard) -> Table:
    totals = card.totals
    share = totals.targets / max(totals.tokens, 1)
    rejected = totals.rejected / max(totals.candidates, 1)
    truncated = f"{totals.truncated:,} truncated" if totals.truncated else ""
    each = f"{totals.patches / totals.items:,.0f} per image" if totals.items else ""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, remark in (
        ("samples", totals.samples, truncated),
        ("source rows", totals.rows, f"{totals.rejected:,} rejected: {100 * rejected:.2f} %"),
        ("tokens", totals.tokens, f"+ {totals.padding:,} padding"),
        ("target tokens", totals.targets, f"{number(share, 'share')} of tokens"),
        ("images", totals.items, item_sizes(totals, " and ".join(codecs_of(card.features)))),
        ("patches", totals.patches, each),
        ("bytes", totals.bytes, f"{totals.bytes / 1e6:,.1f} MB in {counted(card.shards, 'shard')}"),
    ):
        add_row(table, name, value, remark)
    return table


def _rejects(groups: tuple[RejectGroup, ...]) -> Table:
    table = columns("rejected rows", "rows", "reason", "first row", left=("reason", "first row"))
    for group in groups:
        row, message = group.examples[0] if group.examples else (None, "")
        first = f"row {row}: {message}" if row is not None else ""
        add_row(table, group.count, data(group.reason, "yellow"), data(first, limit=_MESSAGE))
    return table


def _extremes(extremes: Extremes) -> Table:
    table = columns(extremes.title, "", "key", "row", left=("key",))
    for sample in extremes.samples:
        add_row(table, number(sample.value, extremes.kind), data(sample.key), sample.source_row)
    return table


def _print_findings(console: Console, card: DatasetCard) -> None:
    samples = card.totals.samples
    looked = f"index of {f'all {samples:,} samples' if samples != 1 else 'the only sample'}, tokens of {card.checked:,}"
    more = "" if card.checked >= samples else "; --check all checks every sample"
    rejected = f", {counted(card.totals.rejected, 'row')} rejected" if card.totals.rejected else ""
    serious = [group for group in card.findings if group.severity is not Severity.NOTE]
    if not serious:
        console.print(
            Text(f"nothing suspicious in the samples{rejected}", "bold yellow" if rejected else "bold green"),
            Text(f"({looked}{more})", "dim"),
            soft_wrap=True,
        )
    else:
        console.print(Text("findings", "bold"), Text(f"({looked}{more})", "dim"), soft_wrap=True)
    for group in card.findings:
        _print_group(console, group, samples)
    if example := next((each for group in serious for each in group.examples), None):
        parts = card.directory, "--sample", example.key
        line = f"next: vlmdata inspect {shlex.join(data(part).plain for part in parts)}"
        console.print(Text(line), soft_wrap=True)


def _print_group(console: Console, group: FindingGroup, samples: int) -> None:
    mark, style = SEVERITY[group.severity]
    share = f"{group.count:,} of {samples:,}" if group.count > 1 else f"{group.count:,} sample"
    console.print(Text(f"{mark} {group.kind}", style), Text(f"{share}: {group.meaning}"), soft_wrap=True)
    shown = group.examples[: 1 if group.severity is Severity.NOTE else None]
    for example in shown:
        where = Text(f"    {data(example.key).plain}  row {example.source_row:,}  ", "dim")
        console.print(where + data(example.message), soft_wrap=True)
