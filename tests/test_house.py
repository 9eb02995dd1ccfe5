"""The house: size, density, rooms in order, each using only rooms above it, and nothing that happens at import."""
import ast
import builtins
import os
import re
import subprocess
import symtable
import sys
import textwrap

import pytest
from common import PATIENCE, ROOT
from density import AIM, CONSTRUCTS, density, docstrings

import train_gpt as tg

pytestmark = pytest.mark.house           # of this repository's main: a fork may have other sizes

SOURCE = ROOT / "train_gpt.py"
TEXT = SOURCE.read_text("utf-8")
LINES = TEXT.splitlines()
TREE = ast.parse(TEXT)
NODES = list(ast.walk(TREE))
FUNCTIONS = [node for node in NODES if isinstance(node, ast.FunctionDef)]
CALLS = [node for node in NODES if isinstance(node, ast.Call)]
MAX_COLUMNS = 120
MAX_STATEMENTS = 3_150
MAX_FUNCTIONS = 350
MIN_MEAN_TOKENS = 12                                                 # a statement; the most is in AIM
MAX_FUNCTION, MAX_LONG_FUNCTION = 60, 120
MAX_TREE_BYTES = 45_000_000
LONG_FUNCTIONS = ("train",)                                          # the outline of a run; kernels may be as long
ROOMS = ("Config", "Schedule", "Data", "Kernels", "Model", "Rows", "Optimizer", "Executor", "Race", "Main")
BANNER = re.compile(r"# ====== Room (\d+): (\w+) =+$")
STARTS = [number for number, line in enumerate(LINES, 1) if BANNER.match(line)]
TOOLS = [ROOT / "records/__main__.py", *sorted((ROOT / "records/tools").glob("*.py"))]
HELD = [SOURCE, *sorted((ROOT / "data").glob("*.py")), *TOOLS]        # to the aim of density
TESTS = sorted((ROOT / "tests").glob("**/*.py"))
TEST_SLACK = 1.2                                                     # a test may be denser by that factor

def room_of(line: int) -> int:
    """Return the number of the room of a line: 0 above the first banner."""
    return sum(start <= line for start in STARTS)


# ---- Sizes ----------------------------------------------------------------------------------------------------------
def test_size__statements_functions_and_tokens_of_a_statement():
    """Lines, tokens, docstrings and comments have no limit: a limit on them makes sentences shorter than is good."""
    statements = sum(isinstance(node, ast.stmt) for node in NODES) - len(docstrings(TREE))
    assert statements <= MAX_STATEMENTS and len(FUNCTIONS) <= MAX_FUNCTIONS, (statements, len(FUNCTIONS))
    assert MIN_MEAN_TOKENS <= density(TEXT).figures["mean"] <= AIM["mean"], density(TEXT)
    for node in FUNCTIONS:
        long = node.name in LONG_FUNCTIONS or node.name.endswith("_kernel")
        limit = MAX_LONG_FUNCTION if long else MAX_FUNCTION
        assert node.end_lineno - node.lineno < limit, node.name

def test_density__of_every_file(capsys):
    """Printed for all, so that a change shows its price: of the trainer, its tools and, with their slack, the tests."""
    found = []
    missed = {}
    for path in [*HELD, *TESTS]:
        lines = path.read_text("utf-8").splitlines()
        assert max(map(len, lines), default=0) <= MAX_COLUMNS, path.name
        of_file = density("\n".join(lines))
        misses = of_file.misses(TEST_SLACK if path in TESTS else 1.0)
        if misses:
            missed[path.name] = misses
        found.append(f"{path.relative_to(ROOT)}: {of_file}")
    ends = [*STARTS[1:], len(LINES) + 1]
    for room, first, end in zip(ROOMS, STARTS, ends):
        of_room = density("\n".join(LINES[first - 1:end - 1]))
        found.append(f"  {room}: {of_room}")
    with capsys.disabled():
        print(f"\nDensity: aim {AIM}", *found, sep="\n")
    assert not missed, "denser than the aim: one thought a statement"

