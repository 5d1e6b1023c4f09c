"""The ledger: one JSON line a rejection, whatever its message holds."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlmdata.errors import DatasetFormatError
from vlmdata.format.ledger import Rejection, read_ledger
from vlmdata.reasons import Reason

# Line ends of every alphabet, quotes, escapes and halves of surrogate pairs, beside everything else.
MESSAGES = st.text(st.characters(exclude_categories=[]) | st.sampled_from('\n\r\x85\u2028\u2029"\\\x00\ud800'))
REJECTIONS = st.builds(Rejection, st.integers(0, 2**63 - 1), st.sampled_from(Reason), MESSAGES)


@settings(max_examples=60, deadline=None)
@given(rejections=st.lists(REJECTIONS, max_size=5))
@example([Rejection(1, Reason.MALFORMED_ROW, 'half a pair: \ud800, a line end: \u2028, a quote: "')])
def test_every_rejection_is_one_line_that_reads_back(tmp_path_factory, rejections):
    path = tmp_path_factory.mktemp("ledger") / "rejected.jsonl"
    path.write_bytes(b"".join(rejection.to_line() for rejection in rejections))
    assert path.read_bytes().count(b"\n") == len(rejections)
    # Two escaped halves of a surrogate pair read back as the character they make.
    expected = [Rejection(r.row, r.reason, json.loads(json.dumps(r.message))) for r in rejections]
    assert list(read_ledger(path)) == expected


def test_a_line_is_json_with_row_reason_and_message():
    line = Rejection(7, Reason.OVERLONG, "9000 tokens, naïve").to_line()
    assert line == '{"row": 7, "reason": "overlong", "message": "9000 tokens, naïve"}\n'.encode()


def test_an_empty_ledger_holds_no_rejection(tmp_path):
    (tmp_path / "rejected.jsonl").touch()
    assert list(read_ledger(tmp_path / "rejected.jsonl")) == []


GOOD = b'{"row": 1, "reason": "overlong", "message": "m"}\n'


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"row": 1, "reason": "overlong"}',
        b'{"row": "x", "reason": "overlong", "message": "m"}',
        b'{"row": 1.5, "reason": "overlong", "message": "m"}',
        b'{"row": -1, "reason": "overlong", "message": "m"}',
        b'{"row": 1e400, "reason": "overlong", "message": "m"}',
        b'{"row": 100000000000000000000, "reason": "overlong", "message": "m"}',
        b'{"row": 1, "reason": "bad weather", "message": "m"}',
        b'{"row": 1, "reason": "overlong", "message": "\xff"}',
    ],
)
def test_a_line_that_is_no_rejection_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "rejected.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(DatasetFormatError, match=r"rejected\.jsonl:2: not a ledger line"):
        list(read_ledger(path))
