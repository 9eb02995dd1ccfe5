"""Measure the size of statements: python tests/density.py FILES

A statement is a simple statement or the head of a compound one (`if ...:`), without docstrings and literal tables of a
module or class. Sizes are in tokens outside type annotations: the mean, and the 90th percentile.
"""
import ast
import bisect
import io
import sys
import tokenize
from pathlib import Path

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
MOST_MEAN, MOST_P90 = 13.5, 24

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

def density(source: str) -> tuple[float, int]:
    """Return mean and 90th percentile of the sizes of statements."""
    tree = ast.parse(source)
    sizes = statement_sizes(tree, without_annotations(tree, token_positions(source))) or [0]
    return sum(sizes) / len(sizes), sizes[int(len(sizes) * 0.9)]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        print(path, "mean {:.1f}, p90 {}".format(*density(path.read_text("utf-8"))))
