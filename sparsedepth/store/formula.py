"""Formulas over the columns of a table, in the map of an import. Evaluated as a syntax tree, never run as code.

    expression  number, column, `column with odd characters`, + - * / **, ( ), ln log2 log10 exp sqrt round abs
    condition   expression < <= > >= == != expression, column == 'text', and, or, not

A name is a column. Computed in double precision; the caller rejects infinite and undefined values.
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
        """The result, one value per row, or one number for a formula without columns. Raises as the columns do."""
        with np.errstate(all="ignore"):
            return self._value(self.tree, numbers, texts)

    def _value(self, node: ast.expr, numbers: ColumnValues, texts: ColumnValues) -> Any:
        def value(inner: ast.expr) -> Any:
            return self._value(inner, numbers, texts)

        match node:
            case ast.Constant():
                return np.float64(node.value)  # ty: ignore[invalid-argument-type] - `parse` accepts only numbers
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
            case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=str(text))]):
                return _COMPARISONS[type(node.ops[0])](texts(self._column(name)), text)
            case ast.Compare():
                return _COMPARISONS[type(node.ops[0])](value(node.left), value(node.comparators[0]))
        raise AssertionError(ast.dump(node))


def parse(text: str, columns: Collection[str], is_condition: bool = False) -> Formula:
    """Parse a formula. Raises ValueError, one line, for a syntax error or an unknown column."""
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
    if mistake := _mistake(tree, is_condition):
        raise ValueError(f"{text!r}: {mistake}")
    if missing := sorted(formula.columns - set(columns)):
        names = ", ".join(map(str, list(columns)[:20]))
        raise ValueError(f"no column {', '.join(map(repr, missing))}; the table has: {names}")
    return formula


def _mistake(node: ast.expr, is_condition: bool) -> str:
    """The first part that is not in the grammar; '' where there is none."""

    def first(parts: Sequence[ast.expr], conditions: bool = False) -> str:
        return next(filter(None, (_mistake(part, conditions) for part in parts)), "")

    match node:
        case ast.BoolOp() if is_condition:
            return first(node.values, True)
        case ast.UnaryOp(op=ast.Not()) if is_condition:
            return first([node.operand], True)
        case ast.Compare(left=ast.Name(), ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str())]):
            return "" if is_condition else "a comparison is a condition, and a number is needed"
        case ast.Compare(ops=[op], comparators=[right]) if is_condition and type(op) in _COMPARISONS:
            return first([node.left, right])
        case _ if is_condition:
            return "a condition must be comparisons such as batch_size == 64, joined by and, or, not"
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
    return f"{ast.unparse(node)!r} is not allowed: use numbers, columns, + - * / **, {' '.join(_FUNCTIONS)}"