def test_size__of_the_tracked_tree() -> None:
    """The sum of all files that git tracks, as `git ls-files` names them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files are tracked is not known")
    try:
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no git")
    if listed.returncode != 0:
        pytest.skip(f"git ls-files: {listed.stderr.decode().strip()}")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    sizes = {path: path.lstat().st_size for path in paths if os.path.lexists(path)}
    assert len(sizes) > 100
    largest = sorted(sizes, key=sizes.get, reverse=True)[:5]
    assert sum(sizes.values()) <= MAX_TREE_BYTES, f"compress logs and ledgers; the largest: {[*map(str, largest)]}"

PACKED = dict(pairs="a, b = x, y", nested="a = [[y for y in x] for x in z]", ternaries="a = x if y else z",
              lambdas="a = lambda: x", walrus="print(a := x)", logic="a = x and y")

@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_density__each_packed_construct(construct):
    found = density("def f():\n" + "    b = x\n" * 3 + f"    {PACKED[construct]}\n" * 3)
    counts = [found.figures[name] * 7 / 1000 for name in CONSTRUCTS]
    assert counts == pytest.approx([3 * (name == construct) for name in CONSTRUCTS])
    assert (found.statements, found.misses()) == (7, [construct])


# ---- Statements -----------------------------------------------------------------------------------------------------
def test_source__one_statement_a_line_and_no_hidden_state():
    """No semicolon, no body after a colon, no global, no silent assert; the environment is the last room's."""
    statements = [node for node in NODES if isinstance(node, ast.stmt)]
    assert not [node.lineno for node in statements if LINES[node.lineno - 1][:node.col_offset].strip()]
    assert not [node.lineno for node in NODES if isinstance(node, (ast.Global, ast.Nonlocal))]
    assert not [node.lineno for node in NODES if isinstance(node, ast.Assert) and node.msg is None]
    environ = [node.lineno for node in NODES
               if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]
    assert len([line for line in environ if room_of(line) == 0]) == 1
    assert {room_of(line) for line in environ} == {0, len(ROOMS)}

def test_source__no_code_in_strings_and_nothing_from_the_repository():
    """Nothing is executed that is not written here as code; loaded files run none."""
    called = {ast.unparse(node.func) for node in CALLS}
    assert not called & {"exec", "eval", "compile", "__import__", "runpy.run_path", "pickle.load", "pickle.loads"}
    loads = [ast.unparse(node) for node in CALLS if ast.unparse(node.func) == "torch.load"]
    assert loads and all("weights_only=True" in load for load in loads)
    for node in NODES:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") > 3:
            with pytest.raises(SyntaxError):                         # prose
                ast.parse(textwrap.dedent(node.value))
    own = {path.stem for folder in ("data", "records", "tests") for path in (ROOT / folder).glob("**/*.py")}
    imported = {node.module for node in NODES if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in NODES if isinstance(node, ast.Import) for alias in node.names}
    assert not {name.split(".")[0] for name in imported} & (own | {"data", "records", "tests", "tools"})


# ---- Rooms ----------------------------------------------------------------------------------------------------------
def test_rooms__in_order_with_banner_plan_and_tests():
    banners = [line for line in LINES if line.startswith("# ===")]
    numbered = [(str(k), name) for k, name in enumerate(ROOMS, 1)]
    assert [BANNER.match(line).groups() for line in banners] == numbered
    assert {len(line) for line in banners} == {MAX_COLUMNS}
    assert re.findall(r"^ +(\d+) (\w+) ", ast.get_docstring(TREE, clean=False), re.M) == numbered, "the floor plan"
    assert not [room for room in ROOMS if not (ROOT / f"tests/test_{room.lower()}.py").exists()]

def names_used(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a module-level statement reads, annotations included, nested scopes too."""
    top = table.get_type() == "module"
    found = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return found.union(*map(names_used, table.get_children()))

def test_rooms__use_only_rooms_above():
    home = {}
    uses = []
    for node in TREE.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        table = symtable.symtable("\n".join(LINES[first - 1:node.end_lineno]), "statement", "exec")
        uses.append((first, names_used(table)))
        for symbol in table.get_symbols():
            if symbol.is_assigned() or symbol.is_imported():
                home.setdefault(symbol.get_name(), room_of(first))
    assert len(home) > 100 and home["Values"] == 2 and home["np"] == 0
    known = home.keys() | set(dir(builtins)) | {"__file__", "__name__"}
    for line, used in uses:
        assert not used - known, f"line {line}: names that are defined nowhere"
        below = [name for name in used if home.get(name, 0) > room_of(line)]
        assert not below, f"line {line} of room {room_of(line)} uses a room below"

def test_config__tables_name_what_exists():
    assert tg.NOT_MATHEMATICS | tg.NOT_INHERITED | tg.MAY_CHANGE <= set(tg.Config.__dataclass_fields__)


# ---- Import ---------------------------------------------------------------------------------------------------------
def test_import__definitions_and_constants_only():
    """But for what the file does when it is the program: at its end, and before torch is imported."""
    main = [node for node in TREE.body if isinstance(node, ast.If)]
    assert {ast.unparse(node.test) for node in main} == {"__name__ == '__main__'"} and main[-1] is TREE.body[-1]
    assert "GOMP_SPINCOUNT" in TEXT[:TEXT.index("import numpy")]
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    assert all(isinstance(node, kinds) for node in TREE.body[1:] if node not in main)

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

def test_import__in_a_bare_process_does_nothing(tmp_path):
    """No environment, an empty folder: no file, process group, device, output, thread or signal handler."""
    command = [sys.executable, "-B", "-c", IMPORT, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert os.listdir(tmp_path) == []
