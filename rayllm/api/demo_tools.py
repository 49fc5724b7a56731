"""The tools of `--tool-server demo`: harmless ones, to see how a model calls tools."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]
Number = int | float

_LONGEST = 200
_MOST_BITS = 4096

DEMO_TOOLS: tuple[tuple[str, str, Json], ...] = (
    (
        "calculate",
        "The value of an arithmetic expression, such as (2 + 3) * 4 ** 2",
        {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    ),
    ("current_time", "The date and the time of day in UTC", {"type": "object", "properties": {}}),
)
"""Names, descriptions, schemas."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def run_demo_tool(name: str, arguments: Json) -> str:
    """What a tool gives.

    Raises:
        ValueError: there is no such tool, or its arguments are wrong.
    """
    if name == "current_time":
        return datetime.now(UTC).isoformat(timespec="seconds")
    if name != "calculate":
        raise ValueError(f"there is no tool {name[:60]!r}")
    expression = arguments.get("expression")
    if not isinstance(expression, str) or len(expression) > _LONGEST:
        raise ValueError(f"expression must be a text of at most {_LONGEST} characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"the expression cannot be computed: {error}") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            return _applied(op, _value(left), _value(right))
    raise ValueError("the expression may hold numbers, parentheses and + - * / // % ** only")


def _applied(op: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(op, ast.Pow) and abs(right) * math.log2(abs(left) + 2) > _MOST_BITS:
        raise ValueError("the power is too large")
    value = _BINARY[type(op)](left, right)
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    result: Number = value
    return result
