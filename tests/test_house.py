"""The house: sizes, rooms in order, each using only rooms above it, and nothing that happens at import."""
import ast
import builtins
import os
import re
import subprocess
import sys
import symtable

from common import ROOT

import train_gpt as tg

SOURCE = ROOT / "train_gpt.py"
MAX_LINES, MAX_COLUMNS = 2450, 120
MAX_TOOL_LINES = 2000                                                # of all tools in records/ together
MAX_FUNCTION, MAX_LONG_FUNCTION = 60, 100
LONG_FUNCTIONS = ("hidden", "losses", "race")                        # the forward pass and the loop
ROOMS = ("Config", "Schedule", "Data", "Kernels", "Model", "Rows", "Optimizer", "Executor", "Race", "Main")
BANNER = re.compile(r"# ====== Room (\d+): (\w+) =+$")
# What may be called while the file is imported: making constants, and declaring.
CALLS_AT_IMPORT = {"Layer", "Stage", "dict", "tuple", "len", "sum", "enumerate", "replace", "functools.partial",
                   "dataclass", "torch.no_grad", "torch.library.custom_op", "_data", "_model", "_schedule", "_optim",
                   "_run"}


def text() -> str:
    return SOURCE.read_text("utf-8")


def rooms() -> list[tuple[str, int, int]]:
    """(name, first line, last line) of each room; what is above the first banner is room 0."""
    lines = text().splitlines()
    starts = [(match[2], number) for number, line in enumerate(lines, 1) if (match := BANNER.match(line))]
    ends = [number - 1 for _, number in starts[1:]] + [len(lines)]
    return [("Front door", 1, starts[0][1] - 1)] + [(name, start, end) for (name, start), end in zip(starts, ends)]


def room_of(line: int) -> int:
    return next(number for number, (_, start, end) in enumerate(rooms()) if start <= line <= end)


def functions() -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(text())) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_sizes(capsys):
    sizes = [f"{name} {end - start + 1}" for name, start, end in rooms()]
    with capsys.disabled():
        print(f"\ntrain_gpt.py: {len(text().splitlines())} lines of {MAX_LINES}: {', '.join(sizes)}")
    assert len(text().splitlines()) <= MAX_LINES
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions()}
    too_long = {name: size for name, size in long.items()
                if size > (MAX_LONG_FUNCTION if name in LONG_FUNCTIONS or name.endswith("_kernel") else MAX_FUNCTION)}
    assert not too_long
    assert not [number for number, line in enumerate(text().splitlines(), 1) if len(line) > MAX_COLUMNS]


TOOLS = [ROOT / "records/__main__.py", *sorted((ROOT / "records/tools").glob("*.py"))]


def test_tests_and_tools_are_at_most_as_wide():
    wide = {(path.name, number) for path in [*(ROOT / "tests").glob("*.py"), *TOOLS]
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if len(line) > MAX_COLUMNS}
    assert not wide


def test_the_tools_together_stay_small(capsys):
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in TOOLS}
    with capsys.disabled():
        print(f"\nrecords/: {sum(sizes.values())} lines of {MAX_TOOL_LINES}: {sizes}")
    assert sum(sizes.values()) <= MAX_TOOL_LINES


def test_tools_import_neither_the_trainer_nor_torch_but_to_calibrate():
    for path in TOOLS:
        found = {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text("utf-8")))
                 for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                              [node.module] if isinstance(node, ast.ImportFrom) else [])}
        assert not found & ({"train_gpt"} if path.name == "calibrate.py" else {"train_gpt", "torch"}), path.name


def test_rooms_stand_in_order_with_their_banner():
    banners = [line for line in text().splitlines() if line.startswith("# ===")]
    assert [BANNER.match(line).groups() for line in banners] == [(str(k), name) for k, name in enumerate(ROOMS, 1)]
    assert {len(line) for line in banners} == {MAX_COLUMNS}
    plan = re.findall(r"^ +(\d+) (\w+) ", ast.get_docstring(ast.parse(text()), clean=False), re.M)
    assert plan == [(str(k), name) for k, name in enumerate(ROOMS, 1)], "the floor plan of the docstring"


