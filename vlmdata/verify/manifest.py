"""The audit of the manifest: values that follow from another one, the dataset or its tokenizer; files it lacks."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.families import Family
from vlmdata.format.manifest import Manifest, ShardInfo, canonical_hash
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    JOINED,
    MANIFEST_NAME,
    PROGRESS_DIR,
    ROWS_NAME,
    SELECTED,
    TOKENIZER_DIR,
    VERSIONS_DIR,
    VERSIONS_NAME,
)
from vlmdata.format.selection import SELECTION, is_version, origin, row_offsets
from vlmdata.format.tokenizer_files import (
    CONFIG_FILE,
    STRAY,
    VOCABULARY_FILE,
    added_tokenizer_files,
    files_below,
    is_hidden,
    stray_tokenizer_file,
    tokenizer_file_names,
)
from vlmdata.format.tokenizer_info import TokenizerInfo, flat, special_ids
from vlmdata.verify.fault import Fault

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Finding = tuple[str, str]
"""(check, message)."""
_IN_TOKENIZER = f"{TOKENIZER_DIR}/"


def manifest_faults(manifest: Manifest) -> Iterator[Fault]:
    """Yields the faults of a manifest that show without another file."""
    for check, message in (*_config(manifest), *_shards(manifest), *_source_findings(manifest)):
        yield Fault(MANIFEST_NAME, check, message)


def totals_faults(file: str, check: str, sums: Mapping[str, int], manifest: Manifest) -> Iterator[Fault]:
    """Yields a fault for each sum over a file that differs from the manifest's total of this name."""
    totals = dataclasses.asdict(manifest.totals)
    for name, value in sums.items():
        if totals[name] != value:
            yield Fault(file, check, f"{name} sum to {value}, but the totals say {totals[name]}")


def turns_faults(counts: Mapping[str, int], manifest: Manifest) -> Iterator[Fault]:
    """Yields a fault for each count of assistant turns over the samples that differs from the manifest's."""
    for name, value in counts.items():
        if (said := manifest.turns.get(name, 0)) != value:
            yield Fault(MANIFEST_NAME, "turns", f"turns.{name} is {said}, but the samples have {value}")


