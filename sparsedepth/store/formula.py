"""Formulas over the columns of a table, in the map of an import. Evaluated as a syntax tree, never run as code.

    expression  number, column, `column with odd characters`, + - * / **, ( ), ln log2 log10 exp sqrt round abs
    condition   expression < <= > >= == != expression, column == 'text', and, or, not

A name is a column. Computed in double precision; the caller rejects infinite and undefined values.
"""

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_LENGTH = 500

ColumnValues = Callable[[str], np.ndarray]
"""Column name -> its values. Raises ValueError where they are of another type."""

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
    """An expression or a condition, checked against the table's columns."""

    text: str
    tree: ast.expr
    quoted: Mapping[str, str]
    """Placeholder -> the column in backticks."""
    is_condition: bool

    @property
    def column(self) -> str | None:
        """The column, if the formula is only its name."""
        return self._column(self.tree.id) if isinstance(self.tree, ast.Name) else None

    @property
    def columns(self) -> set[str]:
        """All columns in the formula."""
        functions = {id(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        names = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and id(node) not in functions)
        return {self._column(node.id) for node in names}

    def _column(self, name: str) -> str:
        return self.quoted.get(name, name)

    def values(self, numbers: ColumnValues, texts: ColumnValues) -> np.ndarray | np.float64:
        """The result, one value per row, or one number for a formula without columns. Raises ValueError as the columns
        do, and for a part that is not in the grammar."""
        with np.errstate(all="ignore"):
            return self._truth(self.tree, numbers, texts) if self.is_condition else self._number(self.tree, numbers)

    def _truth(self, node: ast.expr, numbers: ColumnValues, texts: ColumnValues) -> Any:
        match node:
            case ast.BoolOp():
                combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
                return combine.reduce([self._truth(part, numbers, texts) for part in node.values])
            case ast.UnaryOp(op=ast.Not()):
                return np.logical_not(self._truth(node.operand, numbers, texts))
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Eq() | ast.NotEq() as op], comparators=[ast.Constant(value=str(text))]
            ):
                return _COMPARISONS[type(op)](texts(self._column(name)), text)
            case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return _COMPARISONS[type(op)](self._number(node.left, numbers), self._number(right, numbers))
        raise self._mistake("a condition must be comparisons such as batch_size == 64, joined by and, or, not")

    def _number(self, node: ast.expr, numbers: ColumnValues) -> Any:
        match node:
            case ast.Constant(value=bool() | str() | bytes() | complex()):
                raise self._mistake(f"{node.value!r} is no number")
            case ast.Constant(value=(int() | float()) as number) if abs(number) < 1e300:
                return np.float64(number)
            case ast.Name():
                return numbers(self._column(node.id))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                operand = self._number(node.operand, numbers)
                return -operand if isinstance(node.op, ast.USub) else operand
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](self._number(node.left, numbers), self._number(node.right, numbers))
            case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]) if function in _FUNCTIONS:
                return _FUNCTIONS[function](self._number(argument, numbers))
            case ast.Compare(ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str())]):
                raise self._mistake("a comparison is a condition, and a number is needed")
        allowed = f"use numbers, columns, + - * / **, {' '.join(_FUNCTIONS)}"
        raise self._mistake(f"{ast.unparse(node)!r} is not allowed: {allowed}")

    def _mistake(self, text: str) -> ValueError:
        return ValueError(f"{self.text!r}: {text}")


class UnknownColumn(ValueError):
    """A formula names a column that the table does not have."""


def parse(text: str, columns: Collection[str], is_condition: bool = False) -> Formula:
    """Parse a formula. Raises ValueError, one line, for a syntax error, and UnknownColumn."""
    if text in columns and not is_condition:
        return Formula(text, ast.Name(id="quoted_0"), {"quoted_0": text}, is_condition)
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a formula of {len(text):,} characters; at most {MAX_LENGTH} are read")
    names = re.findall(r"`([^`]*)`", text)
    quoted = {f"quoted_{i}": name for i, name in enumerate(names)}
    plain = re.sub(r"`[^`]*`", lambda match: f" quoted_{names.index(match.group()[1:-1])} ", text)
    try:
        formula = Formula(text, ast.parse(plain.strip(), mode="eval").body, quoted, is_condition)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no formula; write e.g. tokens * 1e6, and odd columns in backticks") from None
    formula.values(lambda name: np.ones(1), lambda name: np.array([""]))  # every part is of the grammar
    if missing := sorted(formula.columns - set(columns)):
        raise UnknownColumn(f"no column {', '.join(map(repr, missing))}")
    return formula
