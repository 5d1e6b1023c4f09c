"""Reasons for rejecting rows, as the ledger and errors of pixels name them."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reason for rejecting a row or a sample of its list. The value is the text in the ledger."""

    MALFORMED_ROW = "malformed_row"
    MISSING_COLUMN = "missing_column"
    MALFORMED_GROUND_TRUTH = "malformed_ground_truth"
    MALFORMED_MESSAGES = "malformed_messages"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    EMPTY_ANSWER = "empty_answer"
    NO_SAMPLES = "no_samples"
    MALFORMED_DOCUMENT = "malformed_document"
    EMPTY_DOCUMENT = "empty_document"
    NO_TARGETS = "no_targets"
    LOSS_WEIGHT = "loss_weight"
    IMAGE_COUNT_MISMATCH = "image_count_mismatch"
    UNSUPPORTED_CONTENT = "unsupported_content"
    PREFERENCE_DATA = "preference_data"
    UNKNOWN_KEYS = "unknown_keys"
    SPECIAL_TOKEN_TEXT = "special_token_text"
    INVALID_UNICODE = "invalid_unicode"
    TEMPLATE_ERROR = "template_error"
    MISSING_IMAGE = "missing_image"
    IMAGE_PATH = "image_path"
    IMAGE_FETCH = "image_fetch"
    NOT_AN_IMAGE = "not_an_image"
    UNSUPPORTED_IMAGE = "unsupported_image"
    TRUNCATED_IMAGE = "truncated_image"
    IMAGE_TOO_LARGE = "image_too_large"
    EMPTY_IMAGE = "empty_image"
    ASPECT_RATIO = "aspect_ratio"
    IMAGE_BOUNDS = "image_bounds"
    PIXEL_RANGE = "pixel_range"
    UNSUITABLE_ITEM = "unsuitable_item"
    OVERLONG = "overlong"
    WORKER_DIED = "worker_died"
    UNEXPECTED_ERROR = "unexpected_error"
