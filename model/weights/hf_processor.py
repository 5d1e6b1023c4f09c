"""Writes the files that ``AutoProcessor`` and ``generate`` need besides weights, from a training dataset."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdata.errors import UsageError, VlmdataError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MANIFEST_NAME, TOKENIZER_DIR
from vlmdata.format.tokenizer_files import recorded_tokenizer_files, tokenizer_findings
from vlmdata.loader.mixture import expanded
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import spec_of
from vlmdata.model.families.processors import ProcessorFiles
from vlmdata.model.weights.hf_files import WeightsError
from vlmdata.model.weights.hf_folder import copy_small_files
from vlmdata.storage.download import download
from vlmdata.storage.versions import place_of_version

_IMAGES, _VIDEOS, _GENERATION = "preprocessor_config.json", "video_preprocessor_config.json", "generation_config.json"
_JOINT = "processor_config.json"
#: Any of these is a tokenizer.
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")


@dataclass(frozen=True)
class DatasetFiles:
    """The parts of a dataset that complete a folder."""

    name: str  # path or URL of the dataset, as the user gave it
    manifest: Manifest
    tokenizer: Path  # folder of its tokenizer

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum pixels per image; a WeightsError if it joins datasets with different ones."""
        try:
            image = self.manifest.config["options"]["image"]
            return int(image["min_pixels"]), int(image["max_pixels"])
        except KeyError as error:
            raise WeightsError(
                f"{self.name} joins datasets with different pixel bounds: give one of them with --data"
            ) from error


@contextmanager
def opened(location: str) -> Iterator[DatasetFiles]:
    """Opens a dataset, at a path or URL, for its tokenizer; an error if it is missing, unfinished or changed."""
    with tempfile.TemporaryDirectory() as temporary:
        place = place_of_version(location)
        directory = Path(place)
        if "://" in place:
            directory = Path(temporary)
            _fetch(place, directory)
        manifest = Manifest.read(directory)
        for file, _, problem in tokenizer_findings(directory, manifest):
            raise WeightsError(f"{location}/{file}: {problem}. Run `vlmdata verify {location}` to list all damage")
        yield DatasetFiles(location, manifest, directory / TOKENIZER_DIR)


def _fetch(url: str, directory: Path) -> None:
    try:
        download(f"{url}/{MANIFEST_NAME}", directory / MANIFEST_NAME, None)
        files = Manifest.read(directory).tokenizer_files
        for name, sha256 in files.items():
            path = directory / TOKENIZER_DIR / name
            path.parent.mkdir(parents=True, exist_ok=True)
            download(f"{url}/{TOKENIZER_DIR}/{name}", path, sha256)
    except FileNotFoundError as error:
        raise WeightsError(f"{error}: file not found, so {url} is not a finished dataset") from error


def choose_dataset(
    source: Path, like: Path | None, data: str | None, architecture: Architecture
) -> tuple[str | None, list[str]]:
    """Chooses the dataset that supplies tokenizer and processor: ``data``, or the first readable dataset of the run.

    The tokenizer and processor of a Hugging Face folder ``like`` are kept, unless ``data`` is given or it lacks one.
    Returns the dataset or None, and notes for the user, one line each. A VlmdataError if ``data`` is not a finished
    dataset, or has another tokenizer than this model.
    """
    if data is not None:
        with opened(data) as dataset:
            _require_vocabulary(dataset, architecture)
        return data, []
    readable: dict[str, tuple[int, int]] = {}
    notes = []
    for location in _recorded(source):
        try:
            with opened(location) as dataset:
                _require_vocabulary(dataset, architecture)
                readable[location] = dataset.bounds
        except (VlmdataError, OSError) as error:
            notes.append(f"the run's dataset {location} is not used: {error}")
    first = next(iter(readable), None)
    if like is not None and (lacking := _lacking(like)):
        what = " and ".join(lacking)
        if first is None:
            return None, [*notes, f"without {what}: {like} has none. Add --data DATASET to write them"]
        return first, [f"{like} has no {what}: tokenizer and processor are those of {first}"]
    if like is not None:
        theirs = _bounds_in(like, spec_of(architecture).processor)
        if first is None or theirs in (None, readable[first]):
            return None, []
        return None, [
            f"images: the processor of {like} has {_pixels(theirs)}, but the model was trained with "
            f"{_pixels(readable[first])}; --data {first} writes the latter"
        ]
    if first is None:
        return None, [*notes, "without tokenizer and processor: add --data DATASET or --like FOLDER to write them"]
    notes += [
        f"images: the processor has the {_pixels(readable[first])} of {first}; {other} has {_pixels(bounds)}"
        for other, bounds in readable.items()
        if bounds != readable[first]
    ]
    return first, notes


