"""One sample: its text by role and target, its tokens, its images (rebuilt from patches), and its origin."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError, NotFoundError
from vlmdata.families import Family
from vlmdata.families.processor import TENSORS, ProcessorFamily
from vlmdata.format.dataset import VlmDataset
from vlmdata.format.row_places import RowPlaces
from vlmdata.format.schema import IGNORE_INDEX, SHORTENED, VARIANT, Sample
from vlmdata.format.source_columns import SOURCE, TEMPLATE_ARGUMENTS
from vlmdata.inspect.boxes import BoxDescription, boxes_of, pictures_of, recorded_source, sides_in, tile_of
from vlmdata.inspect.dataset import source_of_row
from vlmdata.inspect.findings import ContentCheck, Finding, IndexFindings, Severity, changed_data_of, flat_images
from vlmdata.inspect.frames import FrameDescription, cells_of, frames_of, item_starts
from vlmdata.inspect.serialise import INLINE
from vlmdata.inspect.tokens import TokenTexts, TurnSpan, find_turns
from vlmdata.wording import counted

#: Number of tokens in a line of the sample list.
_FIRST_TOKENS = 40
#: Longest side of an image in the one-file page, in pixels; the served page shows every pixel.
PAGE_SIDE = 1024
#: Longest side of a frame of a video in the one-file page, in pixels.
FRAME_SIDE = 384
#: Longest side of an image in the list of samples, in pixels.
THUMBNAIL_SIDE = 96


class SpanKind(StrEnum):
    """Kind of a span of tokens."""

    TEXT = "text"
    HEADER = "header"
    SPECIAL = "special"
    IMAGE = "image"


_KINDS = tuple(SpanKind)


@dataclass(frozen=True)
class Span:
    """Tokens ``[start, stop)`` of one role and kind, all targets or none."""

    start: int
    stop: int
    role: str  # of the turn: "user", "assistant", …; "" outside of turns
    kind: SpanKind
    target: bool
    text: str  # one placeholder for all tokens of an image
    image: int | None = None  # number of the image, if the tokens belong to one
    weight: float | None = None  # loss weight of each token; None if all targets of the sample weigh 1


@dataclass(frozen=True)
class ImageDescription:
    """One image or video as the model sees it."""

    number: int  # within the sample
    grid: tuple[int, int, int]  # patches along t, h, w
    merge: int  # patches per side of a token
    width: int  # in pixels, after resizing
    height: int  # in pixels, after resizing
    patches: int
    tokens: int  # in the sequence
    cells: tuple[int, ...] | None  # merged patch that each of its tokens shows; None if token n shows merged patch n
    start: int  # first token
    source: Mapping[str, Any]  # the image file: format, mode, width, height, normalisations; empty if not recorded
    scale: float | None  # sides divided by the file's, as the root of their areas; None if not recorded
    kind: str  # image or video
    frames: tuple[FrameDescription, ...]  # temporal patches of a video; none of an image
    tile: tuple[int, int] | None = None  # row and column among the tiles of its image; None if it is no tile

    @property
    def frame_counts(self) -> tuple[int, int] | None:
        """Frames of a video's file, and how many of them were kept; None if they are not recorded."""
        total, kept = self.source.get("file_frames"), {each for frame in self.frames for each in frame.source}
        return (total, len(kept)) if type(total) is int and kept else None


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The true tokens as columns, each of ``length`` entries."""

    ids: npt.NDArray[np.int32]  # int32
    texts: tuple[str, ...]  # joined, they form the sample's text
    labels: npt.NDArray[np.int64]  # int64, the next token if it is a target, else -100: as in the loader
    mask: npt.NDArray[np.uint8]  # uint8, 1 if the token itself is a target
    weights: npt.NDArray[np.float32] | None  # float32, loss weight of the token itself; None if all weigh 1
    #: int32, the position on each axis of the family, by its name
    positions: Mapping[str, npt.NDArray[np.int32]] = field(metadata={INLINE: True})
    spans: npt.NDArray[np.int32]  # int32, span number of each token


@dataclass(frozen=True, eq=False)
class SampleDescription:
    """Everything about one sample. Units: tokens, patches, bytes."""

    key: str
    index: int  # position in the dataset
    source_row: int
    source: str  # and the place of the row there; in a joined dataset also its number in its own dataset
    shard: str  # file name
    offset: int  # in the shard, in bytes
    size: int  # in bytes
    length: int  # true length
    padded_length: int  # stored length
    num_targets: int  # in the mask
    target_share: float  # of the true length
    target_turns: int  # assistant turns that are targets, from the index
    truncated: bool  # whether the last answer was truncated
    turns: tuple[TurnSpan, ...]
    spans: tuple[Span, ...]
    images: tuple[ImageDescription, ...]
    boxes: tuple[BoxDescription, ...]  # boxes and points in the text
    columns: Mapping[str, Any]  # what the recipe attached
    tokens: TokenTable
    findings: tuple[Finding, ...]


class SampleDescriber:
    """Describes samples of one dataset and holds shared data (tokenizer, quartiles). Thread-safe.

    Raises:
        DatasetFormatError: If its tokenizer cannot be read.
    """

    def __init__(self, dataset: VlmDataset):
        self.dataset = dataset
        self.texts = TokenTexts(dataset.directory, dataset.manifest)
        self.places = RowPlaces.read(dataset.directory, dataset.manifest)
        self.facts = IndexFindings(dataset.index, dataset.family)
        self._check = ContentCheck(dataset, self.texts)

    def __call__(self, i: int) -> SampleDescription:
        """Describes the sample at position ``i``."""
        dataset = self.dataset
        row, sample = dataset.index.row(i), dataset.as_stored(i)
        findings = self.findings(i)
        if all(found.kind != "checksum" for found in findings):  # these read no pixels
            findings += tuple(changed_data_of(lambda: dataset[i]))
        if not 0 < sample.length <= len(sample.input_ids):
            raise DatasetFormatError(
                f"{dataset.name}/{dataset.shard_path(row.shard).name}: sample {row.key} has "
                f"{counted(sample.length, 'token')} stored as "
                f"{len(sample.input_ids)}. Run `vlmdata verify` on the dataset."
            )
        info, metadata = dataset.manifest.tokenizer, dataset.metadata(i)
        ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length]
        turns = find_turns(ids, mask, info, self.texts)
        begins, columns = row.item_starts, _columns(metadata)
        flat = tuple(flat_images(sample))
        if isinstance(dataset.family, ProcessorFamily):  # its tensors are no pictures
            sample, begins, flat = replace(sample, items=(), patches=sample.patches[:0]), (), ()
            columns |= _tensors(metadata)
        starts = item_starts(sample, begins, dataset.family, info)
        numbers, spans = _spans(sample, turns, starts, dataset, self.texts)
        targets, table = int(np.count_nonzero(mask)), _table(sample, self.texts, numbers, dataset.family)
        pictures = pictures_of(sample.items, begins, dataset.family, metadata)
        place = self.places.text(row.source_row)
        return SampleDescription(
            key=row.key,
            index=i,
            source_row=row.source_row,
            source=_with_place(source_of_row(dataset.manifest.source, row.source_row), place),
            shard=dataset.shard_path(row.shard).name,
            offset=row.placement.offset,
            size=row.placement.size,
            length=sample.length,
            padded_length=row.padded_length,
            num_targets=targets,
            target_share=targets / sample.length,
            target_turns=row.target_turns,
            truncated=row.truncated,
            turns=turns,
            spans=spans,
            images=_images(sample, starts, metadata, dataset.family),
            boxes=boxes_of(table.texts, dataset.family.grounding, pictures, metadata),
            columns=columns,
            tokens=table,
            findings=_by_severity([*findings, *flat]),
        )

    def findings(self, i: int) -> tuple[Finding, ...]:
        """Returns the findings of the sample at position ``i``, without reading its pixels."""
        return _by_severity([*self.facts.of(i), *self._check.of(i)])

    def image(self, i: int, number: int, patch: int = 0) -> npt.NDArray[np.uint8]:
        """Rebuilds an image of sample ``i``, or a frame of a video; see :func:`rebuild_image`."""
        return rebuild_image(self.dataset.as_stored(i), number, self.dataset.family, patch)

    def first_words(self, i: int) -> str:
        """Returns the start of the first target of sample ``i``, or of its text without targets."""
        sample, info = self.dataset.as_stored(i, pixels=False), self.dataset.manifest.tokenizer
        ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length] != 0
        text = ids[mask] if mask.any() else ids[~np.isin(ids, info.all_placeholders)]
        return self.texts.decode(text[:_FIRST_TOKENS].tolist()).strip()


def _with_place(source: str, place: str) -> str:
    """Adds the place of a row to its source, which may end in the name of its file already."""
    file = place.partition(", ")[0]
    if file and source.endswith(f": {file}"):
        return source + place.removeprefix(file)
    return ", ".join(filter(None, (source, place)))


def describe_sample(dataset: VlmDataset, which: int | str) -> SampleDescription:
    """Describes one sample.

    Args:
        dataset: The dataset.
        which: A key, or a position (negative counts from the end), as number or text.

    Raises:
        NotFoundError: If there is no sample with this key or at this position.
        DatasetFormatError: If its shard or the tokenizer cannot be read.
    """
    return SampleDescriber(dataset)(position_of(dataset, which))


def position_of(dataset: VlmDataset, which: int | str) -> int:
    """Returns the position of a sample, given its key or position.

    A string that is a key means that key. Otherwise a whole number without a leading zero is a position: "17" is the
    eighteenth sample; "000000017" is the sample of source row 17 or an error, never anything else.

    Raises:
        NotFoundError: If there is no sample with this key or at this position.
    """
    total = len(dataset)
    if not total:
        raise NotFoundError(f"no sample {which}: {dataset.name} has none (all rows were rejected?)")
    if isinstance(which, str):
        if not re.fullmatch(r"0|-?[1-9][0-9]{0,17}", which):
            return dataset.index.position_of(which)
        try:
            return dataset.index.position_of(which)
        except NotFoundError:
            which = int(which)
    if not -total <= which < total:
        raise NotFoundError(f"no sample {which}: the dataset has {total:,}, numbered 0 to {total - 1}")
    return which % total


def _by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    order = list(Severity)
    return tuple(sorted(findings, key=lambda found: order.index(found.severity)))


def _table(sample: Sample, texts: TokenTexts, spans: npt.NDArray[np.int32], family: Family) -> TokenTable:
    length = sample.length
    ids, mask = sample.input_ids[:length], sample.loss_mask[:length]
    labels = np.full(length, IGNORE_INDEX, np.int64)
    labels[:-1] = np.where(mask[1:] != 0, ids[1:], IGNORE_INDEX)
    positions = dict(zip(family.position_axes, sample.position_ids[:, :length], strict=True))
    weights = None if sample.loss_weights is None else sample.loss_weights[:length]
    return TokenTable(ids, tuple(texts.decode_each(ids.tolist())), labels, mask, weights, positions, spans)


def _spans(
    sample: Sample,
    turns: tuple[TurnSpan, ...],
    starts: tuple[tuple[int, ...], ...],
    dataset: VlmDataset,
    texts: TokenTexts,
) -> tuple[npt.NDArray[np.int32], tuple[Span, ...]]:
    """Splits the tokens where turn, kind, target, weight or image changes. Also returns each token's span number."""
    info, family = dataset.manifest.tokenizer, dataset.family
    ids, mask = sample.input_ids[: sample.length], sample.loss_mask[: sample.length] != 0
    turn_of = np.repeat(np.arange(len(turns)), [turn.stop - turn.start for turn in turns])
    kind = np.full(sample.length, _KINDS.index(SpanKind.TEXT))
    for turn in turns:
        kind[turn.start : turn.body] = _KINDS.index(SpanKind.HEADER)
    distinct, inverse = np.unique(ids, return_inverse=True)
    special = np.array([texts.is_special(token) for token in distinct.tolist()])[inverse]
    kind[special & (kind == 0)] = _KINDS.index(SpanKind.SPECIAL)
    placeholders = np.isin(ids, info.all_placeholders)
    kind[placeholders] = _KINDS.index(SpanKind.IMAGE)
    image_of = np.full(sample.length, -1)
    for number, (of_item, item) in enumerate(zip(starts, sample.items, strict=True)):
        count = int(family.item_tokens(item.kind, [item.grid])[0])
        for start in of_item:
            image_of[start : start + -(-count // len(of_item))] = number
    image_of[~placeholders] = -1
    weights = mask.astype(np.float32) if sample.loss_weights is None else sample.loss_weights[: sample.length]
    marks = np.stack([turn_of, kind, mask, weights, image_of])
    cuts = np.flatnonzero((marks[:, 1:] != marks[:, :-1]).any(axis=0)) + 1
    spans = []
    for start, stop in pairwise([0, *cuts.tolist(), sample.length]):
        what, image = _KINDS[kind[start]], int(image_of[start])
        text = texts.decode(ids[start : start + 1 if what is SpanKind.IMAGE else stop].tolist())
        role = turns[turn_of[start]].role
        weight = None if sample.loss_weights is None else float(weights[start])
        spans.append(Span(start, stop, role, what, bool(mask[start]), text, image if image >= 0 else None, weight))
    numbers = np.zeros(sample.length, np.int32)
    numbers[cuts] = 1
    return np.cumsum(numbers, dtype=np.int32), tuple(spans)


def _columns(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the recipe attached, kept columns of the source, and the row's arguments of the chat template.

    Damaged metadata has none.
    """
    found = (metadata.get(name) for name in ("columns", SOURCE))
    columns = {name: value for each in found if isinstance(each, dict) for name, value in each.items()}
    arguments = metadata.get(TEMPLATE_ARGUMENTS)
    columns |= {name: metadata[name] for name in (VARIANT, SHORTENED) if isinstance(metadata.get(name), dict)}
    return columns | ({TEMPLATE_ARGUMENTS: arguments} if isinstance(arguments, dict) else {})


def _tensors(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the shapes of a processor's tensors by name, as the metadata records them."""
    recorded = recorded_source(metadata, 0).get(TENSORS)
    return {} if recorded is None else {TENSORS: recorded}


def _images(
    sample: Sample, starts: tuple[tuple[int, ...], ...], metadata: Mapping[str, Any], family: Family
) -> tuple[ImageDescription, ...]:
    found = []
    for number, ((t, h, w), of_item) in enumerate(zip(sample.grid_thw.tolist(), starts, strict=True)):
        source = recorded_source(metadata, number)
        whole, tile = tile_of(source, h * family.patch_size, w * family.patch_size)
        used = sides_in([source.get("height"), source.get("width")], 2)
        if (region := sides_in(source.get("region"), 4)) is not None:
            used = region[2:]
        found.append(
            ImageDescription(
                number=number,
                grid=(t, h, w),
                merge=family.merge_size,
                width=w * family.patch_size,
                height=h * family.patch_size,
                patches=t * h * w,
                tokens=int(family.item_tokens(sample.items[number].kind, [(t, h, w)])[0]),
                cells=cells_of(sample.items[number], family),
                start=of_item[0],
                source=source,
                scale=None if "crop" in source or used is None else _scale(whole, used),
                kind=sample.items[number].kind,
                frames=frames_of(sample.items[number], of_item, source, family),
                tile=tile,
            )
        )
    return tuple(found)


def _scale(now: Sequence[int], before: Sequence[int]) -> float | None:
    """Returns the scale of a picture. Its file may turn it, so that its sides are the file's in the other order."""
    return math.sqrt(math.prod(now) / math.prod(before)) if math.prod(before) else None


def rebuild_image(sample: Sample, number: int, family: Family, patch: int = 0) -> npt.NDArray[np.uint8]:
    """Rebuilds an image of a sample as the model sees it, uint8 (H, W, 3).

    Args:
        sample: The sample.
        number: Number of the image or video.
        family: Its family.
        patch: Of a video, the temporal patch whose first frame is rebuilt.

    Raises:
        NotFoundError: If the sample has no image of this number, or no such temporal patch.
        DatasetFormatError: If its grid does not match the stored patches.
    """
    if not 0 <= number < len(sample.items):
        raise NotFoundError(
            f"no image {number}: sample {sample.key} has {counted(len(sample.items), 'image')}, numbered from 0"
        )
    shape, found = sample.items[number], sample.grid_thw.tolist()
    frames, height, width = shape.grid
    if not 0 <= patch < frames:
        raise NotFoundError(
            f"no frame {patch}: {shape.kind} {number} of sample {sample.key} has "
            f"{counted(frames, 'temporal patch', 'temporal patches')}, numbered from 0"
        )
    start = sum(item.rows for item in sample.items[:number]) + patch * height * width * shape.copies
    stop, merge = start + height * width * shape.copies, family.merge_size
    fits = found == [list(item.grid) for item in sample.items] and min(map(min, found)) > 0
    if not fits or height % merge or width % merge or stop > len(sample.patches):
        raise DatasetFormatError(
            f"sample {sample.key}: {shape.kind} {number} has the grid {found[number]}, which does not match the "
            f"{len(sample.patches)} stored patches. Run `vlmdata verify` on the dataset."
        )
    return family.unpatchify(sample.patches[start : stop : shape.copies], height, width).transpose(1, 2, 0)
