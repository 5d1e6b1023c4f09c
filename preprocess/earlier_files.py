"""Image files of shards that an earlier run made: whether they are still the same."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from preprocess.closing import file_sha256
from preprocess.image_files import changed_files, listed
from preprocess.shard_job import FILES_SUFFIX, PROGRESS_DIR, RUN_FILE, ShardRecord, progress_path
from vlmdata.errors import ConfigMismatchError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES, IMAGE_FILES_NAME, shard_name
from vlmdata.wording import counted

#: Shards listed in a message.
_SHOWN = 5


@dataclass(frozen=True)
class EarlierFiles:
    """What earlier runs into a directory recorded of image files.

    Attributes:
        directory: The dataset's.
        image_root: Folder that the files lie in; None if rows can name none.
        hash_source: Whether to read all files, and not only those that were touched since the run began.
    """

    directory: Path
    image_root: str | None
    hash_source: bool

    def require_unchanged(self, manifest: Manifest) -> None:
        """Checks the files of a finished dataset.

        Raises:
            ConfigMismatchError: If some have changed; the message says which shards they are in.
        """
        written, path = manifest.source.get(IMAGE_FILES), self.directory / IMAGE_FILES_NAME
        if written is None or not path.is_file() or file_sha256(path) != written["sha256"]:
            return  # a lost list is made again, and with it all shards: there, changed files give other bytes
        changed = self._changed(path, path)
        if changed:
            lines = [f"  {shard_name(shard)}: {listed({shard: paths})}" for shard, paths in sorted(changed.items())]
            more = [f"  … {counted(len(lines), 'shard')} in all"] if len(lines) > _SHOWN else []
            shown = "\n".join([*lines[:_SHOWN], *more])
            raise ConfigMismatchError(
                f"{self.directory}: holds a finished dataset, but image files in {self.image_root} have changed since "
                f"it was made:\n{shown}\nRestore them, give another --out, or --overwrite to make the dataset anew."
            )

    def forget_changed(self, records: MutableMapping[int, ShardRecord]) -> Mapping[int, Sequence[str]]:
        """Removes the records of finished shards whose files have changed, so that these shards are made again.

        Args:
            records: Records of the finished shards by number.

        Returns:
            The removed shards and their changed files.
        """
        changed: dict[int, list[str]] = {}
        run_file = self.directory / PROGRESS_DIR / RUN_FILE
        for shard in list(records):
            path = progress_path(self.directory, shard, FILES_SUFFIX)
            if path.exists() and (found := self._changed(path, run_file)):
                changed |= found
                # First of all: a record beside a new shard of the same size would be taken for its own.
                progress_path(self.directory, shard, "json").unlink()
                del records[shard]
        return changed

    def _changed(self, recorded: Path, began: Path) -> dict[int, list[str]]:
        root = Path(self.image_root or ".").resolve()
        return changed_files(recorded, root, None if self.hash_source else began.stat().st_mtime_ns)