def _lacking(folder: Path) -> list[str]:
    """Returns what a Hugging Face folder lacks of tokenizer and processor."""
    files = {"tokenizer": _TOKENIZERS, "processor": (_IMAGES, _JOINT)}
    return [what for what, names in files.items() if not any((folder / name).is_file() for name in names)]


def _recorded(source: Path) -> list[str]:
    """Returns the datasets of the run that wrote a checkpoint."""
    try:
        paths = list(json.loads((source / "run.json").read_text())["config"]["data"]["paths"])
    except (OSError, ValueError, TypeError, KeyError):
        return []
    try:
        return [str(each) for each in expanded(paths)]
    except UsageError:  # the mixture file is gone, which is said where it is opened
        return paths


def _pixels(bounds: tuple[int, int] | None) -> str:
    assert bounds is not None
    return f"{bounds[0]:,} to {bounds[1]:,} pixels"


def _require_vocabulary(dataset: DatasetFiles, architecture: Architecture) -> None:
    """Raises an error for a tokenizer that is not the model's."""
    tokenizer, size = dataset.manifest.tokenizer, architecture.language.vocab_size
    if tokenizer.image != architecture.image_token_id or tokenizer.vocab_size > size:
        raise WeightsError(
            f"the tokenizer of {dataset.name} has {tokenizer.vocab_size} ids and image token {tokenizer.image}, the "
            f"weights have {size} ids and image token {architecture.image_token_id}: give their training dataset"
        )


def complete(folder: Path, like: Path | None, data: str | None, architecture: Architecture) -> list[str]:
    """Writes all files of a Hugging Face folder but weights and ``config.json``.

    Args:
        folder: The folder.
        like: A Hugging Face folder whose files are copied.
        data: The dataset that :func:`choose_dataset` returned.
        architecture: The architecture of the model.

    Returns:
        Notes for the user, one line each.
    """
    notes = [] if like is None else copy_small_files(like, folder)
    if data is not None:
        with opened(data) as dataset:
            _write_processor(dataset, spec_of(architecture).processor, folder)
    return notes


def _write_processor(dataset: DatasetFiles, files: ProcessorFiles, out: Path) -> None:
    """Writes tokenizer, chat template, processor and generation settings, replacing existing files."""
    for name in recorded_tokenizer_files(dataset.tokenizer.parent, dataset.manifest):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(dataset.tokenizer / name, out / name)
    processor = dataset.manifest.config["fingerprints"]["processor"]
    fields = ("image_mean", "image_std", "merge_size", "patch_size", "temporal_patch_size")
    constants = {name: processor[name] for name in fields}
    tokenizer = dataset.manifest.tokenizer
    stops = list(dict.fromkeys([tokenizer.turns.end, tokenizer.pad]))
    # Remove processor files of other transformers versions, which would take precedence over these.
    (out / _JOINT).unlink(missing_ok=True)
    _write(out / _IMAGES, files.image_file(dataset.manifest.model_family, constants, dataset.bounds))
    _write(out / _VIDEOS, files.video_file(constants, _video_settings(dataset.manifest)))
    _write(out / _GENERATION, _generation(out / _GENERATION, stops, tokenizer.pad))


def _video_settings(manifest: Manifest) -> Mapping[str, Any]:
    """Returns how the processor samples and resizes videos: as the dataset did, or as published checkpoints do.

    The latter also if qwen-vl-utils did, which hands sampled and resized frames to the processor.
    """
    rules = manifest.model_family.video
    assert rules is not None  # families that the trainer builds have videos
    recorded = manifest.video_options  # datasets of older versions have none
    return recorded if recorded and "sampler" not in recorded else dataclasses.asdict(rules.defaults)


def _generation(path: Path, stops: list[int], pad: int) -> dict[str, Any]:
    """Returns copied generation settings, if any, with the dataset's ids."""
    try:
        kept = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        kept = {}
    return {**kept, "eos_token_id": stops, "pad_token_id": pad}


def _bounds_in(folder: Path, files: ProcessorFiles) -> tuple[int, int] | None:
    """Reads the pixel bounds of a Hugging Face folder's processor; None if it has none."""
    for name in (_IMAGES, _JOINT):
        try:
            found = json.loads((folder / name).read_text())
            return files.image_bounds(found.get("image_processor", found))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
