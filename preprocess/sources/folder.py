"""Finds the data files of a folder. They must be of one kind; images and other files may be next to them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vlmdata.errors import SourceError
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.preprocess.sources.data_files import Listing
from vlmdata.preprocess.sources.kinds import choose_split, is_image, splits_by_name
from vlmdata.preprocess.sources.reader import Formats, Reader

#: Files of other programs with the endings of data files.
_NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


@dataclass(frozen=True)
class FolderContent:
    """Contents of a folder."""

    root: str  # the folder, or a URL
    data: Sequence[str]  # names of its data files below it, with forward slashes; ascending
    images: int  # number of image files
    others: Counter[str]  # number of other files by ending
    card: str  # its dataset card (``README.md``); empty without one
    is_dataset: bool  # whether it is a dataset of ``vlmdata preprocess``
    formats: Formats  # those of its data files

    @classmethod
    def look(cls, folder: Path, formats: Formats) -> FolderContent:
        """Lists a folder recursively. Skips hidden files and folders, and datasets made from it."""
        names = []
        for parent, folders, files in os.walk(folder, followlinks=True):
            folders[:] = [name for name in folders if not _is_hidden(name) and not _is_dataset(Path(parent, name))]
            names += [Path(parent, name).relative_to(folder).as_posix() for name in files]
        card = folder / "README.md"
        text = card.read_text(errors="replace") if card.is_file() else ""
        return cls._of(str(folder), names, text, _is_dataset(folder), formats)

    @classmethod
    def look_remote(cls, listing: Listing, formats: Formats) -> FolderContent:
        """Lists the files below a URL by the same rules."""
        made = {parent for name in listing.files if (parent := _dataset_of(name, listing.files)) is not None}
        names = [
            name
            for name in listing.files
            if not any(_is_hidden(part) for part in name.split("/")[:-1])
            and not any(f"{parent}/" in made for parent in map(str, PurePosixPath(name).parents))
        ]
        card = listing.files.get("README.md")
        text = ""
        if card is not None:
            with card.open(card.size, counting=True) as stream:
                text = stream.read().decode("utf-8", "replace")
        return cls._of(listing.root, names, text, "" in made, formats)

    @classmethod
    def _of(cls, root: str, names: Iterable[str], card: str, is_dataset: bool, formats: Formats) -> FolderContent:
        data, images, others = list[str](), 0, Counter[str]()
        for name in sorted(names):
            last = name.rpartition("/")[2]
            if last.startswith(".") or last in _NO_DATA:
                continue
            if formats.reader_of(last) is not None:
                data.append(name)
            elif is_image(last):
                images += 1
            else:
                others[PurePosixPath(last).suffix or last] += 1
        return cls(root, data, images, others, card, is_dataset, formats)

    @property
    def is_for_datasets(self) -> bool:
        """True if `datasets` must read the folder: images, or a dataset card that assigns files to splits."""
        if "data_files:" in self.card.partition("\n---")[0]:
            return True
        return self.images > 0 and all(name.rpartition("/")[2] in _METADATA for name in self.data)

    def choose(self, split: str | None) -> tuple[type[Reader], str, list[str]]:
        """Returns the reader of the data files, the split to read, and the names of its files.

        A SourceError if there are no data files, several kinds of them, or no such split.
        """
        what = f"SOURCE {self.root}"
        if not self.data:
            found = ", ".join(f"{count:,} {ending}" for ending, count in self.others.most_common(5)) or "nothing"
            raise SourceError(
                f"{what}: no data files in this folder. Found: {found}. Read are: {self.formats.endings}."
            )
        if self.is_dataset:
            raise SourceError(
                f"{what}: a dataset that `vlmdata preprocess` made. Give the data it was made from, or look at it "
                "with `vlmdata inspect`."
            )
        if (reader := self.formats.common(self.data)) is None:
            ending = self.formats.ending_of(self.data[0])
            raise SourceError(
                f"{what}: data files of several kinds in one folder: {self.formats.listing(self.data)}. Give those to "
                f"read, for example '{self.root.rstrip('/')}/**/*{ending}'."
            )
        splits = splits_by_name(self.data)
        self._require_all_in_splits(splits)
        name = choose_split(what, splits, split)
        return reader, name, splits[name]

    def _require_all_in_splits(self, splits: dict[str, list[str]]) -> None:
        sorted_in = {name for names in splits.values() for name in names}
        left_out = [name for name in self.data if name not in sorted_in]
        if left_out:
            raise SourceError(
                f"SOURCE {self.root}: by its name {left_out[0]} belongs to none of the splits {', '.join(splits)} "
                f"({len(left_out)} such files). Rename it, or give the files to read."
            )


def _is_dataset(folder: Path) -> bool:
    """Returns whether this is a finished or unfinished dataset of ``vlmdata preprocess``."""
    finished = (folder / MANIFEST_NAME).is_file() and (folder / TOKENIZER_DIR).is_dir()
    return finished or (folder / ".progress" / "run.json").is_file()


def _dataset_of(name: str, names: Container[str]) -> str | None:
    """Returns the name prefix of the dataset whose manifest this file is; None for other files."""
    folder = name.removesuffix(MANIFEST_NAME)
    is_one = name == f"{folder}{MANIFEST_NAME}" and f"{folder}{INDEX_NAME}" in names
    return folder if is_one and (not folder or folder.endswith("/")) else None


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__"))
