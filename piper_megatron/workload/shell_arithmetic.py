"""Arithmetic of a shell: `$(( ... ))`, `(( ... ))` and `let`."""

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~?:()&|^])")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*(\*\*|<<|>>|[-+*/%&|^]?)=(?!=)(.*)", re.DOTALL)
_STEP = re.compile(r"\s*(?:(\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(\+\+|--))\s*")
_LARGEST_OPERAND = 2**31

# from loose to tight, as in C; all of them associate to the left
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        "<=": lambda a, b: int(a <= b),
        ">": lambda a, b: int(a > b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": lambda a, b: a << b, ">>": lambda a, b: a >> b},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {
        "*": lambda a, b: a * b,
        "/": lambda a, b: _towards_zero(a, b),
        "%": lambda a, b: a - b * _towards_zero(a, b),
    },
)
_UNARY: dict[str, Callable[[int], int]] = {
    "+": lambda a: a,
    "-": lambda a: -a,
    "!": lambda a: int(not a),
    "~": lambda a: ~a,
}


class Incalculable(Exception):
    """An expression has no value: a name in it has none, or it is not understood."""


def calculated(
    text: str, value_of: Callable[[str], str | None], assign: Callable[[str, str], None]
) -> int:
    """Value of an expression.

    Args:
        text: the expression, with `$name` expanded already.
        value_of: of a name; None where it has none.
        assign: told of every `name = value`.

    Raises:
        Incalculable: the expression has no value.
    """
    if step := _STEP.fullmatch(text):
        sign, name = (step[1] or step[4])[0], step[2] or step[3]
        before = calculated(name, value_of, assign)
        assign(name, str(before + (1 if sign == "+" else -1)))
        return before if step[3] else before + (1 if sign == "+" else -1)
    if assignment := _ASSIGNMENT.match(text):
        name, operator, expression = assignment.groups()
        if operator:
            expression = f"{name} {operator} ({expression})"
        result = calculated(expression, value_of, assign)
        assign(name, str(result))
        return result
    parser = _Parser(text, value_of)
    result = parser.choice()
    if parser.token:
        raise Incalculable(text)
    return result


class _Parser:
    def __init__(self, text: str, value_of: Callable[[str], str | None]) -> None:
        self._text = text
        self._at = 0
        self._value_of = value_of
        self.token = ""
        self._next()

    def _next(self) -> str:
        """The present token; goes on to the next one."""
        present = self.token
        match = _TOKEN.match(self._text, self._at)
        if match is None and self._text[self._at :].strip():
            raise Incalculable(self._text)
        self.token, self._at = (match[1], match.end()) if match else ("", len(self._text))
        return present

    def choice(self) -> int:
        """`condition ? yes : no`, or anything that binds tighter."""
        condition = self._level(0)
        if self.token != "?":
            return condition
        self._next()
        yes = self.choice()
        if self._next() != ":":
            raise Incalculable(self._text)
        no = self.choice()
        return yes if condition else no

    def _level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        value = self._level(level + 1)
        while operation := _LEVELS[level].get(self.token):
            operator = self._next()
            value = operation(*self._checked(operator, value, self._level(level + 1)))
        return value

    def _power(self) -> int:
        base = self._unary()
        if self.token != "**":
            return base
        self._next()
        base, exponent = self._checked("**", base, self._power())
        return int(base**exponent)

    def _unary(self) -> int:
        if operation := _UNARY.get(self.token):
            self._next()
            return operation(self._unary())
        token = self._next()
        if token == "(":
            value = self.choice()
            if self._next() != ")":
                raise Incalculable(self._text)
            return value
        text = token if token.isdigit() else self._value_of(token) if token else None
        if text is None or not re.fullmatch(r"\s*([-+]?\d+)?\s*", text):
            raise Incalculable(self._text)
        return int(text.strip() or 0)

    def _checked(self, operator: str, left: int, right: int) -> tuple[int, int]:
        """Operands whose result is neither undefined nor endlessly long."""
        too_large = max(abs(left), abs(right)) > _LARGEST_OPERAND
        undefined = operator in ("/", "%") and right == 0
        endless = operator in ("**", "<<", ">>") and not 0 <= right < 64
        if too_large or undefined or endless:
            raise Incalculable(self._text)
        return left, right


def _towards_zero(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient
