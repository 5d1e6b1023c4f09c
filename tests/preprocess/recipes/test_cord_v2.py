"""CORD-V2 rows: Donut's token form, the choice among several parses, and every reason to reject."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import encoded_image
from vlmdata.preprocess.conversation import Conversation, ImagePart
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recipes.cord_v2 import Target, donut_tokens
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

IMAGE = encoded_image()
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
KEYS = st.sampled_from(["menu", "nm", "price", "text_sequence", "a", "A", "é", ""]) | st.text(max_size=3)
JSON = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


def convert(ground_truth: Any, number: int = 0, **config: Any) -> Conversation:
    text = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)
    values = {"image": {"bytes": IMAGE, "path": None}, "ground_truth": text}
    return load_recipe("cord_v2", config)(Row(number, values))


def answer_to(ground_truth: Any, number: int = 0, **config: Any) -> str:
    return convert(ground_truth, number, **config).messages[-1].text


def json2token_of_donut(obj: Any) -> str:
    """The published algorithm, step by step on a stack instead of by recursion."""
    output: list[str] = []
    todo: list[Any] = [("value", obj)]
    while todo:
        kind, item = todo.pop()
        if kind == "text":
            output.append(item)
        elif isinstance(item, dict) and list(item) == ["text_sequence"]:
            output.append(str(item["text_sequence"]))
        elif isinstance(item, dict):
            # Keys in descending order come out first, so they are pushed in ascending order, closing tags before.
            for key in sorted(item):
                todo += [("text", f"</s_{key}>"), ("value", item[key]), ("text", f"<s_{key}>")]
        elif isinstance(item, list):
            for position, element in reversed(list(enumerate(item))):
                todo.append(("value", element))
                if position:
                    todo.append(("text", "<sep/>"))
        else:
            output.append(str(item))
    return "".join(output)


class TestDonutTokens:
    @given(value=JSON)
    def test_equal_the_published_algorithm(self, value):
        assert donut_tokens(value) == json2token_of_donut(value)

    @pytest.mark.parametrize(
        ("value", "tokens"),
        [
            ({"a": "1", "b": "2"}, "<s_b>2</s_b><s_a>1</s_a>"),
            ({"menu": [{"nm": "TEA"}, {"nm": "CAKE"}]}, "<s_menu><s_nm>TEA</s_nm><sep/><s_nm>CAKE</s_nm></s_menu>"),
            ({"x": {"y": {"z": "deep"}}}, "<s_x><s_y><s_z>deep</s_z></s_y></s_x>"),
            ({"text_sequence": "read me"}, "read me"),
            ({"text_sequence": "one", "b": "of two"}, "<s_text_sequence>one</s_text_sequence><s_b>of two</s_b>"),
            ({"a": {"text_sequence": "inner"}}, "<s_a>inner</s_a>"),
            ({"n": 1, "f": 1.5, "t": True, "u": None}, "<s_u>None</s_u><s_t>True</s_t><s_n>1</s_n><s_f>1.5</s_f>"),
            ({"l": []}, "<s_l></s_l>"),
            (["a", ["b", "c"]], "a<sep/>b<sep/>c"),
            ({"B": "1", "a": "2"}, "<s_a>2</s_a><s_B>1</s_B>"),
        ],
    )
    def test_examples(self, value, tokens):
        assert donut_tokens(value) == tokens


class TestConversation:
    def test_is_the_image_then_the_prompt_then_the_answer(self):
        conversation = convert({"gt_parse": {"a": "1"}}, prompt="What does it say?")
        user, assistant = conversation.messages
        assert (user.role, assistant.role) == ("user", "assistant")
        assert isinstance(user.parts[0], ImagePart)
        assert user.parts[0].data == IMAGE
        assert user.text == "What does it say?"
        assert assistant.text == "<s_a>1</s_a>"

    def test_default_prompt(self):
        assert convert({"gt_parse": {"a": "1"}}).messages[0].text == "Describe this image."

    def test_json_target_is_the_parse_as_it_stands(self):
        parse = {"b": [1, None, "ü"], "a": {"c": True}}
        assert answer_to({"gt_parse": parse}, target=Target.JSON) == '{"b": [1, null, "ü"], "a": {"c": true}}'

    @pytest.mark.parametrize("row", [{"bytes": IMAGE, "path": "x.png"}, {"bytes": IMAGE}, IMAGE])
    def test_forms_of_the_image_column(self, row):
        values = {"image": row, "ground_truth": '{"gt_parse": {"a": 1}}'}
        assert [image.data for image in load_recipe("cord_v2")(Row(0, values)).images] == [IMAGE]

    def test_ground_truth_may_be_an_object_instead_of_text(self):
        values = {"image": IMAGE, "ground_truth": {"gt_parse": {"a": "1"}}}
        assert load_recipe("cord_v2")(Row(0, values)).messages[1].text == "<s_a>1</s_a>"


class TestSeveralParses:
    @staticmethod
    def chosen(row: int) -> int:
        """Which of three parses is taken."""
        parses = [{"text_sequence": str(n)} for n in range(3)]
        return int(answer_to({"gt_parses": parses}, row))

    @given(row=st.integers(0, 10**9))
    def test_the_choice_depends_on_the_row_alone(self, row):
        assert self.chosen(row) == self.chosen(row)
        assert self.chosen(row) in range(3)

    def test_the_choice_of_known_rows_never_changes(self):
        # Another choice would be another dataset for the same configuration.
        assert [self.chosen(row) for row in range(12)] == [0, 0, 1, 2, 1, 2, 0, 0, 0, 0, 1, 1]

    def test_every_parse_gets_its_share(self):
        counts = Counter(self.chosen(row) for row in range(600))
        assert len(counts) == 3
        assert min(counts.values()) > 150

    def test_they_come_before_a_single_parse(self):
        assert answer_to({"gt_parse": {"a": "single"}, "gt_parses": [{"a": "several"}]}) == "<s_a>several</s_a>"

    def test_null_is_none(self):
        assert answer_to({"gt_parse": {"a": "single"}, "gt_parses": None}) == "<s_a>single</s_a>"


class TestRejections:
    @staticmethod
    def rejected(values: dict[str, Any], **config: Any) -> RowRejected:
        with pytest.raises(RowRejected) as rejection:
            load_recipe("cord_v2", config)(Row(0, values))
        return rejection.value

    @pytest.mark.parametrize(
        ("ground_truth", "reason", "message"),
        [
            ("not JSON", Reason.MALFORMED_GROUND_TRUTH, "ground_truth is not JSON: .*: not JSON"),
            ('{"gt_parse": ', Reason.MALFORMED_GROUND_TRUTH, "ground_truth is not JSON"),
            ("", Reason.MALFORMED_GROUND_TRUTH, "ground_truth is not JSON"),
            pytest.param("[" * 200_000, Reason.MALFORMED_GROUND_TRUTH, "not JSON: maximum recursion", id="too deep"),
            ("[]", Reason.MALFORMED_GROUND_TRUTH, r"not a JSON object: \[\]"),
            (None, Reason.MALFORMED_GROUND_TRUTH, "not a JSON object: None"),
            (7, Reason.MALFORMED_GROUND_TRUTH, "not a JSON object: 7"),
            ("{}", Reason.MALFORMED_GROUND_TRUTH, "neither gt_parse nor gt_parses, but no keys"),
            ('{"meta": 1}', Reason.MALFORMED_GROUND_TRUTH, "neither gt_parse nor gt_parses, but meta"),
            ('{"gt_parse": null}', Reason.MALFORMED_GROUND_TRUTH, "neither gt_parse nor gt_parses"),
            ('{"gt_parses": []}', Reason.MALFORMED_GROUND_TRUTH, r"gt_parses is not a list of parses: \[\]"),
            ('{"gt_parses": {"a": 1}}', Reason.MALFORMED_GROUND_TRUTH, "gt_parses is not a list of parses"),
            ('{"gt_parse": {}}', Reason.EMPTY_ANSWER, "the ground truth is empty: {}"),
            ('{"gt_parse": []}', Reason.EMPTY_ANSWER, "empty"),
            ('{"gt_parse": ""}', Reason.EMPTY_ANSWER, "empty"),
            ('{"gt_parse": {"text_sequence": " "}}', Reason.EMPTY_ANSWER, "empty"),
            ('{"gt_parses": [{}]}', Reason.EMPTY_ANSWER, "empty"),
        ],
    )
    def test_ground_truth(self, ground_truth, reason, message):
        found = self.rejected({"image": IMAGE, "ground_truth": ground_truth})
        assert found.reason is reason
        assert re.search(message, found.message)

    def test_missing_column_tells_which_there_are(self):
        found = self.rejected({"image": IMAGE, "label": 3})
        assert found.reason is Reason.MISSING_COLUMN
        assert found.message == "no column ground_truth; columns are image, label"

    @pytest.mark.parametrize("image", [None, {"bytes": None, "path": None}, "", {}])
    def test_missing_image(self, image):
        found = self.rejected({"image": image, "ground_truth": '{"gt_parse": {"a": 1}}'})
        assert found.reason is Reason.MISSING_IMAGE
        assert found.message.startswith("image: not an image")

    def test_an_empty_parse_is_rejected_before_its_image_is_read(self):
        assert self.rejected({"image": None, "ground_truth": '{"gt_parse": {}}'}).reason is Reason.EMPTY_ANSWER