def names_used(source: str) -> set[str]:
    """Global names that a module-level statement reads, annotations included, nested scopes too."""
    def walk(table: symtable.SymbolTable) -> set[str]:
        top = table.get_type() == "module"
        found = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
        return found.union(*map(walk, table.get_children()))
    return walk(symtable.symtable(source, "statement", "exec"))


def test_a_room_uses_only_rooms_above():
    lines, home, uses = text().splitlines(), {}, []
    for node in ast.parse(text()).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        source = "\n".join(lines[first - 1:node.end_lineno])
        table = symtable.symtable(source, "statement", "exec")
        defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
        uses.append((first, names_used(source), defined))
        home |= {name: home.get(name, room_of(first)) for name in defined}
    assert len(home) > 100 and home["Values"] == 2 and home["np"] == 0
    below = [f"line {line} (room {room_of(line)}) uses {name} of room {home[name]}"
             for line, used, _ in uses for name in sorted(used) if home.get(name, 0) > room_of(line)]
    assert not below
    unknown = {name for _, used, _ in uses for name in used} - set(home) - set(dir(builtins)) - {"__file__", "__name__"}
    assert not unknown, "a name that is defined nowhere"


def calls_at_import(node: ast.AST) -> list[str]:
    """Names of what is called when a statement is executed: not in function bodies, but in decorators and defaults."""
    if isinstance(node, ast.Lambda):
        return []
    if isinstance(node, ast.FunctionDef):
        parts = [*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)]
    else:
        parts = list(ast.iter_child_nodes(node))
    own = [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
    return own + [name for part in parts for name in calls_at_import(part)]


def test_nothing_is_called_at_import_but_what_makes_constants():
    docstring, *body, guard = ast.parse(text()).body
    called = {name for node in body for name in calls_at_import(node)}
    assert called <= CALLS_AT_IMPORT, f"not on the list: {called - CALLS_AT_IMPORT}"
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    assert all(isinstance(node, kinds) for node in body), "definitions and constants only"
    assert ast.unparse(guard.test) == "__name__ == '__main__'"


IMPORT = """
import os, signal, sys, threading
before = signal.getsignal(signal.SIGTERM), dict(os.environ)
sys.path.insert(0, sys.argv[1])
import torch
rng = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
import train_gpt
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
assert (signal.getsignal(signal.SIGTERM), dict(os.environ)) == before and threading.active_count() == 1
assert torch.equal(torch.get_rng_state(), rng[0]) and (torch.get_num_threads(), torch.get_default_dtype()) == rng[1:]
assert os.listdir() == []
"""


def test_import_in_a_bare_process_does_nothing(tmp_path):
    """No environment, an empty folder: no file, process group, device, output, thread or signal handler."""
    command = [sys.executable, "-B", "-c", IMPORT, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert os.listdir(tmp_path) == []


def test_no_global_and_the_environment_only_in_the_last_room():
    tree = ast.parse(text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal))]
    environ = [node.lineno for node in ast.walk(tree)
               if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]
    assert environ and {room_of(line) for line in environ} == {len(ROOMS)}


def test_every_assert_has_a_message():
    silent = [node.lineno for node in ast.walk(ast.parse(text())) if isinstance(node, ast.Assert) and node.msg is None]
    assert not silent


def test_every_room_has_its_tests():
    missing = [room for room in ROOMS if not (ROOT / f"tests/test_{room.lower()}.py").exists()]
    assert not missing


def test_tables_name_what_exists():
    """Settings with a least value are fields; orders, presets and choices hold no stale name."""
    names = set(tg.Config.__dataclass_fields__)
    assert set(tg.LEAST) <= names
    assert {layer.add for layer in tg.LAYERS} - {""} <= {layer.keep_as for layer in tg.LAYERS}
