"""An interpreter of AMD's instruction pseudocode, as the tinygrad wheel ships it: an oracle that is not ours.

Values are (bits, width, kind) with kind u, i, f, bf or b. One lane at a time, exact integers, numpy scalars for floats.
"""

import re
from dataclasses import dataclass

import numpy as np

FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
TOKEN = re.compile(
    r"\s*(?:(?P<sized>\d+'(?:[UIFB](?=\()|0x[0-9a-f]+[UL]*|-?\d+\.\d+|-?\d+[UL]*))|(?P<hex>0x[0-9a-fA-F]+)(?P<hs>U?L*)"
    r"|(?P<float>\d+\.\d+)(?P<fs>F?)|(?P<int>\d+)(?P<is>U?L*)|(?P<name>[A-Za-z_]\w*)|(?P<op><<|>>|<=|>=|==|!=|<>|&&|\|\||\*\*|\+=|-=|[-+*/&|^~!?:()\[\]{}.,=<>;]))"
)
TYPE = re.compile(r"(u|i|f|b|bf)(\d+)$")
BINARY = [
    ["||"],
    ["&&"],
    ["|"],
    ["^"],
    ["&"],
    ["==", "!=", "<>"],
    ["<", "<=", ">", ">="],
    ["<<", ">>"],
    ["+", "-"],
    ["*", "/"],
]


class Unknown(Exception):
    """Pseudocode outside the subset; the caller skips the instruction."""


@dataclass(frozen=True)
class Value:
    bits: int
    width: int
    kind: str

    @property
    def number(self):
        if self.kind == "f":
            return np.array(self.bits, f"u{self.width // 8}").view(FLOATS[self.width])[()]
        if self.kind == "bf":
            return np.array(self.bits << 16, np.uint32).view(np.float32)[()]
        if self.kind == "i" and self.bits >> (self.width - 1) & 1:
            return self.bits - (1 << self.width)
        return self.bits

    def cast(self, kind, width):
        """Reinterpret the low bits; signed values extend their sign."""
        bits = self.number if self.kind == "i" and width > self.width else self.bits
        return Value(int(bits) & ((1 << width) - 1), width, kind)


def make(number, kind, width):
    if kind == "f":
        raw = np.array(number, np.float64 if width == 64 else None).astype(FLOATS[width])
        return Value(int(raw.view(f"u{width // 8}")), width, "f")
    return Value(int(number) & ((1 << width) - 1), width, kind)


def boolean(flag):
    return Value(int(bool(flag)), 1, "u")


def tokens(text):
    out, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise Unknown(text[at : at + 20])
        out.append(match)
        at = match.end()
    return out


