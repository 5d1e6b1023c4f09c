"""The samples of a source row's candidates, encoded one candidate after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from preprocess.config import Overlong, TrainTurns
from preprocess.conversation import Conversation, Document
from preprocess.encode import EncodedSample, Encoder
from preprocess.recipes.base import Recipe
from preprocess.recipes.candidates import Candidate, unexpected
from preprocess.reject import RowRejected
from preprocess.shards.samples import Place

type _Outcome = EncodedSample | RowRejected
type _Encoded = tuple[Conversation | Document | None, Sequence[_Outcome]]


@dataclass(frozen=True, eq=False)
class EncodedCandidate:
    """What a candidate became: its samples and rejections, with their places in the list of the row."""

    made: Conversation | Document | None  # None if the candidate was rejected whole
    outcomes: Sequence[tuple[Place, _Outcome]]


def encoded_candidates(candidates: Sequence[Candidate], recipe: Recipe, encoder: Encoder) -> Iterator[EncodedCandidate]:
    """Yields what each candidate of a row became, in order."""
    config, listed = encoder.config, candidates[0].sample is not None
    each_turn = config.train_turns is TrainTurns.EACH
    # One candidate after another, as each holds its images.
    encoded: Iterable[_Encoded] = (_encode(candidate, recipe, encoder) for candidate in candidates)
    if config.overlong == Overlong.SPLIT or (each_turn and not listed):
        # How many samples documents and turns give is known only after encoding all of them.
        encoded = list(encoded)
        of = sum(len(outcomes) for _, outcomes in encoded)
        listed = listed or of > 1
    else:
        # The turns of a list bound its length.
        of = sum(map(_turns, candidates)) if each_turn else len(candidates)
    numbers = count()
    for made, outcomes in encoded:
        yield EncodedCandidate(made, [(Place(next(numbers) if listed else None, of), each) for each in outcomes])


def attempted[T](make: Callable[[], T], recipe: Recipe) -> T | RowRejected:
    """Returns a result, or the rejection. An unexpected error rejects, so that one row does not end the run."""
    try:
        return make()
    except RowRejected as error:
        return error
    except MemoryError:
        raise
    except Exception as error:
        return unexpected(error, recipe)


def _encode(candidate: Candidate, recipe: Recipe, encoder: Encoder) -> _Encoded:
    if isinstance(candidate.made, RowRejected):
        return None, [candidate.made]
    outcomes = attempted(partial(encoder.encode_all, candidate.made), recipe)
    return (None, [outcomes]) if isinstance(outcomes, RowRejected) else (candidate.made, outcomes)


def _turns(candidate: Candidate) -> int:
    """Returns the most samples that a candidate gives with one for each turn."""
    turns = candidate.made.messages if isinstance(candidate.made, Conversation) else ()
    return max(1, sum(message.role == "assistant" for message in turns))
