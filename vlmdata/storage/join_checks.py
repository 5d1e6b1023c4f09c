"""Checks that a dataset is whole, and that several can be joined: they fit together, and none repeats another."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, ResourceError, UsageError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.manifest import CODEC_FINGERPRINTS, Manifest
from vlmdata.format.schema import INDEX_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import tokenizer_file_names, tokenizer_findings
from vlmdata.format.tokenizer_info import flat
from vlmdata.locations import is_url
from vlmdata.storage import Store
from vlmdata.wording import counted

if TYPE_CHECKING:
    from vlmdata.storage import Store

#: Options that readers assume to be equal for all samples.
_SHARED_OPTIONS = ("pad_multiple", "train_turns")
_SHOWN = 5

Input = tuple[Store, Manifest]
"""A dataset to join, and its manifest."""


def real_place(store: Store) -> str:
    """Returns the URL of a store, or the path of its folder without links."""
    return str(store) if is_url(str(store)) else os.path.realpath(str(store))


def require_whole(store: Store, manifest: Manifest, again: str = "join") -> None:
    """Checks the hashes of a dataset's small files and the sizes of its shards.

    Args:
        store: The dataset.
        manifest: Its manifest.
        again: The command to give again after a repair, for messages.

    Raises:
        DatasetFormatError: If a file is missing or does not match the manifest.
        ResourceError: If a file cannot be read.
    """
    try:
        problems = [*_shard_problems(store, manifest), *small_file_problems(store, manifest)]
    except OSError as error:
        raise ResourceError(f"{store}: cannot be read: {error}. Fix its permissions and run it again.") from error
    if problems:
        more = f"; and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else ""
        raise DatasetFormatError(
            f"{store}: {'; '.join(problems[:_SHOWN])}{more}. Run `vlmdata verify {shlex.quote(str(store))}` to see how "
            f"to repair it, then {again} again."
        )


def _shard_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    sizes = shard_sizes(store, manifest)
    for info in manifest.shards:
        if (size := sizes.get(info.name)) is None:
            yield f"{info.name} is missing"
        elif size != info.bytes:
            yield f"{info.name} has {size} bytes, but the manifest says {info.bytes}"


def shard_sizes(store: Store, manifest: Manifest) -> Mapping[str, int | None]:
    """Returns the bytes of the files in the folders with shards, by names as in the manifest.

    A version shares shards of earlier ones, which are in other folders.
    """
    folders = {"", *(info.name[: info.name.rfind("/") + 1] for info in manifest.shards)}
    return {f"{folder}{name}": size for folder in sorted(folders) for name, size in store.listing(folder).items()}


def require_alike(first: Input, other: Input) -> None:
    """Checks that two datasets agree in what readers assume to be equal for all samples.

    Raises:
        ConfigMismatchError: If they do not, or one is of format 1.0, which does not record its tokenizer's files.
    """
    for store, manifest in (first, other):
        if manifest.schema_version == "1.0":
            raise ConfigMismatchError(
                f"{store}: format version 1.0 cannot be joined. Run `vlmdata recode {shlex.quote(str(store))} --out "
                "COPY`, and join the copy."
            )
    (store, one), (other_store, two) = first, other
    theirs = flat(dataclasses.asdict(two.tokenizer))
    facts: list[tuple[str, Any, Any]] = [
        ("family", one.model_family.name, two.model_family.name),
        *(
            (f"tokenizer.{name}", value, theirs.get(name))
            for name, value in flat(dataclasses.asdict(one.tokenizer)).items()
            if name != "name"
        ),
        ("tokenizer files", dict(one.tokenizer_files), dict(two.tokenizer_files)),
        *((f"--{name.replace('_', '-')}", _option(one, name), _option(two, name)) for name in _SHARED_OPTIONS),
        ("--video-layout", _layout(one), _layout(two)),
        ("--video-positions", _positions(one), _positions(two)),
    ]
    different = [f"{name}: {a} in {store}, {b} in {other_store}" for name, a, b in facts if a != b]
    if different:
        listed = "\n".join(f"  {line}" for line in different)
        raise ConfigMismatchError(
            f"these datasets cannot be joined:\n{listed}\nPreprocess one of them again. A loader can read "
            "several datasets without joining them, if family and tokenizer are equal."
        )


def _option(manifest: Manifest, name: str) -> Any:
    options = manifest.config.get("options")
    return options.get(name) if isinstance(options, Mapping) else None


def _layout(manifest: Manifest) -> str:
    return str(manifest.video_options.get("layout", "transformers"))


def _positions(manifest: Manifest) -> str:
    return str(manifest.video_options.get("positions", "whole-seconds"))


def require_distinct(inputs: Sequence[Input]) -> None:
    """Checks that no samples would be in the new dataset twice.

    Two datasets repeat each other if they are at the same place, share the bytes of a shard with samples (of selected
    datasets, of a sample), or were made of the same rows with the same options, perhaps except the codec.

    Raises:
        UsageError: If two of them do; names both.
    """
    for one, other in combinations(inputs, 2):
        if what := _repetition(one, other):
            raise UsageError(
                f"{what}. Joined, its samples would occur twice. Leave one out, or give --allow-duplicates to repeat "
                "them."
            )


def _repetition(one: Input, other: Input) -> str:
    (store, manifest), (other_store, second) = one, other
    if real_place(store) == real_place(other_store):
        return f"{store} is given twice" if str(store) == str(other_store) else f"{store} and {other_store} are one"
    names = {info.sha256: info.name for info in manifest.shards if info.samples}
    shared = [info for info in second.shards if info.samples and info.sha256 in names]
    if shared and any(info.unselected for info in (*manifest.shards, *second.shards)):
        if common := _places(one) & _places(other):
            return f"{store} and {other_store} have {counted(len(common), 'sample')} in common"
    elif shared:
        samples = counted(sum(info.samples for info in shared), "sample")
        return (
            f"{store} and {other_store} have {counted(len(shared), 'equal shard')} with {samples}, such as "
            f"{names[shared[0].sha256]} of the first and {shared[0].name} of the second"
        )
    if _rows(manifest) == _rows(second):
        return f"{store} and {other_store} were made of the same rows with the same options"
    return ""


def _places(input_: Input) -> set[tuple[str, int]]:
    """Returns where the samples of a dataset are: sha256 of the shard, and first byte."""
    store, manifest = input_
    with store.local(INDEX_NAME) as folder:
        index = DatasetIndex.read(folder / INDEX_NAME)
    names = [info.sha256 for info in manifest.shards]
    return {(names[shard], at) for shard, at in zip(index.shard.tolist(), index.offset.tolist(), strict=True)}


def _rows(manifest: Manifest) -> tuple[Any, ...]:
    """What datasets of the same rows and options share under every codec."""
    config = {name: dict(value) for name, value in manifest.config.items() if isinstance(value, Mapping)}
    options = config.get("options", {})
    options.pop("pixels", None)
    if isinstance(videos := options.get("video"), Mapping):
        options["video"] = {name: value for name, value in videos.items() if name != "pixels"}
    for name in CODEC_FINGERPRINTS:
        config.get("fingerprints", {}).pop(name, None)
    return config, dict(manifest.source), manifest.ledger_sha256, manifest.totals.samples


def small_file_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    """Yields what is wrong with index, ledger, list of image files and tokenizer folder, as parts of a sentence."""
    for name, expected in manifest.small_files.items():
        if not (found := store.sha256(name)):
            yield f"{name} is missing"
        elif found != expected:
            yield f"{name} has sha256 {found}, but the manifest says {expected}"
    with store.local(*(f"{TOKENIZER_DIR}/{name}" for name in tokenizer_file_names(manifest))) as folder:
        yield from (f"{file}: {message}" for file, _, message in tokenizer_findings(folder, manifest))
