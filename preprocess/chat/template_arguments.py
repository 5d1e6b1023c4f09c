"""Arguments of the chat template that a run or a row gives, such as ``enable_thinking``.

``apply_chat_template`` passes them to the template, which ignores a name that it does not read. Such a name would be a
setting without effect, so it is refused here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from vlmdata.preprocess import json_text
from vlmdata.preprocess.chat.bounded import MAKING
from vlmdata.preprocess.reject import excerpt

#: What transformers gives every template, besides the messages.
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
#: Functions and tokens that transformers makes known to templates.
_BUILT_IN = re.compile(r"raise_exception|strftime_now|\w+_token(s|_id)?")
#: transformers' own tag around what the assistant says.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def require_arguments(arguments: Mapping[str, Any], templates: tuple[str, ...]) -> None:
    """Checks that a tokenizer's templates read these arguments.

    Args:
        arguments: Values by name.
        templates: Their texts.

    Raises:
        ValueError: If a name is one of ``apply_chat_template`` itself, or the template does not read it.
    """
    if not arguments:
        return
    if taken := sorted(arguments.keys() & _of_transformers()):
        raise ValueError(
            f"{taken[0]} is set by vlmdata or transformers; only arguments that the template itself reads can be given"
        )
    known = names_read(templates)
    if known is not None and (unread := sorted(arguments.keys() - known.read)):
        has = f"it reads {', '.join(sorted(known.only_read))}" if known.only_read else "it reads none"
        raise ValueError(f"the chat template reads no {unread[0]}, which would have no effect; {has}")


@dataclass(frozen=True)
class TemplateNames:
    """Names that templates read and transformers does not give."""

    read: frozenset[str]  # all that may be read before they are set
    only_read: frozenset[str]  # those of them that are never set: surely arguments


@cache
def names_read(templates: tuple[str, ...]) -> TemplateNames | None:
    """Returns the names that templates read; None if one cannot be parsed."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    # Else constants such as 9**9**9 would be computed here.
    environment.intercepted_binops = MAKING
    environment.filters = dict.fromkeys(environment.filters, _not_computed)
    try:
        parsed = [environment.parse(_GENERATION.sub("", template)) for template in templates]
    except TemplateSyntaxError:  # an extension that is not known here
        return None
    read = set().union(*(_Reads(each).found for each in parsed)) - environment.globals.keys() - _GIVEN
    read = {name for name in read if not _BUILT_IN.fullmatch(name)}
    names = [name for each in parsed for name in each.find_all(nodes.Name)]
    return TemplateNames(frozenset(read), frozenset(read - {name.name for name in names if name.ctx != "load"}))


def _not_computed(*_: Any, **__: Any) -> Any:
    raise ValueError


class _Reads:
    """The names that a template may read before it sets them itself: values of arguments."""

    def __init__(self, template: Any):
        from jinja2 import nodes

        self.found = set[str]()
        self._walk(template.body, {macro.name for macro in template.find_all(nodes.Macro)})

    def _walk(self, body: Iterable[Any], bound: set[str]) -> set[str]:
        """Looks at statements in order; returns the names that are set after them, in any case."""
        for node in body:
            bound = self._statement(node, bound)
        return bound

    def _statement(self, node: Any, bound: set[str]) -> set[str]:
        from jinja2 import nodes

        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            for value in node.iter_child_nodes(exclude=("target",)):
                self._statement(value, bound)
            return bound | _stored(node.target)
        if isinstance(node, nodes.If):
            self._statement(node.test, bound)
            branches: list[list[Any]] = [node.body, *([each] for each in node.elif_), node.else_]
            return bound | set.intersection(*(self._walk(branch, bound) for branch in branches))
        if isinstance(node, nodes.For):
            self._statement(node.iter, bound)
            within = bound | _stored(node.target) | {"loop"}
            self._walk([*([node.test] if node.test else []), *node.body], within)
            self._walk(node.else_, bound)
            return bound
        if isinstance(node, nodes.Macro):
            self._walk([*node.defaults, *node.body], bound | {arg.name for arg in node.args} | {"caller", "varargs"})
            return bound
        if isinstance(node, nodes.Name):
            self.found |= {node.name} - bound
            return bound
        self._walk(node.iter_child_nodes(), bound | _stored(node))
        return bound


def _stored(node: Any) -> set[str]:
    from jinja2 import nodes

    names = [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)
    return {name.name for name in names if name.ctx != "load"}


@cache
def _of_transformers() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(parameters) | _GIVEN


def parse_arguments(text: str) -> dict[str, Any]:
    """Reads arguments from a JSON object.

    Raises:
        ValueError: If the text is no JSON object.
    """
    try:
        found = json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{excerpt(text)} is not JSON: {error}; write {{"enable_thinking": false}}') from error
    if not isinstance(found, dict):
        raise ValueError(f'{excerpt(text)} is no JSON object; write {{"enable_thinking": false}}')
    return found
