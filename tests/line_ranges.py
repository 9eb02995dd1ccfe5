"""Update the line ranges in links to the trainer: python tests/line_ranges.py

Fails if a link such as [Engine.reset](../../train_gpt.py#L1-L2) names nothing in the trainer.
"""
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "records/guide/READING.md"
LINK = re.compile(r"\[`?([\w.]+)`?\]\(([./]*train_gpt\.py)#L\d+-L\d+\)")

def ranges(source: str) -> dict[str, tuple[int, int]]:
    """{name or Class.method: (first line, last line)}"""
    found = {}
    for node in ast.parse(source).body:
        names = [(getattr(node, "name", ""), node)]
        if isinstance(node, ast.ClassDef):
            names += [(f"{node.name}.{method.name}", method) for method in node.body if hasattr(method, "name")]
        elif isinstance(node, ast.Assign):
            names = [(target.id, node) for target in node.targets if isinstance(target, ast.Name)]
        found |= {name: (inner.lineno, inner.end_lineno) for name, inner in names}
    return found

def updated(page: str, source: str) -> str:
    lines = ranges(source)
    missing = {name for name, _ in LINK.findall(page)} - lines.keys()
    if missing:
        sys.exit(f"{PAGE.name} names what train_gpt.py does not have: {', '.join(sorted(missing))}")
    return LINK.sub(lambda link: "[`{0}`]({1}#L{2}-L{3})".format(*link.groups(), *lines[link[1]]), page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text("utf-8"), (ROOT / "train_gpt.py").read_text("utf-8")), "utf-8")
