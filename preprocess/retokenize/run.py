"""A complete run: checks what the dataset has, then makes all shards again with its pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.manifest import differences
from vlmdata.format.schema import (
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    JOINED,
    SCHEMA_VERSION,
    SELECTED,
)
from vlmdata.format.selection import SELECTION, Selection
from vlmdata.locations import is_url
from vlmdata.preprocess.chat.tokenizer import told_family
from vlmdata.preprocess.config import EMBEDDED, SHORTENING, PreprocessConfig
from vlmdata.preprocess.engines.base import ShardWork
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.retokenize.context import NEEDS_SOURCE, OF_TEXT, RetokenizeWork
from vlmdata.preprocess.retokenize.stored import OldShards
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from vlmdata.preprocess.run.row_table import take_row_table
from vlmdata.preprocess.sources.holdout import SelectedRows
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage import Store
from vlmdata.storage.folder import Folder
from vlmdata.wording import counted

#: Fingerprints of what makes text; all others are of pixels, which stay what they are.
_OF_TEXT = frozenset({"vlmdata", "schema", "tokenizer", "chat_template", "recipe", "family_source", "think_block"})
_LIBRARIES, _TEXT_LIBRARIES = "libraries", frozenset({"jinja2", "tokenizers", "transformers"})


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Numbers of rows without their values, which the shards have."""

    rows: int

    def __len__(self) -> int:
        """Number of rows."""
        return self.rows

    def columns(self) -> tuple[str, ...] | None:
        """Returns no columns."""
        return ()

    def values(self, number: int) -> Mapping[str, Any]:
        """Returns nothing."""
        return {}


