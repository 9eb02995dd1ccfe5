"""Measures how much a statement carries, and how much of a file is read: python tests/density.py FILES

A statement is a simple one, or the head of a compound one (`if ...:`). Docstrings do not count, nor do literal tables:
assignments at the level of a module or class, for facts as data are what one wants. Sizes are in tokens (names,
operators, numbers, strings); packed constructs are counted per 1,000 statements.
"""
from __future__ import annotations

import ast
import bisect
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CONSTRUCTS = ("pairs", "nested", "ternaries", "lambdas", "walrus", "logic")
AIM = dict(mean=13.5, p90=24, pairs=20, nested=1, ternaries=45, lambdas=5, walrus=3, logic=15)
FEW_STATEMENTS = 60                      # below that, mean and p90 say little
FREE = 2                                 # a small file may have two of anything

Place = tuple[int, int]                  # (line, column)


def docstrings(tree: ast.Module) -> list[ast.stmt]:
    """Return the strings that stand alone."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)]


def token_places(source: str) -> list[Place]:
    """Return where each token begins that a reader reads, those of docstrings included."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start for token in tokens if token.type in COUNTED]


# ---- The house: what a reader has before him -------------------------------------------------------------------------

@dataclass(frozen=True)
class Size:
    lines: int
    tokens: int                          # neither comments nor docstrings
    functions: int
    packaging: float                     # share of lines that are heads of functions and classes, docstrings, blanks
    comments: float                      # lines that are comments, for every 100


def size(source: str) -> Size:
    tree = ast.parse(source)
    lines = source.splitlines()
    prose = docstrings(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    packed = sum(not line.strip() for line in lines)
    packed += sum(node.end_lineno - node.lineno + 1 for node in prose)
    for node in [*functions, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        packed += node.body[0].lineno - first
    comments = sum(bool(re.match(r"\s*#", line)) for line in lines)
    tokens = len(token_places(source)) - len(prose)
    return Size(len(lines), tokens, len(functions), packed / len(lines), 100 * comments / len(lines))


# ---- Density ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Density:
    statements: int
    figures: dict[str, float]            # by the names of AIM: tokens, or constructs per 1,000 statements
    counts: dict[str, int]               # by construct

    def misses(self, slack: float = 1.0) -> list[str]:
        """Return the names of the figures above `slack` times the aim."""
        missed = []
        for name in ("mean", "p90"):
            if self.statements >= FEW_STATEMENTS and self.figures[name] > slack * AIM[name]:
                missed.append(name)
        for name in CONSTRUCTS:
            if self.counts[name] > max(FREE, slack * AIM[name] * self.statements / 1000):
                missed.append(name)
        return missed

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {self.figures[name]:.0f}" for name in CONSTRUCTS)
        sizes = f"{self.figures['mean']:.1f} tokens, p90 {self.figures['p90']:.0f}"
        return f"{self.statements} statements of {sizes}; per 1,000: {counted}"


def end_of_head(node: ast.stmt) -> Place:
    """Return where a simple statement ends, or the body of a compound one begins, its decorators included."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body:
        return node.end_lineno, node.end_col_offset
    first = body[0]
    for decorator in getattr(first, "decorator_list", []):
        if decorator.lineno < first.lineno:
            return decorator.lineno, 0
    return first.lineno, first.col_offset


def statement_sizes(tree: ast.Module, places: list[Place]) -> list[int]:
    """Return the tokens of each statement, ascending."""
    left_out = set(docstrings(tree))
    for holder in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        left_out |= {node for node in holder.body if isinstance(node, (ast.Assign, ast.AnnAssign))}
    sizes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node not in left_out:
            first = bisect.bisect_left(places, (node.lineno, node.col_offset))
            sizes.append(bisect.bisect_left(places, end_of_head(node)) - first)
    return sorted(sizes)


def count_constructs(tree: ast.Module) -> Counter:
    counts = Counter(dict.fromkeys(CONSTRUCTS, 0))
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign):
            counts["pairs"] += isinstance(node.targets[0], ast.Tuple) and isinstance(value, ast.Tuple)
        if isinstance(node, COMPREHENSIONS):
            counts["nested"] += sum(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node)) > 1
        if isinstance(node, (ast.Assign, ast.Return, ast.Expr)):
            counts["logic"] += isinstance(value, ast.BoolOp)
        counts["ternaries"] += isinstance(node, ast.IfExp)
        counts["lambdas"] += isinstance(node, ast.Lambda)
        counts["walrus"] += isinstance(node, ast.NamedExpr)
    return counts


def density(source: str) -> Density:
    """Measure the text of a module, or whole statements cut out of one."""
    tree = ast.parse(source)
    sizes = statement_sizes(tree, token_places(source)) or [0]
    total = len(sizes)
    counts = count_constructs(tree)
    figures = {name: 1000 * counts[name] / total for name in CONSTRUCTS}
    figures |= dict(mean=sum(sizes) / total, p90=sizes[int(total * 0.9)])
    return Density(total, figures, dict(counts))


def main(paths: list[str]) -> int:
    """Print a line for each file. Return 1 if one misses the aim."""
    status = 0
    for path in paths:
        source = Path(path).read_text("utf-8")
        found = density(source)
        print(f"{path}: {size(source)}, {found}")
        if found.misses():
            print(f"    MISSES {', '.join(found.misses())}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
