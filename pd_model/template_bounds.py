"""A Jinja sandbox in which a template cannot run, or grow its text, without end.

Every turn of a loop and every call counts as a step; a render has a budget of steps and one of characters. This
bounds templates that loop over huge input or over each other. It does not bound the memory of a template that was
written to exhaust it: whoever serves a model trusts its template that far.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET = "render_budget"
"""The variable that carries a render's Budget."""

MAX_REPEATED = 100_000
"""Longest text or list that `*` may make."""


class Budget:
    """What is left of a render's steps and characters. Raises TemplateRuntimeError when either is used up."""

    def __init__(self, num_steps: int, num_characters: int) -> None:
        self._steps_left = num_steps
        self._characters_left = num_characters

    def take_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise jinja2.TemplateRuntimeError("the chat template loops too often")

    def take_characters(self, num_characters: int) -> None:
        self._characters_left -= num_characters
        if self._characters_left < 0:
            raise jinja2.TemplateRuntimeError("the chat template gives too long a text")


class _Counted:
    """An iterable whose every item takes a step."""

    def __init__(self, items: Iterable[Any], budget: Budget) -> None:
        self._items = items
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.take_step()
            yield item


class _CountedCollection(_Counted):
    """The same for what knows its length, which `loop.length` and `loop.last` ask for."""

    def __init__(self, items: Collection[Any], budget: Budget) -> None:
        super().__init__(items, budget)
        self._num_items = len(items)

    def __len__(self) -> int:
        return self._num_items


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    budget: Budget = context[BUDGET]
    if isinstance(items, Collection):
        return _CountedCollection(items, budget)
    return _Counted(items, budget)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose `render_bounded` keeps to a Budget. Set up as Hugging Face sets up chat templates."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters["counted"] = _counted
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]  # makes any amount of text in one step

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __context[BUDGET].take_step()
        return super().call(__context, __obj, *args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:  # Jinja's prints as ""
        raise jinja2.exceptions.SecurityError(f"the chat template may not use {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateRuntimeError("the chat template uses **, which is not allowed")
        for items, times in ((left, right), (right, left)):
            if isinstance(items, Collection) and isinstance(times, int) and len(items) * times > MAX_REPEATED:
                raise jinja2.TemplateRuntimeError("the chat template repeats a text too often")
        return super().call_binop(context, operator, left, right)


def render_bounded(template: jinja2.Template, variables: dict[str, Any], budget: Budget) -> str:
    """The template's text. Raises TemplateRuntimeError when the budget is used up, else what the template raises."""
    pieces: list[str] = []
    for piece in template.generate({**variables, BUDGET: budget}):
        budget.take_characters(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    """What templates call to refuse messages that they have no form for."""
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own would escape for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