def old_config(old: OldDataset) -> PreprocessConfig:
    """Returns the options that a dataset was made with.

    Raises:
        UsageError: If it was joined or selected from others, or made by another version of the format.
    """
    kind, manifest = old.manifest.source.get("kind"), old.manifest
    if kind == JOINED:
        raise UsageError(f"{old.name}: was joined of several datasets. Retokenize each, then join the results.")
    if kind == SELECTED:
        raise UsageError(
            f"{old.name}: was selected from another dataset. Retokenize that one, then select again (--keys)."
        )
    if manifest.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"{old.name}: has the format {manifest.schema_version}. Bring it up to {SCHEMA_VERSION} with `vlmdata "
            "recode` first."
        )
    try:
        return PreprocessConfig.from_json(manifest.config["options"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{old.name}: its options cannot be read: {error}. Preprocess the source again.") from error


def retokenize_dataset(
    old: OldDataset,
    out: Store,
    config: PreprocessConfig,
    *,
    source: Source | None = None,
    keep_rejected: bool = False,
    workers: int = 1,
    overwrite: bool = False,
    watcher: Watcher | None = None,
) -> RunResult:
    """Makes a dataset again with other settings of text, taking its pixels from the finished one.

    With equal library versions, the result equals, byte for byte, that of preprocessing the source with ``config``.

    Args:
        old: The finished dataset.
        out: Destination.
        config: The options: those of the dataset (:func:`old_config`), with other ones of text.
        source: The rows of the dataset; None takes conversations from its shards.
        keep_rejected: Whether rows that it rejected may stay so without their source.
        workers: Number of processes; the result does not depend on it.
        overwrite: Whether to remove an existing dataset.
        watcher: Progress callbacks.

    Raises:
        UsageError: If the settings do not fit the pixels, or the dataset lacks what is needed.
        DatasetFormatError: If the dataset is damaged.
        ConfigMismatchError, ResourceError: As of preprocessing.
    """
    before = old_config(old)
    _require_other_place(old, out)
    _require_same_family(old, before, config)
    numbers = _numbers(old)
    identity = {name: value for name, value in old.manifest.source.items() if name != IMAGE_FILES}
    if source is None:
        _require_conversations(old, before, config, keep_rejected)
        rows = KeptRows(int(identity.get(SELECTION, {}).get("of_rows", len(numbers))))
        source = Source(rows, numbers, identity, image_root=None)
    else:
        source = _same_source(old, source, identity, numbers)
    reuse = _Reuse(old, before, source, keep_rejected)
    made = preprocess_dataset(source, out, config, workers=workers, overwrite=overwrite, watcher=watcher, reuse=reuse)
    if IMAGE_FILES in old.manifest.source and not reuse.from_source:
        out.stamp(IMAGE_FILES_NAME, old.files_compared_ns)
    if not reuse.from_source:  # what was read are conversations of shards, not rows of the source
        take_row_table(Folder(old.directory), old.manifest, out, made.manifest.index_sha256, made.manifest)
    return made


@dataclass(frozen=True, eq=False)
class _Reuse:
    """Pixels of a finished dataset; see :class:`vlmdata.preprocess.run.dataset.Reuse`."""

    old: OldDataset
    config: PreprocessConfig
    source: Source
    keep_rejected: bool

    @property
    def from_source(self) -> bool:
        """Whether rows are read again."""
        return not isinstance(self.source.rows, KeptRows)

    def identity(self, identity: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the identity of the run with the pixels' fingerprints as they are recorded.

        Raises:
            UsageError: If rows are to be read with other libraries of pixels than those recorded.
        """
        before = self.old.manifest.config["fingerprints"]
        now = identity["config"]["fingerprints"]
        made = {name: now.get(name) if name in _OF_TEXT else before.get(name) for name in {*now, *before}}
        made[_LIBRARIES] = {
            name: (now if name in _TEXT_LIBRARIES else before)[_LIBRARIES].get(name) for name in now[_LIBRARIES]
        }
        if not self.from_source:
            made["recipe"] = before["recipe"]
        for name in ("video_decoders", "video_codec", "video_codec_source"):  # absent of datasets without videos
            if name in now and name not in before:
                made[name] = now[name]
        made = {name: value for name, value in made.items() if value is not None}
        changed = differences(made, dict(now))
        if self.from_source and changed:
            raise UsageError(
                f"{self.old.name}: its pixels were made by other versions ({'; '.join(changed)}), and rows that are "
                "not in its shards would get others. Install these versions, or preprocess the source again."
            )
        options = dict(identity["config"]["options"])
        if not self.from_source:
            options["recipe_options"] = self.old.manifest.config["options"]["recipe_options"]
        return {**identity, "config": {"options": options, "fingerprints": made}}

    def work(self, work: ShardWork) -> ShardWork:
        """Returns the work with the dataset's shards."""
        old = OldShards(self.old.name, self.old.manifest, self.old.directory, self.old.shards)
        return RetokenizeWork.of(
            work,
            old=old,
            old_config=self.config,
            from_source=self.from_source,
            keep_rejected=self.keep_rejected,
        )


def _require_other_place(old: OldDataset, out: Store) -> None:
    local = not (is_url(old.name) or is_url(str(out)))
    if old.name == str(out) or (local and Path(old.name).resolve() == Path(str(out)).resolve()):
        raise UsageError(f"--out {out}: is the dataset to read; give another folder")


def _require_same_family(old: OldDataset, before: PreprocessConfig, config: PreprocessConfig) -> None:
    if config.tokenizer == EMBEDDED:
        return
    found, wanted = told_family(config.tokenizer, config.tokenizer_revision), before.model_family.name
    if found not in (None, wanted):
        raise UsageError(
            f"--tokenizer {config.tokenizer}: is of the family {found}, but {old.name} has pixels for {wanted}, whose "
            f"patches differ. Give a tokenizer of {wanted}, or preprocess the source for {found}."
        )


def _require_conversations(
    old: OldDataset, before: PreprocessConfig, config: PreprocessConfig, keep_rejected: bool
) -> None:
    if not before.keep_conversations:
        raise UsageError(
            f"{old.name}: its conversations are not stored. {NEEDS_SOURCE}; datasets that `vlmdata preprocess "
            "--keep-conversations` made need none."
        )
    if (config.recipe, config.recipe_options) != (before.recipe, before.recipe_options):
        raise UsageError(f"--recipe-option: the recipe reads rows of the source. {NEEDS_SOURCE}.")
    if SHORTENING & {before.overlong, config.overlong}:
        which = before.overlong if before.overlong in SHORTENING else config.overlong
        raise UsageError(f"--overlong {which}: it needs the whole conversations and image files. {NEEDS_SOURCE}.")
    lost = {reason: n for reason, n in old.manifest.rejects.items() if reason in OF_TEXT}
    if lost and not keep_rejected:
        listed = ", ".join(f"{n:,} {reason}" for reason, n in lost.items())
        raise UsageError(
            f"{old.name}: {counted(sum(lost.values()), 'sample')} rejected for what may change now ({listed}), and "
            f"what they were made of is not stored. {NEEDS_SOURCE}, or --keep-rejected to leave them out."
        )


def _same_source(old: OldDataset, source: Source, identity: Mapping[str, Any], numbers: Sequence[int]) -> Source:
    """Returns the rows of the dataset in the opened source.

    Raises:
        UsageError: If it is another source.
    """
    selection = identity.get(SELECTION)
    rows = len(numbers) if selection is None else int(selection["of_rows"])
    wanted = {**{name: value for name, value in identity.items() if name != SELECTION}, "rows": rows}
    if changed := differences(wanted, dict(source.identity)):
        listed = "\n".join(f"  {line}" for line in changed)
        raise UsageError(
            f"--source: is not what {old.name} was made of:\n{listed}\nGive the same rows (--split, --limit, "
            "--hash-source as then), or preprocess the new ones."
        )
    return replace(source, numbers=numbers, identity=identity)


def _numbers(old: OldDataset) -> Sequence[int]:
    """Returns the source rows of a dataset, ascending."""
    manifest = old.manifest
    selection = Selection.read(manifest.source)
    if selection is None:
        return range(manifest.totals.rows)
    mask = np.zeros(selection.of_rows, np.bool_)
    mask[DatasetIndex.read(old.directory / INDEX_NAME).source_row] = True
    mask[list(OldShards(old.name, manifest, old.directory, old.shards).rejections)] = True
    if not selection.names(np.flatnonzero(mask)):
        raise DatasetFormatError(f"{old.name}: its index and ledger lack rows. Run `vlmdata verify` on it.")
    return SelectedRows.of(mask)
