"""The house: density, rooms in order, each using only rooms above it, and nothing that happens at import."""
import ast
import builtins
import functools
import io
import os
import re
import signal
import subprocess
import sys
import symtable
import textwrap
import tokenize

import pytest
from common import ROOT
from density import AIM, CONSTRUCTS, density

import train_gpt as tg

pytestmark = pytest.mark.house           # of this repository's main: a fork may have other sizes

SOURCE = ROOT / "train_gpt.py"
MAX_COLUMNS = 120
MAX_LINES, MAX_TOKENS = 4_662, 39_880
MAX_FUNCTION, MAX_LONG_FUNCTION = 60, 120
LONG_FUNCTIONS = ("train",)                                          # the outline of a run; kernels may be as long
ROOMS = ("Config", "Schedule", "Data", "Kernels", "Model", "Rows", "Optimizer", "Executor", "Race", "Main")
BANNER = re.compile(r"# ====== Room (\d+): (\w+) =+$")
# What may be called while the file is imported: making constants, and declaring.
CALLS_AT_IMPORT = {
    "Layer", "Stage", "stage._replace", "NgramTable", "dict", "set", "tuple", "len", "sum", "enumerate", "replace",
    "functools.partial", "dataclass", "field", "torch.no_grad", "torch.library.custom_op", "re.compile",
    "float", "np.float32", "staticmethod", "_data", "_model", "_schedule", "_optim", "_run"}


@functools.cache
def text() -> str:
    return SOURCE.read_text("utf-8")


@functools.cache
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


TOOLS = [ROOT / "records/__main__.py", *sorted((ROOT / "records/tools").glob("*.py"))]
HELD = [SOURCE, *sorted((ROOT / "data").glob("*.py")), *TOOLS]         # to the aim of density
TESTS = sorted((ROOT / "tests").glob("**/*.py"))
TEST_SLACK = 1.2                                                     # a test may be denser by that factor
# Written before there was an aim: their density is printed, not held. Whoever airs one takes it off this list.
DENSE_TESTS = """
    bench_rows common faults make_vectors oracle test_ablate
    test_bench test_config test_data test_device test_executor test_faults
    test_gpu test_house test_kernels test_logs test_main test_model test_optimizer test_oracle test_race
    test_ranks test_rows test_runs test_schedule test_shelf
    test_verdict
""".split()


def test_no_function_is_too_long_and_no_line_too_wide():
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions()}
    too_long = {name: size for name, size in long.items()
                if size > (MAX_LONG_FUNCTION if name in LONG_FUNCTIONS or name.endswith("_kernel") else MAX_FUNCTION)}
    assert not too_long
    wide = {(path.name, number) for path in [*HELD, *TOOLS, *TESTS]
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if len(line) > MAX_COLUMNS}
    assert not wide


