"""What a worker knows to make shards with stored pixels: from source rows, or from conversations kept in the shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from vlmdata.errors import UsageError
from vlmdata.format.ledger import Rejection
from vlmdata.format.schema import SHORTENED
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.config import Overlong, PreprocessConfig, TrainTurns
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, MediaPart, VideoPart
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.encode.kept import Kept, KeptPart
from vlmdata.preprocess.encode.variants import with_variants
from vlmdata.preprocess.engines.base import ShardWork
from vlmdata.preprocess.recipes.base import Candidate, Recipe, candidates_of
from vlmdata.preprocess.recipes.choice import recipe_for
from vlmdata.preprocess.recipes.image_files import RecordedFile
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.retokenize.stored import OldSample, OldShard, OldShards, is_of_kind, stored_part, stored_views
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.shards.job import RowOutcome, ShardContext, ShardJob, attempted
from vlmdata.preprocess.shards.rows import RowRecord
from vlmdata.reasons import Reason

#: Reasons that another tokenizer, template or target rule may change.
OF_TEXT = frozenset(
    {
        *(Reason.NO_ASSISTANT_TURN, Reason.EMPTY_ANSWER, Reason.EMPTY_DOCUMENT, Reason.NO_TARGETS, Reason.LOSS_WEIGHT),
        *(Reason.UNKNOWN_KEYS, Reason.SPECIAL_TOKEN_TEXT, Reason.INVALID_UNICODE, Reason.TEMPLATE_ERROR),
        *(Reason.OVERLONG, Reason.UNEXPECTED_ERROR),
    }
)
NEEDS_SOURCE = "Give --source to read the rows again"


@dataclass(frozen=True, eq=False)
class RetokenizeWork(ShardWork):
    """Data that a worker needs to make any shard again."""

    old: OldShards = field(kw_only=True)  # the dataset with the pixels
    old_config: PreprocessConfig = field(kw_only=True)  # its options
    from_source: bool = field(kw_only=True)  # whether rows are read again; otherwise conversations are in the shards
    keep_rejected: bool = field(kw_only=True)  # whether rows that were rejected may stay so

    @classmethod
    def of(cls, work: ShardWork, **more: Any) -> RetokenizeWork:
        """Returns the same work with stored pixels."""
        return cls(**{each.name: getattr(work, each.name) for each in fields(ShardWork)}, **more)

    def prepare(self) -> ShardContext:
        """Loads tokenizer and recipe; see :meth:`ShardWork.prepare`."""
        import torch

        torch.set_num_threads(1)
        shards = _Shards(self.old, self.source.numbers)
        if not self.from_source:
            tokenizer = self.loaded or load_tokenizer(
                self.config.tokenizer, self.config.tokenizer_revision, self.config.model_family.name
            )
            media = MediaLoader(None, allow_urls=False)
            encoder = Encoder(self.config, tokenizer)
            return _FromShards(self.source, _no_recipe, media, encoder, self.store, shards, self.keep_rejected)
        made = ShardContext.build(self.source, self.config, self.store, self.tokenizer, self.loaded)
        changed = _recipe(self.config) != _recipe(self.old_config)
        earlier = recipe_for(self.source, self.old_config, made.media) if changed else None
        return _FromSource(
            made.source, made.recipe, made.media, made.encoder, made.store, shards, self.old_config, earlier
        )


def _recipe(config: PreprocessConfig) -> tuple[str, Mapping[str, Any]]:
    return config.recipe, config.recipe_options


def _no_recipe(row: Row) -> Conversation:
    raise AssertionError("conversations come from the shards")


class _Shards:
    """The old shard of each row; one is open at a time."""

    def __init__(self, old: OldShards, numbers: Sequence[int]):
        self.old = old
        # Shards of a version have any names.
        infos = [(n, info.row_start) for n, info in enumerate(old.manifest.shards) if info.row_start < info.row_stop]
        self._numbers = [number for number, _ in infos]
        self._firsts = [numbers[start] for _, start in infos]
        self._number = -1
        self._open: OldShard | None = None
        self._files: Mapping[str, RecordedFile] = {}

    def of(self, row: int) -> OldShard:
        """Returns the shard with the samples of a row."""
        number = self._numbers[bisect_right(self._firsts, row) - 1]
        if self._open is None or number != self._number:
            if self._open is not None:
                self._open.close()
            self._number, self._open = number, self.old.open(number)
            self._files = self.old.files(number)
        return self._open

    def has_same(self, files: Mapping[str, RecordedFile]) -> bool:
        """Whether files named by a row of the open shard are what they were."""
        return all(self._files.get(path) == file for path, file in files.items())


@dataclass(frozen=True, eq=False)
class _FromSource(ShardContext):
    """Reads rows again. Images and videos that the shards have are not decoded; all others are."""

    shards: _Shards
    old_config: PreprocessConfig
    earlier: Recipe | None  # the recipe that the dataset was made with, if the new one differs

    def candidates(self, row: Row, files: Mapping[str, RecordedFile]) -> list[Candidate] | RowRejected:
        """Returns what the recipe makes of a row, with the pixels of the shards, or its rejection."""
        made = before = super().candidates(row, files)
        if self.earlier is not None:
            before = attempted(partial(candidates_of, self.earlier, row, self.old_config.keep_columns), self.earlier)
            if not isinstance(before, RowRejected):
                before = with_variants(before, row, self.old_config)
        if isinstance(made, RowRejected) or isinstance(before, RowRejected):
            return made
        samples = self.shards.of(row.number).samples(row.number)
        if not self.shards.has_same(files):
            return made
        known = _known_media(before, samples, self.old_config)
        return [replace(each, made=_with_pixels(each.made, known)) for each in made]


def _known_media(
    candidates: Sequence[Candidate], samples: Sequence[OldSample], config: PreprocessConfig
) -> dict[tuple[Any, ...], MediaPart]:
    """Returns the images and videos of a row that its samples have, by what identifies them."""
    several = config.train_turns is TrainTurns.EACH or config.overlong is Overlong.SPLIT
    if len(candidates) > 1 and several:
        return {}  # it is not recorded which sample is of which candidate
    known: dict[tuple[Any, ...], MediaPart] = {}
    for each in candidates:
        made = each.made
        if isinstance(made, RowRejected):
            continue
        own = samples if len(candidates) == 1 else [s for s in samples if s.metadata.get("sample") == each.sample]
        if any(SHORTENED in sample.metadata for sample in own):
            continue  # they lack images, or have them smaller than the row says
        is_document = isinstance(made, Document)
        views, parts = stored_views(own, is_document), _media(made)
        if len(views) > len(parts) or (is_document and len(views) != len(parts)):
            continue  # a piece of the document is missing
        for part, its in zip(parts, views, strict=False):
            if is_of_kind(part, its):
                size = len(part.data) if isinstance(part.data, bytes) else sum(map(len, part.data))
                known.setdefault(_identity(part), stored_part(part, its, size))
    return known


def _media(made: Conversation | Document) -> Sequence[MediaPart]:
    return made.media if isinstance(made, Conversation) else made.images


def _identity(part: MediaPart) -> tuple[Any, ...]:
    kind = ImagePart if isinstance(part, ImagePart) else VideoPart
    return (kind, *(getattr(part, each.name) for each in fields(kind) if each.name not in ("field", "seconds")))


def _with_pixels(
    made: Conversation | Document | RowRejected, known: Mapping[tuple[Any, ...], MediaPart]
) -> Conversation | Document | RowRejected:
    if isinstance(made, RowRejected):
        return made

    def found(part: Any) -> Any:
        if not isinstance(part, ImagePart | VideoPart):
            return part
        stored = known.get(_identity(part))
        return part if stored is None else replace(stored, field=part.field)

    if isinstance(made, Document):
        return replace(made, parts=tuple(map(found, made.parts)))
    messages = tuple(replace(each, parts=tuple(map(found, each.parts))) for each in made.messages)
    return replace(made, messages=messages)


@dataclass(frozen=True, eq=False)
class _FromShards(ShardContext):
    """Takes conversations from the metadata of samples, and rejections from the ledger."""

    shards: _Shards
    keep_rejected: bool

    def candidates(self, row: Row, files: Mapping[str, RecordedFile]) -> list[Candidate] | RowRejected:
        """Returns the candidates of a row, or its rejection, as they were.

        Raises:
            UsageError: If what another rule may accept is not in the shards.
        """
        old, number = self.shards.old, row.number
        lines = list(old.rejections.get(number, ()))
        samples = self.shards.of(number).samples(number)
        if not samples:
            self._require_final(number, lines)
            if len(lines) == 1 and lines[0].sample is None:
                return _rejected(lines[0])
            return [Candidate(_rejected(line), n, len(lines)) for n, line in enumerate(lines)]
        kept = [(Kept.read(text), own) for text, own in _by_candidate(f"{old.name}: row {number}", samples)]
        if kept[0][0].sample is None:
            return [Candidate(_rebuilt(number, *kept[0]))]
        return self._listed(number, kept, lines)

    def _listed(
        self, row: int, kept: Sequence[tuple[Kept, Sequence[OldSample]]], lines: Sequence[Rejection]
    ) -> list[Candidate]:
        """Returns the candidates of a list, some of which may have been rejected."""
        present = {each.sample: (each, own) for each, own in kept}
        of, by_place = kept[0][0].of, {line.sample: line for line in lines}
        found, place = list[Candidate](), 0
        for n in range(of):
            if n in present:
                each, own = present[n]
                found.append(Candidate(_rebuilt(row, each, own), n, of))
                for inner in range(place, place + each.outcomes):
                    by_place.pop(inner, None)
                place += each.outcomes
                continue
            line = by_place.pop(place, None)
            if line is None:
                raise _lacking(row, "what its rejected samples were made of is not stored")
            self._require_final(row, [line])
            found.append(Candidate(_rejected(line), n, of))
            place += 1
        if by_place:
            raise _lacking(row, "what its rejected samples were made of is not stored")
        return found

    def _require_final(self, row: int, lines: Sequence[Rejection]) -> None:
        for line in lines:
            if line.reason in OF_TEXT and not self.keep_rejected:
                raise _lacking(row, f"it was rejected ({line.reason}), and what it was made of is not stored")

    def source_values(self, row: Row) -> Mapping[str, Any]:
        """Returns the values that the samples of the row have."""
        return dict(self.shards.of(row.number).source_values(row.number))

    def place(self, number: int, source_row: int, row: Row | RowRejected) -> Mapping[str, Any]:
        """Returns what the ledger has said of the place of a row, if it was rejected before."""
        lines = self.shards.old.rejections.get(number)
        return {"file": lines[0].file, "file_row": lines[0].file_row, "id": lines[0].id} if lines else {}

    def hint(self, row: Row) -> str:
        """Returns nothing: the ledger has it."""
        return ""

    def rows(self, job: ShardJob, records: Sequence[RowRecord]) -> Sequence[RowRecord]:
        """Returns the rows of the shard with the content and files that they had."""
        known = self.shards.old.rows({each.row for each in records})
        unknown = {"content": None, "columns": None, "read": None}
        return [replace(each, **known.get(each.row, unknown)) for each in records]

    def files(self, job: ShardJob, outcomes: Sequence[RowOutcome]) -> dict[str, RecordedFile]:
        """Returns the files that the rows of the shard named."""
        return self.shards.old.files(job.number)


def _rejected(line: Rejection) -> RowRejected:
    return RowRejected(line.reason, line.message)


def _lacking(row: int, what: str) -> UsageError:
    return UsageError(f"row {row}: {what}. {NEEDS_SOURCE}, or --keep-rejected to leave out what was rejected before.")


def _by_candidate(what: str, samples: Sequence[OldSample]) -> list[tuple[str, list[OldSample]]]:
    """Groups the samples of a row by the conversation or document that they were made of."""
    found: list[tuple[str, list[OldSample]]] = []
    for sample in samples:
        if sample.kept is not None:
            found.append((sample.kept, [sample]))
        elif found:
            found[-1][1].append(sample)
    if not found or not all(text for text, _ in found):
        raise UsageError(f"{what}: its conversation could not be stored as text. {NEEDS_SOURCE}.")
    return found


def _rebuilt(row: int, kept: Kept, samples: Sequence[OldSample]) -> Conversation | Document:
    views = stored_views(samples, "messages" not in kept.made)
    media = kept.media()
    if len(views) != len(media):
        raise UsageError(
            f"row {row}: the shard has {len(views)} of its {len(media)} images and videos: no sample was made of the "
            f"turns or pieces with the others. {NEEDS_SOURCE}."
        )
    return kept.rebuilt(partial(_kept_media, views))


def _kept_media(views: Sequence[Any], number: int, part: KeptPart) -> MediaPart:
    made: MediaPart
    if part.kind == "image":
        made = ImagePart(b"", **part.asked)
    else:
        made = VideoPart((b"",) if "rate" in part.asked else b"", **part.asked)
    return stored_part(made, views[number], part.file_bytes)
