"""Checks that the image files of an earlier run's shards are unchanged."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmdata.errors import ConfigMismatchError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES, IMAGE_FILES_NAME, PROGRESS_DIR
from vlmdata.locations import is_url, place_of
from vlmdata.preprocess.recipes.image_files import changed_files, listed
from vlmdata.preprocess.recipes.remote_root import RemoteRoot
from vlmdata.preprocess.shards.job import FILES_SUFFIX, RUN_FILE, ShardRecord, progress_name
from vlmdata.storage import Store
from vlmdata.wording import counted

#: Number of shards listed in a message.
_SHOWN = 5


@dataclass(frozen=True)
class EarlierFiles:
    """The image files that earlier runs recorded in a store."""

    store: Store
    image_root: str | None  # None if rows can name no files
    hash_source: bool  # whether to read all files, and not only those that were touched since the run began

    def changed_since(self, manifest: Manifest, compared_ns: int | None = None) -> Mapping[int, Sequence[str]]:
        """Returns the files of a finished dataset that have changed, by shard.

        Args:
            manifest: The manifest of the dataset.
            compared_ns: When they were last found unchanged; by default when their list says.
        """
        written, store = manifest.source.get(IMAGE_FILES), self.store
        if written is None or store.sha256(IMAGE_FILES_NAME) != written["sha256"]:
            return {}  # recreating a lost list recreates all shards, which detects changed files by their bytes
        if compared_ns is None and store.keeps_times:
            compared_ns = store.modified_ns(IMAGE_FILES_NAME)
        return self._changed(IMAGE_FILES_NAME, compared_ns)

    def refusal(self, manifest: Manifest, changed: Mapping[int, Sequence[str]], why: str) -> ConfigMismatchError:
        """Returns the error for changed files of a dataset of which no version can be made."""
        names = {shard: manifest.shards[shard].name.rpartition("/")[2] for shard in changed}
        lines = [f"  {names[shard]}: {listed({shard: paths})}" for shard, paths in sorted(changed.items())]
        more = [f"  … {counted(len(lines), 'shard')} in total"] if len(lines) > _SHOWN else []
        shown = "\n".join([*lines[:_SHOWN], *more])
        return ConfigMismatchError(
            f"{self.store}: contains a finished dataset, but image files in {self.image_root} have changed:"
            f"\n{shown}\n{why}"
        )

    def forget_changed(self, records: MutableMapping[int, ShardRecord]) -> Mapping[int, Sequence[str]]:
        """Removes the records of finished shards with changed files. Returns the removed shards and these files."""
        changed: dict[int, list[str]] = {}
        progress = self.store.listing(PROGRESS_DIR)
        for shard in list(records):
            name = progress_name(shard, FILES_SUFFIX)
            if name.removeprefix(f"{PROGRESS_DIR}/") not in progress:
                continue
            if found := self._changed(name, self.store.modified_ns(RUN_FILE)):
                changed |= found
                # Remove the record first: it would be taken for that of a new shard with the same size.
                self.store.delete([progress_name(shard, "json")])
                del records[shard]
        return changed

    def _changed(self, recorded: str, began_ns: int | None) -> dict[int, list[str]]:
        place = place_of(self.image_root or ".")
        root = RemoteRoot(place) if is_url(place) else Path(place).resolve()
        with self.store.local(recorded) as folder:
            return changed_files(folder / recorded, root, None if self.hash_source else began_ns)
