"""Measure the size of statements: python tests/density.py FILES

A statement is a simple statement or the head of a compound one (`if ...:`), without docstrings and literal tables of a
module or class. Sizes are in tokens outside type annotations. Packed constructs are counted per 1,000 statements.
"""
from __future__ import annotations

import ast
import bisect
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CONSTRUCTS = ("pairs", "nested", "ternaries", "lambdas", "walrus", "logic")
AIM = dict(mean=13.5, p90=24, pairs=20, nested=1, ternaries=45, lambdas=5, walrus=3, logic=15)
FEW_STATEMENTS = 60                      # mean and p90 of fewer statements are not judged
ALWAYS_ALLOWED = 2                       # constructs of each kind, in small files

def docstrings(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)]

def token_positions(source: str) -> list[tuple[int, int]]:
    """Return (line, column) of each token except comments and layout."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start for token in tokens if token.type in COUNTED]

def without_annotations(tree: ast.Module, positions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Drop the positions in type annotations, because they document names and do not make a statement denser."""
    nodes = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    ranges = sorted(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
                    for node in nodes if isinstance(node, ast.expr))
    starts = [start for start, _ in ranges]
    kept = []
    for position in positions:
        i = bisect.bisect_right(starts, position) - 1
        if i < 0 or position >= ranges[i][1]:
            kept.append(position)
    return kept

def end_of_head(node: ast.stmt) -> tuple[int, int]:
    """Return the end of a simple statement, or the start of the body of a compound one, including its decorators."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not body:
        return node.end_lineno, node.end_col_offset
    first = body[0]
    decorators = [(decorator.lineno, 0) for decorator in getattr(first, "decorator_list", [])]
    return min([*decorators, (first.lineno, first.col_offset)])

def statement_sizes(tree: ast.Module, positions: list[tuple[int, int]]) -> list[int]:
    excluded = set(docstrings(tree))
    for holder in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        excluded |= {node for node in holder.body if isinstance(node, (ast.Assign, ast.AnnAssign))}
    sizes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node not in excluded:
            first = bisect.bisect_left(positions, (node.lineno, node.col_offset))
            sizes.append(bisect.bisect_left(positions, end_of_head(node)) - first)
    return sorted(sizes)

def count_constructs(tree: ast.Module) -> Counter:
    counts = Counter()
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

class Density(NamedTuple):
    statements: int
    figures: dict[str, float]            # keys as in AIM: tokens, or constructs per 1,000 statements

    def misses(self, slack: float = 1.0) -> list[str]:
        """Return the names of the figures above `slack` times the aim."""
        allowed = {name: slack * most for name, most in AIM.items()}
        for name in CONSTRUCTS:
            allowed[name] = max(allowed[name], 1000 * ALWAYS_ALLOWED / self.statements)
        judged = AIM if self.statements >= FEW_STATEMENTS else CONSTRUCTS
        return [name for name in judged if self.figures[name] > allowed[name]]

def density(source: str) -> Density:
    tree = ast.parse(source)
    sizes = statement_sizes(tree, without_annotations(tree, token_positions(source))) or [0]
    total = len(sizes)
    counts = count_constructs(tree)
    figures = dict(mean=sum(sizes) / total, p90=sizes[int(total * 0.9)])
    return Density(total, figures | {name: 1000 * counts[name] / total for name in CONSTRUCTS})


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        found = density(path.read_text("utf-8"))
        figures = ", ".join(f"{name} {figure:.3g}" for name, figure in found.figures.items())
        print(f"{path}: {found.statements} statements; {figures}; misses {found.misses()}")