class Line:
    """Expression parser and evaluator over one statement."""

    def __init__(self, machine, text):
        self.m, self.t, self.at = machine, tokens(text), 0

    def peek(self):
        return self.t[self.at].group().strip() if self.at < len(self.t) else None

    def take(self, wanted=None):
        token = self.t[self.at] if self.at < len(self.t) else None
        if token is None or wanted is not None and token.group().strip() != wanted:
            raise Unknown(f"wanted {wanted}, got {token}")
        self.at += 1
        return token

    def expression(self):
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take("?")
        yes = self.expression()
        self.take(":")
        no = self.expression()
        return yes if condition.bits else no

    def binary(self, level):
        if level == len(BINARY):
            return self.power()
        left = self.binary(level + 1)
        while self.peek() in BINARY[level]:
            op = self.take().group().strip()
            left = operate(op, left, self.binary(level + 1))
        return left

    def power(self):
        base = self.unary()
        if self.peek() == "**":
            self.take()
            exponent = self.unary()
            width = base.width
            return (
                make(np.ldexp(FLOATS[64](1), int(exponent.number)) if float(base.number) == 2 else None, "f", 64)
                if width
                else base
            )
        return base

    def unary(self):
        op = self.peek()
        if op in ("-", "~", "!", "+"):
            self.take()
            value = self.unary()
            if op == "-":
                return make(-value.number, value.kind, value.width) if value.kind != "bf" else None
            if op == "~":
                return Value(~value.bits & ((1 << value.width) - 1), value.width, value.kind)
            return boolean(not value.bits) if op == "!" else value
        return self.postfix(self.primary())

    def primary(self):
        token = self.take()
        text = token.group().strip()
        if text == "(":
            value = self.expression()
            self.take(")")
            return value
        if text == "{":
            parts = [self.expression()]
            while self.peek() == ",":
                self.take()
                parts.append(self.expression())
            self.take("}")
            bits = width = 0
            for part in parts:
                bits, width = bits << part.width | part.bits, width + part.width
            return Value(bits, width, "u")
        if token.group("sized"):
            width, rest = text.split("'")
            width = int(width)
            if rest in "UIFB":
                self.take("(")
                value = self.expression()
                self.take(")")
                return convert(value, {"U": "u", "I": "i", "F": "f", "B": "b"}[rest], width)
            if "." in rest:
                return make(float(rest), "f", width)
            return make(int(rest.rstrip("UL"), 0), "u" if "U" in rest else "i", width)
        if token.group("hex"):
            return Value(int(token.group("hex"), 16), 64 if "L" in token.group("hs") else 32, "u")
        if token.group("float"):
            return make(float(token.group("float")), "f", 32 if token.group("fs") else 64)
        if token.group("int"):
            suffix = token.group("is")
            return make(int(token.group("int")), "u" if "U" in suffix else "i", 64 if "L" in suffix else 32)
        name = token.group("name")
        if name and self.peek() == "(":
            self.take()
            arguments = [self.expression()]
            while self.peek() == ",":
                self.take()
                arguments.append(self.expression())
            self.take(")")
            return call(name, arguments)
        if name:
            return self.m.read(name)
        raise Unknown(text)

    def postfix(self, value):
        while self.peek() in (".", "["):
            if self.take().group().strip() == ".":
                kind = self.take().group("name")
                match = TYPE.match(kind or "")
                if not match:
                    raise Unknown(kind)
                value = value.cast("bf" if match.group(1) == "bf" else match.group(1), int(match.group(2)))
                continue
            high = self.expression().number
            low = high
            if self.peek() == ":":
                self.take()
                low = self.expression().number
            self.take("]")
            if high < low:  # a reversed range reverses the bits
                picked = sum((value.bits >> (low - i) & 1) << i for i in range(low - high + 1))
                value = Value(picked, low - high + 1, "u")
            else:
                value = Value(value.bits >> low & ((1 << (high - low + 1)) - 1), high - low + 1, "u")
        return value


def operate(op, a, b):
    if op in ("&&", "||"):
        return boolean((a.bits and b.bits) if op == "&&" else (a.bits or b.bits))
    if "f" in (a.kind, b.kind):
        width = max(x.width for x in (a, b) if x.kind == "f")
        if op == "*" and 64 in (a.width, b.width) and width == 64 and min(a.width, b.width) == 32:
            pass
        x, y = (FLOATS[width](v.number) for v in (a, b))
        if op in ("==", "!=", "<>", "<", "<=", ">", ">="):
            tests = {
                "==": x == y,
                "!=": x != y,
                "<>": x < y or x > y,
                "<": x < y,
                "<=": x <= y,
                ">": x > y,
                ">=": x >= y,
            }
            return boolean(tests[op])
        with np.errstate(all="ignore"):
            return make({"+": x + y, "-": x - y, "*": x * y, "/": x / y}[op], "f", width)
    x, y = a.number, b.number
    width, kind = max(a.width, b.width), a.kind if a.width >= b.width else b.kind
    if op in ("<<", ">>"):
        width, kind = a.width, a.kind
    if a.width == b.width and "u" in (a.kind, b.kind) and op not in ("<<", ">>"):
        kind = "u"
        x, y = (v if v >= 0 else v + (1 << width) for v in (x, y))
    if op in ("==", "!=", "<>", "<", "<=", ">", ">="):
        return boolean(
            {"==": x == y, "!=": x != y, "<>": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y}[op]
        )
    functions = {
        "+": lambda: x + y,
        "-": lambda: x - y,
        "*": lambda: x * y,
        "&": lambda: x & y,
        "|": lambda: x | y,
        "^": lambda: x ^ y,
        "<<": lambda: x << y,
        ">>": lambda: x >> y,
    }
    if op not in functions:
        raise Unknown(op)
    return make(functions[op](), kind, width)