def tokens(source: str) -> list[tokenize.TokenInfo]:
    """What a reader reads: names, operators, numbers, strings; neither comments nor docstrings."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in found if token.type in kinds and token.start not in docstrings]


def test_the_measure_of_tokens():
    assert [token.string for token in tokens('"""text"""\ndef f(x):\n    """text"""\n    return "a" + x  # why\n')] == [
        "def", "f", "(", "x", ")", ":", "return", '"a"', "+", "x"]


def test_the_file_is_read_in_an_evening():
    assert len(text().splitlines()) <= MAX_LINES
    assert len(tokens(text())) <= MAX_TOKENS


def test_one_statement_a_line():
    """No semicolon, and no body after a colon: every statement is the first on its line."""
    lines = text().splitlines()
    statements = [node for node in ast.walk(ast.parse(text())) if isinstance(node, ast.stmt)]
    assert not [node.lineno for node in statements if lines[node.lineno - 1][:node.col_offset].strip()]


def test_no_code_in_strings_and_nothing_from_the_repository():
    """Nothing is executed that is not written here as code."""
    tree = ast.parse(text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"exec", "eval", "compile", "__import__", "runpy.run_path", "pickle.load", "pickle.loads"}
    unsafe = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and
              ast.unparse(node.func) == "torch.load" and "weights_only=True" not in ast.unparse(node)]
    assert not unsafe
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") > 3:
            with pytest.raises(SyntaxError):                         # prose
                ast.parse(textwrap.dedent(node.value))
    own = {path.stem for folder in ("data", "records", "tests") for path in (ROOT / folder).glob("**/*.py")}
    own |= {"data", "records", "tests", "tools"}
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    assert not imported & own


def calls_of(name: str) -> set[str]:
    node, = [node for node in functions() if node.name == name]
    return {ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(node) if isinstance(call, ast.Call)}


def test_main_is_an_outline():
    """Four calls from the command line to the model, and a reason before each paragraph of the run."""
    path = ("main", "train", "race", "train_step", "forward_backward")
    assert all(inner in calls_of(outer) for outer, inner in zip(path, path[1:]))
    node, = [node for node in functions() if node.name == "train"]
    lines = text().splitlines()[node.body[0].end_lineno:node.end_lineno]          # after the docstring
    paragraphs = [after.strip() for line, after in zip(lines, lines[1:]) if not line.strip() and after.strip()]
    silent = [line for line in paragraphs if not line.startswith(("#", "def ", "restore = ", "report("))]
    assert not silent and len(paragraphs) >= 8


def test_density_of_every_file(capsys):
    """Printed for all, so that a change shows its price; those of HELD and new tests are held to the aim."""
    lines = []
    missed = {}
    for path in [*HELD, *TESTS]:
        source = path.read_text("utf-8")
        found = density(source)
        name = str(path.relative_to(ROOT))
        new_test = path in TESTS and path.stem not in DENSE_TESTS
        if path in HELD or new_test:
            misses = found.misses(TEST_SLACK if new_test else 1.0)
            if misses:
                missed[name] = misses
        else:
            name += " (not held)"
        lines.append(f"{name}: {len(source.splitlines())} lines, {found}")
        if path == SOURCE:
            lines += density_of_rooms()

    with capsys.disabled():
        print("\nDensity: aim " + ", ".join(f"{name} {figure:g}" for name, figure in AIM.items()))
        print("\n".join(lines))
    assert not missed, "denser than the aim: one thought a statement"


def density_of_rooms() -> list[str]:
    lines = text().splitlines()
    found = []
    for number, (name, first, last) in enumerate(rooms()):
        room = "\n".join(lines[first - 1:last])
        found.append(f"  room {number} {name}: {last - first + 1} lines, {density(room)}")
    return found


PACKED = dict(pairs="a, b = x, y", nested="a = [[y for y in x] for x in z]", ternaries="a = x if y else z",
              lambdas="a = lambda: x", walrus="print(a := x)", logic="a = x and y")


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_the_meter_counts_each_packed_construct(construct):
    function = "def f():\n" + "    b = x\n" * 3 + f"    {PACKED[construct]}\n" * 3
    found = density(function)
    expected = dict.fromkeys(CONSTRUCTS, 0) | {construct: 3}
    assert (found.statements, found.counts, found.misses()) == (7, expected, [construct])


def test_the_meter_measures_statements():
    """Heads of compound statements count, docstrings and tables do not. A fifth of long lines lifts mean and p90."""
    source = '"""text"""\nTABLE = (1, 2, 3, 4, 5, 6)\ndef f(x):\n    """text"""\n    if x:\n        return x + 1\n'
    found = density(source)
    assert (found.statements, found.figures["mean"]) == (3, (6 + 3 + 4) / 3)

    short, long = "    g(a)\n", "    g(" + "a, " * 30 + ")\n"
    assert density("def f():\n" + 100 * short).misses() == []
    assert density("def f():\n" + 80 * short + 20 * long).misses() == ["mean", "p90"]


def test_tools_import_neither_the_trainer_nor_torch():
    for path in TOOLS:
        found = {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text("utf-8")))
                 for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                              [node.module] if isinstance(node, ast.ImportFrom) else [])}
        assert not found & {"train_gpt", "torch", "tests", "data"}, path.name


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


# What the file does before torch is imported if it is the program.
FRONT = """
if __name__ == '__main__':
    os.environ.setdefault('GOMP_SPINCOUNT', '5000')
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
"""


def front_door() -> ast.stmt:
    """The one statement of room 0 that is neither a definition nor a constant."""
    front, = [node for node in ast.parse(text()).body[:-1] if isinstance(node, (ast.If, ast.Try))]
    return front


def test_what_the_front_door_does_before_torch_is_imported():
    assert ast.unparse(front_door()) == FRONT.strip()
    assert "GOMP_SPINCOUNT" in text()[:text().index("import numpy")]


def test_nothing_is_called_at_import_but_what_makes_constants():
    docstring, *body, guard = ast.parse(text()).body
    body = [node for node in body if not isinstance(node, (ast.If, ast.Try))]
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
    assert [line for line in environ if room_of(line) == 0] == [front_door().body[0].lineno]
    assert {room_of(line) for line in environ} == {0, len(ROOMS)}


def test_every_assert_has_a_message():
    silent = [node.lineno for node in ast.walk(ast.parse(text())) if isinstance(node, ast.Assert) and node.msg is None]
    assert not silent


def test_every_room_has_its_tests():
    missing = [room for room in ROOMS if not (ROOT / f"tests/test_{room.lower()}.py").exists()]
    assert not missing


def test_tables_name_what_exists():
    names = set(tg.Config.__dataclass_fields__)
    assert tg.NOT_MATHEMATICS | tg.NOT_INHERITED | tg.MAY_CHANGE <= names
    assert {layer.add for layer in tg.LAYERS} - {""} <= {layer.keep_as for layer in tg.LAYERS}


# ---- The front door: without packages, and while they are being imported --------------------------------------------

FAKE_NUMPY = """
import os, signal, sys, time
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules, flush=True)
if "INTERRUPT" in os.environ:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)                                                  # Python calls handlers between two statements
raise ImportError("No module named 'numpy'")
"""
FRONT_DOOR = {                               # name: (environment, status, first words of stdout, what stderr must hold)
    "without packages": ({}, 1, "5000 False", ("ImportError: No module named 'numpy'",)),
    "the user's spin count": (dict(GOMP_SPINCOUNT="7"), 1, "7 False", ("ImportError",)),
    "Ctrl-C": (dict(INTERRUPT="1"), -signal.SIGINT, "5000 False", ()),
    "Ctrl-C that is ignored": (dict(INTERRUPT="1"), 1, "5000 False", ("ImportError",)),
}


def bare_python(folder, *arguments: str, deaf: bool = False, **environment: str) -> subprocess.CompletedProcess:
    """A process that finds FAKE_NUMPY before any other package; deaf: SIGINT is ignored, as in the background."""
    (folder / "numpy.py").write_text(FAKE_NUMPY)

    def hear() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.SIG_DFL)
    return subprocess.run([sys.executable, *arguments], cwd=folder, preexec_fn=hear, capture_output=True, text=True,
                          env=dict(PYTHONPATH=f"{folder}:{ROOT}", PYTHONDONTWRITEBYTECODE="1") | environment)


@pytest.mark.parametrize("case", FRONT_DOOR)
def test_the_program_without_packages(tmp_path, case):
    environment, status, said, parts = FRONT_DOOR[case]
    done = bare_python(tmp_path, str(SOURCE), "--preset=tiny", deaf="ignored" in case, **environment)
    assert (done.returncode, done.stdout.strip()) == (status, said), done.stderr
    assert all(part in done.stderr for part in parts)
    assert bool(parts) == bool(done.stderr), "an interrupt is quiet"
    assert os.listdir(tmp_path) == ["numpy.py"]


def test_an_import_without_packages_raises_what_is_missing(tmp_path):
    """As a module it sets nothing, and the error is the import's own."""
    done = bare_python(tmp_path, "-c", "import train_gpt")
    assert (done.returncode, done.stdout.strip()) == (1, "None False")
    assert done.stderr.rstrip().endswith("ImportError: No module named 'numpy'")
