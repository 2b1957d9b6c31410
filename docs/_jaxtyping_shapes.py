"""Keeps jaxtyping's shapes as they are written: `Float[Array, "b t n h"]`, `Int[Array, "b"]`.

Griffe takes a string in an annotation for a forward reference. A shape of one axis then becomes a
name without quotes, and one of several axes a string in other quotes than the source's.
"""

from typing import Any

import griffe


def _quote(expression: Any) -> None:
    """Puts double quotes around every shape in an annotation, in place."""
    if not isinstance(expression, griffe.Expr):
        return
    for part in expression.iterate(flat=False):
        if part is not expression:  # a name consists of itself
            _quote(part)
    if not isinstance(expression, griffe.ExprSubscript):
        return
    kind, inside = expression.left, expression.slice
    if not isinstance(kind, griffe.Expr) or not isinstance(inside, griffe.ExprTuple):
        return
    if kind.canonical_path.startswith("jaxtyping.") and len(inside.elements) == 2:
        array, shape = inside.elements
        inside.elements = [array, f'"{str(shape).strip("'\"").strip()}"']


class JaxtypingShapes(griffe.Extension):
    """Goes over the annotations of functions and attributes as they are read."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        for parameter in func.parameters:
            _quote(parameter.annotation)
        _quote(func.returns)

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        _quote(attr.annotation)
