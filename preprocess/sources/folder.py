"""Which files of a folder are its data. One kind of data file is read; images and other files may lie beside it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preprocess.sources.kinds import ENDINGS, Kind, is_image, kind_of, listing
from preprocess.sources.splits import choose_split, splits_by_name
from vlmdata.errors import SourceError
from vlmdata.format.schema import MANIFEST_NAME, TOKENIZER_DIR

#: Files of other programs that end like data.
_NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


@dataclass(frozen=True)
class FolderContent:
    """What a folder holds.

    Attributes:
        folder: The folder.
        data: Its data files, by path.
        images: Number of image files.
        others: Endings of all other files, with their numbers.
    """

    folder: Path
    data: Sequence[Path]
    images: int
    others: Counter[str]

    @classmethod
    def look(cls, folder: Path) -> FolderContent:
        """Lists a folder and all below it. Hidden files and folders, and datasets made of it, are passed over."""
        data, images, others = list[Path](), 0, Counter[str]()
        for parent, folders, names in os.walk(folder, followlinks=True):
            folders[:] = sorted(
                name for name in folders if not name.startswith((".", "__")) and not _is_dataset(Path(parent, name))
            )
            for name in sorted(names):
                file = Path(parent, name)
                if name.startswith(".") or name in _NO_DATA:
                    continue
                if kind_of(file) is not None:
                    data.append(file)
                elif is_image(file):
                    images += 1
                else:
                    others[file.suffix or name] += 1
        return cls(folder, data, images, others)

    @property
    def is_for_datasets(self) -> bool:
        """True if `datasets` knows more of the folder than the names of its files say.

        That is an image folder, or one whose dataset card (``README.md``) says which files are which split.
        """
        card = self.folder / "README.md"
        if card.is_file() and "data_files:" in card.read_text(errors="replace").partition("\n---")[0]:
            return True
        return self.images > 0 and all(file.name in _METADATA for file in self.data)

    def choose(self, split: str | None) -> tuple[Kind, str, list[Path]]:
        """The kind of the data files, the split to read, and its files.

        Raises:
            SourceError: If there are no data files, several kinds of them, or no such split.
        """
        what = f"SOURCE {self.folder}"
        kinds = {kind for file in self.data if (kind := kind_of(file)) is not None}
        if not kinds:
            found = ", ".join(f"{count:,} {ending}" for ending, count in self.others.most_common(5)) or "nothing"
            raise SourceError(f"{what}: no data files in this folder. Found: {found}. Read are: {', '.join(ENDINGS)}.")
        if _is_dataset(self.folder):
            raise SourceError(
                f"{what}: a dataset that `vlmdata preprocess` made. Give the data it was made from, or look at it "
                "with `vlmdata inspect`."
            )
        if len(kinds) > 1:
            raise SourceError(
                f"{what}: data files of several kinds in one folder: {listing(self.data, self.folder)}. Give those to "
                f"read, for example '{self.folder / '**' / f'*{_ending(self.data[0])}'}'."
            )
        splits = splits_by_name(file.relative_to(self.folder).as_posix() for file in self.data)
        self._require_all_in_splits(splits)
        name = choose_split(what, splits, split)
        return kinds.pop(), name, [self.folder / file for file in splits[name]]

    def _require_all_in_splits(self, splits: dict[str, list[str]]) -> None:
        sorted_in = {name for names in splits.values() for name in names}
        left_out = [name for file in self.data if (name := file.relative_to(self.folder).as_posix()) not in sorted_in]
        if left_out:
            raise SourceError(
                f"SOURCE {self.folder}: by its name {left_out[0]} belongs to none of the splits {', '.join(splits)} "
                f"({len(left_out)} such files). Rename it, or give the files to read."
            )


def _is_dataset(folder: Path) -> bool:
    """True for what ``vlmdata preprocess`` makes, finished or not."""
    finished = (folder / MANIFEST_NAME).is_file() and (folder / TOKENIZER_DIR).is_dir()
    return finished or (folder / ".progress" / "run.json").is_file()


def _ending(file: Path) -> str:
    return next(ending for ending in ENDINGS if file.name.lower().endswith(ending))
