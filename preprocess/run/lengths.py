"""``--lengths``: what limits on the length of samples would cost, of the rows of a source. Writes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vlmdata.errors import SourceError
from vlmdata.preprocess.encode import Encoder
from vlmdata.preprocess.encode.lengths import LengthMeter, SampleLength
from vlmdata.preprocess.encode.variants import with_variants
from vlmdata.preprocess.recipes.base import Recipe, candidates_of, unexpected
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.sources.rows import Source

#: Largest numbers of tokens of the classes of images in the report; the last has all others.
_CLASSES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class LimitCost:
    """What a limit would cost.

    Attributes:
        limit: Largest number of tokens in a sample.
        samples: Samples over it, which ``--overlong reject`` loses.
        tokens: All tokens of these samples.
        targets: All targets of these samples.
        tokens_beyond: Tokens of these samples after the limit, which truncation loses.
        targets_beyond: Targets among them.
        image_tokens: Tokens of these samples that are images.
        fit_at_half: Of these samples, those within the limit at half the largest number of pixels; None if that is not
            possible.
    """

    limit: int
    samples: int
    tokens: int
    targets: int
    tokens_beyond: int
    targets_beyond: int
    image_tokens: int
    fit_at_half: int | None


@dataclass(frozen=True)
class ImageClass:
    """Images of similar size.

    Attributes:
        most_tokens: Largest number of tokens of an image in this class; None for the class of the largest.
        images: Their number.
        tokens: Their tokens.
        in_samples_over: For each limit, the number of them in samples over it.
    """

    most_tokens: int | None
    images: int
    tokens: int
    in_samples_over: tuple[int, ...]


@dataclass(frozen=True)
class LengthReport:
    """What limits would cost.

    Attributes:
        rows: Rows that were read.
        samples: Samples that were measured.
        rejects: Rejected rows and samples by reason.
        tokens: Tokens of all samples.
        targets: Targets of all samples.
        image_tokens: Tokens of all samples that are images.
        longest: Tokens of the longest sample.
        max_pixels: Largest number of pixels of an image.
        half: Half of it; None if the family or the smallest number does not allow it.
        limits: The cost of each limit, ascending.
        images: Images by size.
    """

    rows: int
    samples: int
    rejects: dict[str, int]
    tokens: int
    targets: int
    image_tokens: int
    longest: int
    max_pixels: int
    half: int | None
    limits: tuple[LimitCost, ...]
    images: tuple[ImageClass, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return asdict(self)


def measure_lengths(
    source: Source,
    recipe: Recipe,
    media: MediaLoader,
    encoder: Encoder,
    limits: Sequence[int],
    on_rows: Callable[[int], None] = lambda _: None,
) -> LengthReport:
    """Measures the samples of all rows of a source.

    Args:
        source: The source.
        recipe: Converts its rows.
        media: Loads the files that they name.
        encoder: Writes and tokenizes conversations.
        limits: Numbers of tokens, ascending.
        on_rows: Is called with the number of rows read so far.

    Raises:
        SourceError: If no row gives a sample.
    """
    meter, sums = LengthMeter(encoder), _Sums(limits)
    for count, number in enumerate(source.numbers, start=1):
        try:
            row = source.row(number)
            with media.row():
                for candidate in with_variants(
                    candidates_of(recipe, row, encoder.config.keep_columns), row, encoder.config
                ):
                    made = candidate.made
                    sums.add([made] if isinstance(made, RowRejected) else meter.measure(made))
        except RowRejected as error:
            sums.add([error])
        except Exception as error:  # of the recipe
            sums.add([unexpected(error, recipe)])
        on_rows(count)
    if not sums.samples:
        why = "; ".join(f"{reason} ({count})" for reason, count in sums.rejects.most_common())
        raise SourceError(f"--lengths: no row gives a sample: {why}. --trace 0 shows what becomes of row 0")
    return sums.report(count, encoder, meter.half)


class _Sums:
    """Sums over samples, in a few numbers for each limit."""

    def __init__(self, limits: Sequence[int]):
        self._limits = tuple(limits)
        self.samples = self._tokens = self._targets = self._image_tokens = self._longest = 0
        self.rejects = Counter[str]()
        #: For each limit: samples, tokens, targets, tokens and targets beyond, image tokens, fitting at half.
        self._over = np.zeros((len(limits), 7), np.int64)
        #: For each class of images: images, tokens, and images in samples over each limit.
        self._classes = np.zeros((len(_CLASSES) + 1, 2 + len(limits)), np.int64)

    def add(self, found: Sequence[SampleLength | RowRejected]) -> None:
        """Adds the samples of a candidate."""
        for each in found:
            if isinstance(each, RowRejected):
                self.rejects[each.reason.value] += 1
            else:
                self._add(each)

    def _add(self, sample: SampleLength) -> None:
        of_images = sum(sample.images)
        self.samples += 1
        self._tokens += sample.tokens
        self._targets += len(sample.targets)
        self._image_tokens += of_images
        self._longest = max(self._longest, sample.tokens)
        over = [sample.tokens > limit for limit in self._limits]
        for tokens in sample.images:
            self._classes[bisect_left(_CLASSES, tokens)] += [1, tokens, *over]
        for number, limit in enumerate(self._limits):
            if over[number]:
                beyond = len(sample.targets) - int(np.searchsorted(sample.targets, limit))
                fits = sample.halved is not None and sample.halved <= limit
                cut = sample.tokens - limit
                self._over[number] += [1, sample.tokens, len(sample.targets), cut, beyond, of_images, fits]

    def report(self, rows: int, encoder: Encoder, half: int | None) -> LengthReport:
        """Returns the report."""
        costs = []
        for limit, sums in zip(self._limits, self._over.tolist(), strict=True):
            samples, tokens, targets, cut, beyond, of_images, fitting = sums
            fit = None if half is None else fitting
            costs.append(LimitCost(limit, samples, tokens, targets, cut, beyond, of_images, fit))
        images = tuple(
            ImageClass(most, images, tokens, tuple(over))
            for most, (images, tokens, *over) in zip((*_CLASSES, None), self._classes.tolist(), strict=True)
            if images
        )
        _, most = encoder.config.image.bounds(encoder.config.model_family)
        return LengthReport(
            rows=rows,
            samples=self.samples,
            rejects=dict(self.rejects.most_common()),
            tokens=self._tokens,
            targets=self._targets,
            image_tokens=self._image_tokens,
            longest=self._longest,
            max_pixels=most,
            half=half,
            limits=tuple(costs),
            images=images,
        )
