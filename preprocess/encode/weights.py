"""Loss weights of assistant turns and documents."""

from __future__ import annotations

import numpy as np

from preprocess.config import TrainTurns
from preprocess.conversation import Conversation, Document
from preprocess.reject import RowRejected
from vlmdata.reasons import Reason

#: Weights other than 0 are within these bounds. Gradients are multiplied by the weights in the network and divided by
#: their sum at the end of the step. The bounds leave 30 decimal places on either side in float32 and bfloat16 (1e-38 to
#: 3e38). Only ratios of weights matter, so this excludes no sensible weights.
LEAST, MOST = 1e-8, 1e8


def turn_weights(conversation: Conversation, train_turns: TrainTurns) -> tuple[float, ...]:
    """Returns the target weight of each assistant turn; 0 if the turn is not learned.

    Returns:
        One float32 value per assistant turn: weight of the sample x weight of the turn, or 0.

    Raises:
        RowRejected: NO_TARGETS if no turn is learned; LOSS_WEIGHT if a weight is out of bounds.
    """
    answers = conversation.answers
    factor = float(conversation.loss_weight)
    weights = []
    for number, message in enumerate(answers, start=1):
        chosen = train_turns is TrainTurns.ALL or number == len(answers)
        own = 1.0 if message.loss_weight is None else float(message.loss_weight)
        weight = factor * own if chosen else 0.0
        meant = chosen and factor > 0 and own > 0  # a product may round to 0
        if meant and not LEAST <= weight <= MOST:
            raise RowRejected(
                Reason.LOSS_WEIGHT,
                f"the loss weight of assistant turn {number} of {len(answers)} is {weight:g} ({factor:g} of the sample "
                f"x {own:g} of the turn); it must be 0 or from {LEAST:g} to {MOST:g}. Only ratios of weights matter: "
                "multiply all of them by the same number",
            )
        weights.append(float(np.float32(weight)))
    if not any(weights):
        raise RowRejected(Reason.NO_TARGETS, _nothing_to_learn(conversation, len(answers), train_turns))
    return tuple(weights)


def document_weight(document: Document) -> float:
    """Returns the target weight of a document, as a float32 value.

    Raises:
        RowRejected: NO_TARGETS if the weight is 0; LOSS_WEIGHT if it is out of bounds.
    """
    weight = float(document.loss_weight)
    if weight == 0:
        raise RowRejected(Reason.NO_TARGETS, "nothing to learn: the loss weight of the document is 0")
    if not LEAST <= weight <= MOST:
        raise RowRejected(
            Reason.LOSS_WEIGHT,
            f"the loss weight of the document is {weight:g}; it must be 0 or from {LEAST:g} to {MOST:g}. Only ratios "
            "of weights matter: multiply all of them by the same number",
        )
    return float(np.float32(weight))


def _nothing_to_learn(conversation: Conversation, answers: int, train_turns: TrainTurns) -> str:
    if conversation.loss_weight == 0:
        return "nothing to learn: the loss weight of the sample is 0"
    if train_turns is TrainTurns.LAST:
        return "nothing to learn: the loss weight of the last assistant turn is 0, and only that turn is trained"
    if answers == 1:
        return "nothing to learn: the loss weight of the only assistant turn is 0"
    return f"nothing to learn: the loss weights of all {answers} assistant turns are 0"