def _config(manifest: Manifest) -> Iterator[Finding]:
    if canonical_hash(manifest.config) != manifest.config_hash:
        yield "config_hash", "the config was edited after the dataset was made"
        return  # what differs from it is not known to be wrong
    options, fingerprints = (_mapping(manifest.config, name) for name in ("options", "fingerprints"))
    first = manifest.config
    while isinstance(joined := first.get(JOINED), list) and joined:
        first = joined[0]  # a join takes the name of its first dataset's tokenizer
    for name, found, expected in (
        ("family", manifest.family or None, options.get("family")),
        ("tokenizer.name", manifest.tokenizer.name, _mapping(first, "options").get("tokenizer")),
        ("tokenizer.fingerprint", manifest.tokenizer.fingerprint, fingerprints.get("tokenizer")),
        ("tokenizer.chat_template", manifest.tokenizer.chat_template, fingerprints.get("chat_template")),
    ):
        if None not in (found, expected) and found != expected:
            yield "config", f"{name} is {found}, but the config says {expected}"


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def _shards(manifest: Manifest) -> Iterator[Finding]:
    start = 0
    for shard in manifest.shards:
        if shard.row_start != start or shard.samples + shard.rejected != shard.candidates:
            yield "shards", f"{shard.name}: its rows and counts are inconsistent: {shard}"
        start = shard.row_stop
    sums = {
        "rows": start,
        "rejected": sum(shard.rejected for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "extra_candidates": sum(shard.extra_candidates for shard in manifest.shards),
    }
    for fault in totals_faults(MANIFEST_NAME, "shards", sums, manifest):
        yield fault.check, fault.message


def _source_findings(manifest: Manifest) -> Iterator[Finding]:
    try:
        kind = origin(manifest.source).get("kind")
        if (kind == JOINED) != (JOINED in manifest.config):
            yield "source", f"source.kind is {kind!r}, which contradicts the config"
        yield from _source("source", manifest.source, manifest.shards, 0)
    except (AttributeError, KeyError, TypeError) as error:
        yield "source", f"it has the wrong form: {type(error).__name__}: {error}"


def _source(name: str, source: Mapping[str, Any], shards: Sequence[ShardInfo], offset: int) -> Iterator[Finding]:
    """Checks the counts of a source against its shards.

    Args:
        name: Path of the source in the manifest.
        source: The source, perhaps of one of several joined datasets.
        shards: Its shards.
        offset: What the index adds to its row numbers.
    """
    rows = sum(shard.row_stop - shard.row_start for shard in shards)
    if source.get("rows", rows) != rows:
        yield "source", f"{name}.rows is {source['rows']}, but its shards have {rows} rows"
    if source.get("kind") == SELECTED:
        yield from _selected(name, source, shards, offset)
        return
    if source.get("kind") != JOINED:
        for shard in shards:
            if shard.unselected and not is_version(source):
                yield "source", f"{shard.name}: {shard.unselected} unselected, but {name} is no selection"
            if shard.row_offset != offset:
                yield "source", f"{shard.name}: row_offset is {shard.row_offset}, but {name} says {offset}"
        return
    before = at = 0
    for number, each in enumerate(source["datasets"]):
        inner, its = f"{name}.datasets.{number}", shards[at : at + each["shards"]]
        if each["row_offset"] != before:
            yield "source", f"{inner}.row_offset is {each['row_offset']}, but {before} rows are before it"
        yield from _source(f"{inner}.source", each["source"], its, offset + each["row_offset"])
        selection = each["source"].get(SELECTION)
        before += sum(shard.row_stop - shard.row_start for shard in its) if selection is None else selection["of_rows"]
        at += each["shards"]
    if at != len(shards):
        yield "source", f"the datasets of {name} have {at} shards, but there are {len(shards)}"
    if SELECTION in source and source[SELECTION]["of_rows"] != before:
        yield "source", f"{name}.{SELECTION}.of_rows is {source[SELECTION]['of_rows']}, but the datasets have {before}"


def _selected(name: str, source: Mapping[str, Any], shards: Sequence[ShardInfo], offset: int) -> Iterator[Finding]:
    """Checks the counts of a source from which samples were selected; arguments as of :func:`_source`."""
    inner = source["dataset"]["source"]
    possible = {offset + each for each in row_offsets(inner)}
    for shard in shards:
        if shard.row_offset not in possible:
            yield "source", f"{shard.name}: row_offset is {shard.row_offset}, which no dataset of {name} has"
    whole = inner[SELECTION]["of_rows"] if SELECTION in inner else inner.get("rows")
    if whole is not None and source[SELECTION]["of_rows"] != whole:
        found = source[SELECTION]["of_rows"]
        yield "source", f"{name}.{SELECTION}.of_rows is {found}, but {name}.dataset.source has {whole}"


def image_files_faults(directory: Path, manifest: Manifest) -> Iterator[Fault]:
    """Yields a fault for each count of image files in the manifest that differs from the list of them.

    The caller has checked the hash of the list.
    """
    recorded = _mapping(manifest.source, IMAGE_FILES)
    try:
        sizes = pq.read_table(directory / IMAGE_FILES_NAME, columns=["bytes"])["bytes"].to_pylist()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        yield Fault(IMAGE_FILES_NAME, "unreadable", str(error))
        return
    found = [size for size in sizes if size >= 0]
    counts = {"files": len(sizes), "missing": len(sizes) - len(found), "bytes": sum(found)}
    for name, value in counts.items():
        if recorded.get(name, value) != value:
            message = f"source.{IMAGE_FILES}.{name} is {recorded[name]}, but the list has {value}"
            yield Fault(MANIFEST_NAME, "source", message)


def tokenizer_info_faults(directory: Path, manifest: Manifest) -> Iterator[Fault]:
    """Yields a fault for each value of ``tokenizer`` in the manifest that the tokenizer folder contradicts.

    The caller has checked the files of the folder.
    """
    from tokenizers import Tokenizer  # loaders and servers need none

    folder = directory / TOKENIZER_DIR
    try:
        tokenizer = Tokenizer.from_file(str(folder / VOCABULARY_FILE))
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_FILE} is not an object")
    except Exception as error:  # tokenizers raises bare Exception
        yield Fault(f"{TOKENIZER_DIR}/{VOCABULARY_FILE}", "tokenizer", f"cannot be read: {error}")
        return
    for name, found, expected in _contradictions(tokenizer, config, manifest.tokenizer, manifest.model_family):
        yield Fault(MANIFEST_NAME, "tokenizer", f"tokenizer.{name} is {found!r}, but {TOKENIZER_DIR}/ has {expected!r}")


