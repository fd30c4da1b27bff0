"""Arithmetic over the columns of a table, as the map of an import states it. Read as a syntax tree, never run as code.

    expression  number, column, `column with odd characters`, + - * / **, ( ), ln log2 log10 exp sqrt round abs
    condition   expression < <= > >= == != expression, column == 'text', and, or, not

A name is a column. All is computed in double precision; what is infinite or undefined is for the caller to refuse.
"""

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_LENGTH = 500

ColumnValues = Callable[[str], np.ndarray]
"""The values of a column by its name. Raises ValueError where they are not of the kind that is asked for."""

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "ln": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "round": np.round,
    "abs": np.abs,
}


@dataclass(frozen=True)
class Formula:
    """An expression or a condition, checked against the columns that there are."""

    text: str
    tree: ast.expr
    quoted: Mapping[str, str]
    """Stand-in -> the column that was written in backticks."""

    @property
    def column(self) -> str | None:
        """The column that it is and no more; None for anything computed."""
        return self._column(self.tree.id) if isinstance(self.tree, ast.Name) else None

    @property
    def columns(self) -> set[str]:
        """The columns that the formula names."""
        return _names(self, self.tree)

    def _column(self, name: str) -> str:
        return self.quoted.get(name, name)

    def values(self, numbers: ColumnValues, texts: ColumnValues) -> np.ndarray | np.float64:
        """What it computes, one value per row, or one number where it names no column. Raises as the columns do."""
        with np.errstate(all="ignore"):
            return self._value(self.tree, numbers, texts)

    def _value(self, node: ast.expr, numbers: ColumnValues, texts: ColumnValues) -> Any:
        def value(inner: ast.expr) -> Any:
            return self._value(inner, numbers, texts)

        match node:
            case ast.Constant():
                return np.float64(node.value)  # ty: ignore[invalid-argument-type] - `parse` lets numbers through alone
            case ast.Name():
                return numbers(self._column(node.id))
            case ast.UnaryOp(op=ast.Not()):
                return np.logical_not(value(node.operand))
            case ast.UnaryOp():
                return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
            case ast.BinOp():
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Call(func=ast.Name(id=function)):
                return _FUNCTIONS[function](value(node.args[0]))
            case ast.BoolOp():
                combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
                return combine.reduce([value(part) for part in node.values])
            case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=str(word))]):
                return _COMPARISONS[type(node.ops[0])](texts(self._column(name)), word)
            case ast.Compare():
                return _COMPARISONS[type(node.ops[0])](value(node.left), value(node.comparators[0]))
        raise AssertionError(ast.dump(node))


def parse(text: str, columns: Collection[str], is_condition: bool = False) -> Formula:
    """The formula of a text. Raises ValueError, one line, for what is not of the grammar or no column."""
    if text in columns and not is_condition:
        return Formula(text, ast.Name(id="quoted_0"), {"quoted_0": text})
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a formula of {len(text):,} characters; at most {MAX_LENGTH} are read")
    names = re.findall(r"`([^`]*)`", text)
    quoted = {f"quoted_{i}": name for i, name in enumerate(names)}
    plain = re.sub(r"`[^`]*`", lambda match: f" quoted_{names.index(match.group()[1:-1])} ", text)
    try:
        tree = ast.parse(plain.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no formula; write e.g. tokens * 1e6, and odd columns in backticks") from None
    formula = Formula(text, tree, quoted)
    if wrong := _mistake(formula, tree, is_condition):
        raise ValueError(f"{text!r}: {wrong}")
    missing = sorted(_names(formula, tree) - set(columns))
    if missing:
        have = ", ".join(map(str, list(columns)[:20]))
        raise ValueError(f"no column {', '.join(map(repr, missing))}; the table has: {have}")
    return formula


def _names(formula: Formula, tree: ast.expr) -> set[str]:
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions]
    return {formula.quoted.get(node.id, node.id) for node in nodes}


def _mistake(formula: Formula, node: ast.expr, is_condition: bool) -> str:
    """The first thing that is not of the grammar; '' where all is."""

    def first(parts: Sequence[ast.expr], conditions: bool = False) -> str:
        return next(filter(None, (_mistake(formula, part, conditions) for part in parts)), "")

    match node:
        case ast.BoolOp() if is_condition:
            return first(node.values, True)
        case ast.UnaryOp(op=ast.Not()) if is_condition:
            return first([node.operand], True)
        case ast.Compare(left=ast.Name(), ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str())]):
            return "" if is_condition else "a comparison is a condition, and this is to be a number"
        case ast.Compare(ops=[op], comparators=[right]) if is_condition and type(op) in _COMPARISONS:
            return first([node.left, right])
        case _ if is_condition:
            return "a condition compares: batch_size == 64, and joins comparisons by and, or, not"
        case ast.Constant(value=bool() | str() | bytes() | complex()):
            return f"{node.value!r} is no number"
        case ast.Constant(value=(int() | float()) as number) if abs(number) < 1e300:
            return ""
        case ast.Name():
            return ""
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return first([node.operand])
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return first([node.left, node.right])
        case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]) if function in _FUNCTIONS:
            return first([argument])
    return f"{ast.unparse(node)!r} is not of the grammar: numbers, columns, + - * / **, {' '.join(_FUNCTIONS)}"
