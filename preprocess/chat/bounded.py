"""Renders chat templates within bounds: a template is a program of whoever made the tokenizer, and may never end.

Jinja's sandbox keeps a template from attributes and files, but not from loops in loops, macros that call each other, or
``'x' * 10**10``. So templates are compiled in transformers' own environment with counters added: of passes of loops,
calls and operations, as steps, and of what these make, as characters. A row has the same number of steps in each
process, so it is rejected everywhere or nowhere. Time is a second bound, for steps that are long.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from threading import local
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Steps of one rendering, and more for each text of what is rendered. Published templates take 10 to 100 for a turn.
MOST_STEPS, STEPS_PER_TEXT = 100_000, 1_000
#: Characters and entries of lists that one rendering makes, also those it drops. A turn makes a few times its length.
MOST_MADE = 1 << 28
#: Seconds of CPU time of one rendering.
MOST_SECONDS = 20.0
_TICK = "vlmdata_tick"
#: Filters and methods of texts whose result may be far longer than their arguments.
_MULTIPLYING = frozenset(
    {
        *("do_replace", "do_format", "do_center", "do_indent", "do_batch", "do_slice", "do_wordwrap", "sync_do_slice"),
        *("tojson", "do_round", "sync_do_join", "do_join", "sync_do_sum", "replace", "join", "format", "format_map"),
        *("center", "ljust", "rjust", "zfill", "expandtabs"),
    }
)
#: Operators that may make far more than they take.
MAKING = frozenset({"*", "**", "%", "+"})
#: A width in a format: ``%9999999999d``.
_WIDTH = re.compile(r"[%:.<>=^0-9-][0-9]{7}")


class TemplateTooLong(SecurityError):
    """A template does not end within its bounds."""


class _Budget(local):
    """What is left for the rendering of this thread."""

    given = steps = made = 0
    end = 0.0

    def begin(self, texts: int) -> None:
        self.given = self.steps = MOST_STEPS + STEPS_PER_TEXT * texts
        self.made, self.end = MOST_MADE, time.thread_time() + MOST_SECONDS

    def step(self) -> None:
        """Counts a step.

        Raises:
            TemplateTooLong: If there were too many, or they took too long.
        """
        self.steps -= 1
        if self.steps < 0:
            raise TemplateTooLong(f"it does not end within {self.given:,} steps: loops in loops, or macros that recur")
        if self.steps % 64 == 0 and time.thread_time() > self.end:
            raise TemplateTooLong(f"it does not end within {MOST_SECONDS:g} s of CPU time")

    def make(self, size: int) -> None:
        """Counts characters or entries that are about to be made, or were.

        Raises:
            TemplateTooLong: If there were too many.
        """
        self.made -= size
        if self.made < 0:
            raise TemplateTooLong(f"it makes more than {MOST_MADE:,} characters, most of which it drops or repeats")


_budget = _Budget()


def _size(value: object) -> int:
    """Returns characters of a text, and 16 for each entry of a list, about what an entry takes."""
    return len(value) if isinstance(value, str | bytes) else 16 * len(value) if isinstance(value, list | tuple) else 0


def _require_small(values: Iterable[object]) -> None:
    """Counts what functions may make of their arguments before they make it.

    These are numbers, as of ``'x'.ljust(10**10)`` and ``'%9999999999d'``, and texts that are put in many places, as by
    ``replace`` and ``join``.

    Raises:
        TemplateTooLong: If that is too much.
    """
    sizes = [0, 0]
    for value in values:
        if isinstance(value, int):
            _budget.make(min(abs(value), MOST_MADE + 1))
        elif isinstance(value, str) and _WIDTH.search(value):
            raise TemplateTooLong("it formats text to a width of more than a million characters")
        sizes.append(_size(value))
    first, second = sorted(sizes)[-2:]
    if first * second > MOST_MADE:
        raise TemplateTooLong(f"it combines texts of {first:,} and {second:,} characters")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a function for joining texts that counts what it makes."""

    @wraps(function)  # with jinja's marks of what it is passed
    def counted(*args: Any, **kwargs: Any) -> Any:
        _budget.step()
        if function.__name__ in _MULTIPLYING:
            _require_small((*args, *kwargs.values()))
        made = function(*args, **kwargs)
        _budget.make(_size(made))
        return made

    return counted


class _Bounded(ImmutableSandboxedEnvironment):
    """transformers' environment with counters."""

    intercepted_binops = MAKING

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for each in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.EnvironmentAttribute(_TICK), [], [], None, None)
            vars(each)["body"].insert(0, nodes.ExprStmt(tick, lineno=each.lineno))
        return tree

    @staticmethod
    def vlmdata_tick() -> None:
        """Counts a pass of a loop, or a call of a macro; what it is called for is counted by :meth:`call`."""

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.step()
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # jinja wraps str.format
        if isinstance(text, str) and getattr(__obj, "__name__", "") in _MULTIPLYING:
            _require_small((text, *args, *kwargs.values()))
        made = super().call(__context, __obj, *args, **kwargs)
        _budget.make(_size(made))
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.step()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or (numbers and max(abs(left), abs(right)) > 1 << 64):
            raise TemplateTooLong(f"it computes {str(left)[:20]} {operator} {str(right)[:20]}")
        if operator == "*" and not numbers:
            _budget.make(max(_size(left), _size(right)) * max([0, *(n for n in (left, right) if isinstance(n, int))]))
        if operator == "%" and isinstance(left, str):
            _require_small((left, *(right if isinstance(right, tuple) else (right,))))
        made = super().call_binop(context, operator, left, right)
        _budget.make(_size(made))
        return made


@lru_cache(maxsize=32)
def _compiled(text: str) -> Template:
    """Compiles a template as transformers does, with counters."""
    from transformers.utils import chat_template_utils

    made = chat_template_utils._cached_compile_jinja_template("").environment  # new with each call
    assert type(made) is ImmutableSandboxedEnvironment
    made.__class__ = _Bounded
    made.optimized = False  # constant expressions are computed when they are rendered, not when they are compiled
    made.globals.pop("lipsum")  # random text
    made.filters = {name: _counted(each) for name, each in made.filters.items()}
    template = made.from_string(text)
    for name in ("str_join", "markup_join"):
        template.root_render_func.__globals__[name] = _counted(template.root_render_func.__globals__[name])
    return template


@contextmanager
def bounded(texts: int) -> Iterator[None]:
    """Within the block, transformers renders one chat template in this process within bounds.

    Args:
        texts: Number of texts in what is rendered.

    Raises:
        TemplateTooLong: If the template in the block does not end within them.
    """
    from transformers.utils import chat_template_utils

    before = chat_template_utils._compile_jinja_template
    chat_template_utils._compile_jinja_template = _compiled
    try:
        _budget.begin(texts)
        yield
    finally:
        chat_template_utils._compile_jinja_template = before


def not_ending(tokenizer: Any) -> str:
    """Says why the template of a tokenizer of transformers does not end, for two short turns; empty if it does."""
    turns = [{"role": role, "content": "Hello."} for role in ("user", "assistant")]
    try:
        with bounded(len(turns)):
            tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateTooLong as error:
        return str(error)
    except Exception:  # it may want other turns
        return ""
    return ""