def _contradictions(
    tokenizer: Tokenizer, config: Mapping[str, Any], info: TokenizerInfo, family: Family
) -> Iterator[tuple[str, Any, Any]]:
    if (size := tokenizer.get_vocab_size(with_added_tokens=True)) != info.vocab_size:
        yield "vocab_size", info.vocab_size, size
    tokenizer.no_truncation()
    # transformers takes the usual token if the setting is not one of its own attributes.
    found, eos = flat(asdict(info)), _named(config, "eos_token")
    usual = special_ids(tokenizer, family, lambda setting: eos if setting == "eos_token" else None)
    for place, expected in special_ids(tokenizer, family, partial(_named, config)).items():
        value = found.get(place)
        recorded = place not in ("end_of_text", "turns.response") or value not in (-1, ())
        if recorded and value not in (expected, usual[place]):
            yield place, value, expected
    for name, text in info.special_tokens.items():
        setting = _named(config, name)
        if setting is not None and text != setting:
            yield f"special_tokens.{name}", text, setting
        elif tokenizer.token_to_id(text) is None:
            yield f"special_tokens.{name}", text, None
    pad = tokenizer.token_to_id(str(_named(config, "pad_token") or eos))
    if pad is not None and pad != info.pad:
        yield "pad", info.pad, pad


def _named(config: Mapping[str, Any], setting: str) -> str | None:
    """Returns the token's text in a setting, which may be an object with flags."""
    value = config.get(setting)
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def listed(directory: Path) -> list[str]:
    """Returns the names in a dataset's folder, and the paths of the files in its tokenizer folder."""
    return [*os.listdir(directory), *(f"{_IN_TOKENIZER}{name}" for name in files_below(directory / TOKENIZER_DIR))]


def stray_files(names: Iterable[str], manifest: Manifest) -> Iterator[Fault]:
    """Yields a fault for each file that a reader could take for a part of the dataset.

    These are shards, which a reader of plain tars would read, and files that change the tokenizer.
    """
    names = sorted(names)
    shards = {shard.name for shard in manifest.shards}
    for name in names:
        if name.startswith("shard-") and name not in shards:
            yield Fault(name, STRAY, "a shard that is not in the manifest")
    inner = [name.removeprefix(_IN_TOKENIZER) for name in names if name.startswith(_IN_TOKENIZER)]
    yield from (Fault(*stray_tokenizer_file(name)) for name in added_tokenizer_files(inner, manifest))


def foreign_files(names: Iterable[str], manifest: Manifest) -> tuple[str, ...]:
    """Returns the files and folders that are no part of the dataset and harm none of its readers, sorted."""
    own = {MANIFEST_NAME, *manifest.small_files, ROWS_NAME, TOKENIZER_DIR, PROGRESS_DIR, VERSIONS_NAME, VERSIONS_DIR}
    own |= {shard.name for shard in manifest.shards}
    own |= {f"{_IN_TOKENIZER}{name}" for name in tokenizer_file_names(manifest)}
    names = list(names)
    faulty = {fault.file for fault in stray_files(names, manifest)}
    return tuple(
        name
        for name in sorted(names)
        if name not in own and name not in faulty and (is_hidden(name) or not name.startswith(_IN_TOKENIZER))
    )
