"""How much a statement carries. A file is read one statement at a time, so that is what is measured, not its length.

A statement is a simple one, or the head of a compound one (`if ...:`, `def ...:`). Docstrings do not count, nor do
literal tables: assignments at the level of a module or a class, for facts as data are what one wants. Sizes are in
tokens (names, operators, numbers, strings); packed constructs are counted per 1,000 statements. Arguments of the
command line: Python files."""
from __future__ import annotations

import ast
import bisect
import io
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


@dataclass(frozen=True)
class Density:
    statements: int
    figures: dict[str, float]            # by the names of AIM: tokens, or constructs per 1,000 statements
    counts: dict[str, int]               # by construct

    def misses(self, slack: float = 1.0) -> list[str]:
        """Names of the figures above `slack` times the aim."""
        missed = []
        for name in ("mean", "p90"):
            if self.statements >= FEW_STATEMENTS and self.figures[name] > slack * AIM[name]:
                missed.append(name)
        for name in CONSTRUCTS:
            allowed = slack * AIM[name] * self.statements / 1000
            if self.counts[name] > max(FREE, allowed):
                missed.append(name)
        return missed

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {self.figures[name]:.0f}" for name in CONSTRUCTS)
        sizes = f"{self.figures['mean']:.1f} tokens, p90 {self.figures['p90']:.0f}"
        return f"{self.statements} statements of {sizes}; per 1,000: {counted}"


def is_docstring(node: ast.stmt) -> bool:
    """Or any other string that stands alone."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def literal_tables(tree: ast.Module) -> set[ast.stmt]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = set()
    for holder in (tree, *classes):
        for node in holder.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                found.add(node)
    return found


def end_of_head(node: ast.stmt) -> Place:
    """Where a simple statement ends, or the body of a compound one begins, its decorators included."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body:
        return node.end_lineno, node.end_col_offset
    first = body[0]
    for decorator in getattr(first, "decorator_list", []):
        if decorator.lineno < first.lineno:
            return decorator.lineno, 0
    return first.lineno, first.col_offset


def token_places(source: str) -> list[Place]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start for token in tokens if token.type in COUNTED]


def statement_sizes(tree: ast.Module, places: list[Place]) -> list[int]:
    """Tokens of each statement, ascending."""
    tables = literal_tables(tree)
    sizes = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or node in tables or is_docstring(node):
            continue
        first = bisect.bisect_left(places, (node.lineno, node.col_offset))
        last = bisect.bisect_left(places, end_of_head(node))
        sizes.append(last - first)
    return sorted(sizes)


def assigns_a_tuple(node: ast.AST) -> bool:
    """a, b = x, y"""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_nested(node: ast.AST) -> bool:
    """A comprehension that holds another."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    return any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node)


def uses_logic_as_value(node: ast.AST) -> bool:
    """x = a and b"""
    if not isinstance(node, (ast.Assign, ast.Return, ast.Expr)):
        return False
    return isinstance(node.value, ast.BoolOp)


def count_constructs(tree: ast.Module) -> Counter:
    counts = Counter()
    for node in ast.walk(tree):
        counts["pairs"] += assigns_a_tuple(node)
        counts["nested"] += is_nested(node)
        counts["ternaries"] += isinstance(node, ast.IfExp)
        counts["lambdas"] += isinstance(node, ast.Lambda)
        counts["walrus"] += isinstance(node, ast.NamedExpr)
        counts["logic"] += uses_logic_as_value(node)
    return counts


def density(source: str) -> Density:
    """Of the text of a module, or of whole statements cut out of one."""
    tree = ast.parse(source)
    sizes = statement_sizes(tree, token_places(source)) or [0]
    total = len(sizes)

    counts = count_constructs(tree)
    figures = {name: 1000 * counts[name] / total for name in CONSTRUCTS}
    figures["mean"] = sum(sizes) / total
    figures["p90"] = sizes[int(total * 0.9)]
    return Density(total, figures, dict(counts))


def main(paths: list[str]) -> int:
    """Prints a line for each file. Returns 1 if one misses the aim."""
    status = 0
    for path in paths:
        found = density(Path(path).read_text("utf-8"))
        verdict = ""
        if found.misses():
            verdict = f"  MISSES {', '.join(found.misses())}"
            status = 1
        print(f"{path}: {found}{verdict}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