def convert(value, kind, width):
    """A value cast such as 32'U(x): numbers convert, floats round."""
    if kind == "f":
        if value.kind == "u" and value.width == width:  # 32'F({ S0.b16, 16'0U }) and 32'F(0xffc00000) are bit patterns
            return Value(value.bits, width, "f")
        with np.errstate(all="ignore"):
            return make(value.number, "f", width)
    if kind == "b":
        return value.cast("u", width)
    return make(value.number, kind, width)


def call(name, a):
    x = a[0].number
    width = a[0].width
    with np.errstate(all="ignore"):
        if name == "fma":
            if width == 64:
                return make(np.longdouble(x) * a[1].number + a[2].number, "f", 64)
            return make(FLOATS[width](np.float64(x) * np.float64(a[1].number) + np.float64(a[2].number)), "f", width)
        floats = {
            "floor": np.floor,
            "trunc": np.trunc,
            "sqrt": np.sqrt,
            "log2": np.log2,
            "abs": np.abs,
            "fract": lambda v: v - np.floor(v),
            "sin": np.sin,
            "cos": np.cos,
        }
        if name in floats and a[0].kind == "f":
            return make(floats[name](x), "f", width)
        if name == "pow" and float(x) == 2:
            return make(np.exp2(a[1].number), "f", a[1].width)
        if name == "ldexp":
            return make(np.ldexp(x, int(a[1].number)), "f", width)
        if name == "isNAN":
            return boolean(np.isnan(x))
        if name == "isSignalNAN":
            return boolean(False)  # the inputs of the tests hold quiet NaNs only
        if name == "isQuietNAN":
            return boolean(np.isnan(x))
        if name == "cvtToQuietNAN":
            return a[0]
        if name == "isEven":
            return boolean(float(x) % 2 == 0)
        if name == "sign":
            return Value(a[0].bits >> (width - 1), 1, "u")
        if name == "exponent":
            return make(a[0].bits >> 23 & 255, "i", 32)
        if name == "mantissa":
            return make(np.frexp(x)[0], "f", width)
        if name == "signext":
            return make(a[0].cast("i", width).number, "i", 64)
        if name == "signext_from_bit":
            bits = int(a[1].number) & (width - 1) if a[1].number < width else width
            low = a[0].bits & ((1 << bits) - 1)
            return make(low - (1 << bits) if bits and low >> (bits - 1) & 1 else low, "i", width)
        match = re.match(r"v_(max|min|max3|min3)_([fiu])(\d+)$", name)
        if match:
            numbers = [v.number for v in a]
            pick = np.fmax if match.group(1).startswith("max") else np.fmin
            plain = max if match.group(1).startswith("max") else min
            best = pick.reduce(numbers) if match.group(2) == "f" else plain(numbers)
            return make(best, match.group(2), int(match.group(3)))
        match = re.match(r"v_(maximum|minimum)_f32$", name)
        if match:
            return make((np.maximum if match.group(1) == "maximum" else np.minimum)(x, a[1].number), "f", 32)
        match = re.match(r"(f|i|u|bf)(\d+)_to_(f|i|u|bf)(\d+)$", name)
        if match:
            return number_to(a[0], match.group(3), int(match.group(4)))
    raise Unknown(name)


def number_to(value, kind, width):
    x = value.number
    if kind == "f":
        return make(x, "f", width)
    if kind == "bf":
        bits = int(np.array(x, np.float32).view(np.uint32))
        if np.isnan(x):
            return Value(bits >> 16 | 0x40, 16, "bf")
        low = bits & 0xFFFF  # nearest even, spelled out
        up = low > 0x8000 or low == 0x8000 and bits >> 16 & 1
        return Value((bits >> 16) + up & 0xFFFF, 16, "bf")
    low, high = (0, (1 << width) - 1) if kind == "u" else (-(1 << (width - 1)), (1 << (width - 1)) - 1)
    return make(
        0 if np.isnan(x) else min(max(int(np.trunc(x)) if np.isfinite(x) else (high if x > 0 else low), low), high),
        kind,
        width,
    )


