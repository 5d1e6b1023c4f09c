"""Tokenizer folders of a stranger: their code never runs and nothing asks for it, and their templates end."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.chat_rows import mixed_rows, write_jsonl
from vlmdata.errors import SourceError
from vlmdata.integrations.check.models import read_config
from vlmdata.preprocess.chat import bounded
from vlmdata.preprocess.chat.bounded import TemplateTooLong, not_ending
from vlmdata.preprocess.chat.template_arguments import names_read
from vlmdata.preprocess.chat.tokenizer import EMBEDDED_TOKENIZER, load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
DOUBLED = "{% set a = 'abcdefgh' %}" + "{% set a = a OP a %}" * 40 + "{{ a | length }}"
TURNS = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "small loops": "{% for a in range(99) %}" * 12 + "{{ a }}" + "{% endfor %}" * 12,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "times": "{{ ('x' * 9999999999) | length }}",
    "times times": "{% set a = 'x' * 9999999 %}{{ (a * 9999999) | length }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "joined": DOUBLED.replace("OP", "~"),
    "added": DOUBLED.replace("OP", "+"),
    "filter": "{{ 'x' | center(9999999999) | length }}",
    "format filter": "{{ '%9999999999d' | format(1) | length }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "star": "{{ '%*d' % (9999999999, 1) }}",
    "method": "{{ 'x'.ljust(9999999999) | length }}",
    "format": "{{ '{:>9999999999}'.format('x') | length }}",
    "format of a number": "{{ '{:>{w}}'.format('x', w=9999999999) | length }}",
    "replace": "{% set a = 'x' * 99999 %}{{ a | replace('x', a) | length }}",
    "replace of a text": "{% set a = 'x' * 99999 %}{{ a.replace('x', a) | length }}",
    "join": "{% set a = 'x' * 99999 %}{{ a | join(a) | length }}",
    "json": "{{ [1] | tojson(indent=999999999) | length }}",
    "lists": "{% set l = range(99999) | list %}{% for i in range(99999) %}{% set m = l * 99 %}{% endfor %}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded tokenizer in a folder of its own."""
    return Path(shutil.copytree(EMBEDDED_TOKENIZER, tmp_path / "tokenizer"))


class TestTemplates:
    @pytest.mark.parametrize("name", ENDLESS)
    def test_one_that_does_not_end_is_stopped(self, tokenizer, name):
        with pytest.raises(TemplateTooLong) as stopped, bounded.bounded(2):
            tokenizer.hf.apply_chat_template(TURNS, tokenize=False, chat_template=ENDLESS[name])
        assert "CPU time" not in str(stopped.value), "the same on every machine"
        assert names_read((ENDLESS[name],)) is not None  # which must not compute constants either

    def test_others_give_what_they_give_without_bounds(self, tokenizer):
        texts = (tokenizer.hf.chat_template, "{{ 3 * 4 }}{{ 'a' * 3 }}{{ '%d' % 5 }}{{ [1] + [2] }}{{ 'a' ~ 1 ~ 'b' }}")
        macro = "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{% call m(1) %}!{% endcall %}{{ m(2) }}"
        loop = "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m | tojson }}{% else %}none{% endfor %}"
        for text in (*texts, macro, loop, "{{ messages | map(attribute='role') | join(', ') }}{{ 'x'.center(9) }}"):
            wanted = tokenizer.hf.apply_chat_template(TURNS, tokenize=False, chat_template=text)
            with bounded.bounded(2):
                assert tokenizer.hf.apply_chat_template(TURNS, tokenize=False, chat_template=text) == wanted

    def test_a_tokenizer_with_one_is_refused(self, vlmdata, folder, tmp_path):
        (folder / "chat_template.jinja").write_text(ENDLESS["small loops"])
        with pytest.raises(SourceError, match="its chat template is stopped: it does not end within"):
            load_tokenizer(str(folder))
        source = write_jsonl(tmp_path / "rows.jsonl", mixed_rows()[:2])
        ended = vlmdata("preprocess", source, "--tokenizer", folder, "--out", tmp_path / "out")
        assert (ended.code, "chat template is stopped" in ended.said) == (2, True), ended.said

    def test_a_row_with_which_it_does_not_end_is_rejected(self, vlmdata, folder, tmp_path):
        template = (folder / "chat_template.jinja").read_text()
        loops = "{% for m in messages if m.content == 'loop' %}" + ENDLESS["loops"] + "{% endfor %}"
        (folder / "chat_template.jinja").write_text(loops + template)
        assert not not_ending(load_tokenizer(str(folder)).hf)
        rows = [{"messages": [{**TURNS[0], "content": text}, TURNS[1]]} for text in ("loop", "end")]
        source, out = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out"
        ended = vlmdata("preprocess", source, "--tokenizer", folder, "--out", out, "--max-reject-rate", "1")
        assert ended.code == 0, ended.said
        (line,) = map(json.loads, (out / "rejected.jsonl").read_text().splitlines())
        assert (line["row"], line["reason"]) == (0, "template_error")
        assert "the chat template is stopped: it does not end within" in line["message"]


class TestCode:
    @pytest.mark.parametrize("known", [True, False])
    def test_of_a_folder_is_never_run_nor_asked_for(self, folder, tmp_path, monkeypatch, known):
        ran = tmp_path / "ran"
        (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass T: pass\n")
        path = folder / "tokenizer_config.json"
        fields = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": [None, "evil.T"]}}
        if not known:
            fields["tokenizer_class"] = "T"
        path.write_text(json.dumps(fields))
        asked = io.StringIO("y\n" * 9)
        monkeypatch.setattr(sys, "stdin", asked)
        if known:
            load_tokenizer(str(folder))
        else:
            with pytest.raises(SourceError, match="code of its own, which is never run"):
                load_tokenizer(str(folder))
        (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.T"}}))
        with pytest.raises(ValueError, match="cannot be read"):
            read_config(str(folder))
        assert not ran.exists()
        assert asked.tell() == 0

    def test_each_call_that_loads_refuses_it(self):
        calls = [
            (path, node)
            for package in ("vlmdata", "preprocess", "model")
            for path in (ROOT / package).rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "from_pretrained"
        ]
        assert len(calls) >= 5
        for path, call in calls:
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            # Code of a processor runs if the command's user gives --trust-remote-code; no dataset can.
            allowed = "trust_remote_code" if path.parent.name == "processor" else "False"
            assert given.get("trust_remote_code") == allowed, f"{path}:{call.lineno}"
