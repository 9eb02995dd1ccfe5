"""Measure the size of statements, and the composition of a file: python tests/density.py FILES

A statement is a simple statement or the head of a compound one (`if ...:`). Docstrings are not counted. Neither are
literal tables in assignments of a module or class, because facts should be written as data.
Sizes are in tokens (names, operators, numbers, strings) outside type annotations. Packed constructs are counted per
1,000 statements.
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
    """Return (line, column) of each token except comments and layout, including docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start for token in tokens if token.type in COUNTED]

def annotation_ranges(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the start and end of each type annotation in a signature or an assignment, sorted."""
    nodes = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    return sorted(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
                  for node in nodes if isinstance(node, ast.expr))

def without_annotations(tree: ast.Module, positions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the positions outside type annotations."""
    ranges = annotation_ranges(tree)
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
    lines: int
    tokens: int                          # without comments and docstrings
    functions: int
    packaging: float                     # fraction of lines: heads of functions and classes, docstrings, blank lines
    comments: float                      # comment lines per 100 lines
    statements: int
    figures: dict[str, float]            # keys as in AIM: tokens, or constructs per 1,000 statements

    def misses(self, slack: float = 1.0) -> list[str]:
        """Return the names of the figures above `slack` times the aim."""
        allowed = {name: slack * most for name, most in AIM.items()}
        for name in CONSTRUCTS:
            allowed[name] = max(allowed[name], 1000 * ALWAYS_ALLOWED / self.statements)
        judged = AIM if self.statements >= FEW_STATEMENTS else CONSTRUCTS
        return [name for name in judged if self.figures[name] > allowed[name]]

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {figure:.3g}" for name, figure in self.figures.items())
        return (f"{self.lines} lines ({self.packaging:.1%} packaging, {self.comments:.1f} % comments), {self.tokens} "
                f"tokens, {self.functions} functions, {self.statements} statements: {figures}")

def density(source: str) -> Density:
    """Measure a module, or a sequence of whole statements."""
    tree = ast.parse(source)
    lines = source.splitlines()
    docstring_nodes = docstrings(tree)
    positions = token_positions(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    packaging_lines = sum(not line.strip() for line in lines)
    packaging_lines += sum(node.end_lineno - node.lineno + 1 for node in docstring_nodes)
    for node in [*functions, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        packaging_lines += node.body[0].lineno - first
    comments = sum(line.lstrip().startswith("#") for line in lines)

    # Type annotations are not counted, because they document names and do not make a statement denser.
    sizes = statement_sizes(tree, without_annotations(tree, positions)) or [0]
    total = len(sizes)
    counts = count_constructs(tree)
    figures = dict(mean=sum(sizes) / total, p90=sizes[int(total * 0.9)])
    figures |= {name: 1000 * counts[name] / total for name in CONSTRUCTS}
    return Density(len(lines), len(positions) - len(docstring_nodes), len(functions),
                   packaging_lines / max(1, len(lines)), 100 * comments / max(1, len(lines)), total, figures)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        found = density(path.read_text("utf-8"))
        print(f"{path}: {found}; misses {found.misses()}")