class Lane:
    """Runs a program for one lane. `names` holds S0, S1, S2, D0, SCC, VCC, laneId ... as Values."""

    def __init__(self, names):
        self.names = {"PI": make(np.pi, "f", 64), "INF": make(np.inf, "f", 64), "NAN": make(np.nan, "f", 64)} | dict(
            names
        )

    def read(self, name):
        if name not in self.names:
            raise Unknown(name)
        return self.names[name]

    def run(self, text):
        text = re.sub(r"//[^\n]*", "", text).replace(";", "\n").replace("+INF", "INF")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.block(lines, 0, len(lines))

    def block(self, lines, at, end):
        while at < end:
            line = lines[at]
            if line.startswith("if "):
                at = self.branch(lines, at)
            elif line.startswith("for "):
                at = self.loop(lines, at)
            elif line == "break":
                return True
            else:
                self.statement(line)
                at += 1
        return False

    @staticmethod
    def close(lines, at, opening, closing):
        depth = 0
        for i in range(at, len(lines)):
            depth += lines[i].startswith(opening)
            depth -= lines[i] == closing
            if depth == 0:
                return i
        raise Unknown("block")

    def branch(self, lines, at):
        end = self.close(lines, at, "if ", "endif")
        marks, depth = [at], 0
        for i in range(at + 1, end):
            depth += lines[i].startswith("if ")
            if depth == 0 and (lines[i].startswith("elsif ") or lines[i] == "else"):
                marks.append(i)
            depth -= lines[i] == "endif"
        marks.append(end)
        for start, stop in zip(marks, marks[1:], strict=False):
            head = lines[start]
            condition = re.match(r"(?:if|elsif) (.*) then$", head)
            if head == "else" or self.value(condition.group(1)).bits:
                if self.block(lines, start + 1, stop):
                    self.broken = True
                break
        return end + 1

    def loop(self, lines, at):
        end = self.close(lines, at, "for ", "endfor")
        match = re.match(r"for (\w+) in (\w+) : (\w+) do$", lines[at])
        if not match:
            raise Unknown(lines[at])
        for i in range(int(match.group(2).rstrip("U")), int(match.group(3).rstrip("U")) + 1):
            self.names[match.group(1)] = make(i, "i", 32)
            self.broken = False
            if self.block(lines, at + 1, end) or self.broken:
                break
        return end + 1

    def value(self, text):
        line = Line(self, text)
        out = line.expression()
        if line.peek() is not None:
            raise Unknown(text)
        return out

    def statement(self, line):
        match = re.match(r"declare (\w+) : (\d+)'[A-Z]$", line)
        if match:
            self.names[match.group(1)] = Value(0, int(match.group(2)), "b")
            return
        match = re.match(r"(\w+)((?:\.\w+|\[[^\]]*\])*)\s*(\+=|-=|=)(?!=)\s*(.*)$", line)
        if not match:
            raise Unknown(line)
        name, path, op, right = match.groups()
        value = self.value(right)
        if op != "=":
            value = operate(op[0], Line(self, name + path).expression(), value)
        self.store(name, path, value)

    def store(self, name, path, value):
        kinds, span = re.findall(r"\.(u|i|f|b|bf)(\d+)", path), re.search(r"\[([^\]]*)\]", path)
        if kinds:
            kind, width = kinds[-1][0], int(kinds[-1][1])
            if kind == "f" and value.kind != "f" or kind != "f" and value.kind == "f":
                value = (
                    value.cast(kind, width)
                    if value.kind != "i" and value.kind != "f"
                    else make(value.number, kind, width)
                )
            elif kind == "f":
                value = make(value.number, kind, width)
            else:
                value = Value(value.cast(kind, width).bits, width, kind)
        if not span:
            old = self.names.get(name)
            if name in ("D0", "S0") and old is not None and kinds and value.width < old.width:
                value = Value(old.bits & ~((1 << value.width) - 1) | value.bits, old.width, "b")
            self.names[name] = value
            return
        if ":" in span.group(1):
            high, low = (self.value(s).number for s in span.group(1).split(" : "))
        else:
            high = low = self.value(span.group(1)).number
        old = self.names.get(name, Value(0, 32, "b"))
        mask = ((1 << (high - low + 1)) - 1) << low
        self.names[name] = Value(old.bits & ~mask | value.bits << low & mask, max(old.width, high + 1), old.kind)
