"""Style of the trainer: size, density, order of sections, calls to earlier sections only, no side effects on import."""
import ast
import builtins
import os
import re
import subprocess
import symtable
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
from common import PROCESS_TIMEOUT_S, ROOT
from density import AIM, CONSTRUCTS, density, docstrings
from forked_ranks import Rank

import train_gpt as tg

pytestmark = pytest.mark.style           # judges this repository's main; a fork may have other sizes

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
MIN_MEAN_TOKENS = 12                                                 # per statement; AIM has the maximum
MAX_FUNCTION, MAX_LONG_FUNCTION = 60, 120
MAX_TREE_BYTES = 45_000_000
LONG_FUNCTIONS = ("train",)                                          # the outline of a run; kernels may be as long
SECTIONS = ("Config", "Schedule", "Data", "Kernels", "Rows", "Batches", "Model", "Optimizer", "Engine", "Loop", "Main")
BANNER = re.compile(r"# ====== Section (\d+): (\w+) =+$")
STARTS = [number for number, line in enumerate(LINES, 1) if BANNER.match(line)]
TOOLS = [ROOT / "records/__main__.py", *sorted((ROOT / "records/tools").glob("*.py"))]
STRICT_FILES = [SOURCE, *sorted((ROOT / "data").glob("*.py")), *TOOLS]  # must meet the aim of density
TESTS = sorted((ROOT / "tests").glob("**/*.py"))
TEST_SLACK = 1.2                                                     # factor on the aim, for tests

def section_number(line: int) -> int:
    """Return the number of the section of a line; 0 above the first banner."""
    return sum(start <= line for start in STARTS)


# ---- Sizes ----------------------------------------------------------------------------------------------------------
def test_size__statements_functions_and_tokens_of_a_statement() -> None:
    """Lines, tokens, docstrings and comments have no limit, because a limit would make sentences too short."""
    statements = sum(isinstance(node, ast.stmt) for node in NODES) - len(docstrings(TREE))
    assert statements <= MAX_STATEMENTS and len(FUNCTIONS) <= MAX_FUNCTIONS, (statements, len(FUNCTIONS))
    assert MIN_MEAN_TOKENS <= density(TEXT).figures["mean"] <= AIM["mean"], density(TEXT)
    for node in FUNCTIONS:
        long = node.name in LONG_FUNCTIONS or node.name.endswith("_kernel")
        limit = MAX_LONG_FUNCTION if long else MAX_FUNCTION
        assert node.end_lineno - node.lineno < limit, node.name

def test_density__of_every_file(capsys) -> None:
    """Checks the density of trainer and tools, and, with slack, of tests.

    Prints it for all files, so that the cost of a change is visible.
    """
    found = []
    missed = {}
    for path in [*STRICT_FILES, *TESTS]:
        lines = path.read_text("utf-8").splitlines()
        assert max(map(len, lines), default=0) <= MAX_COLUMNS, path.name
        of_file = density("\n".join(lines))
        misses = of_file.misses(TEST_SLACK if path in TESTS else 1.0)
        if misses:
            missed[path.name] = misses
        found.append(f"{path.relative_to(ROOT)}: {of_file}")
    ends = [*STARTS[1:], len(LINES) + 1]
    for section, first, end in zip(SECTIONS, STARTS, ends):
        of_section = density("\n".join(LINES[first - 1:end - 1]))
        found.append(f"  {section}: {of_section}")
    with capsys.disabled():
        print(f"\nDensity: aim {AIM}", *found, sep="\n")
    assert not missed, "denser than the aim: split statements"

def test_size__of_tracked_files() -> None:
    """The sizes of all files that `git ls-files` lists add up to less than the limit."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
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
    assert sum(sizes.values()) <= MAX_TREE_BYTES, f"compress logs; the largest files: {[*map(str, largest)]}"

PACKED = dict(pairs="a, b = x, y", nested="a = [[y for y in x] for x in z]", ternaries="a = x if y else z",
              lambdas="a = lambda: x", walrus="print(a := x)", logic="a = x and y")

@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_density__each_packed_construct(construct) -> None:
    found = density("def f():\n" + "    b = x\n" * 3 + f"    {PACKED[construct]}\n" * 3)
    counts = [found.figures[name] * 7 / 1000 for name in CONSTRUCTS]
    assert counts == pytest.approx([3 * (name == construct) for name in CONSTRUCTS])
    assert (found.statements, found.misses()) == (7, [construct])


# ---- Statements -----------------------------------------------------------------------------------------------------
def test_source__one_statement_a_line_and_no_hidden_state() -> None:
    """No semicolon, no body after a colon, no global, and no assert without a message.

    Only the last section reads the environment.
    """
    statements = [node for node in NODES if isinstance(node, ast.stmt)]
    assert not [node.lineno for node in statements if LINES[node.lineno - 1][:node.col_offset].strip()]
    assert not [node.lineno for node in NODES if isinstance(node, (ast.Global, ast.Nonlocal))]
    assert not [node.lineno for node in NODES if isinstance(node, ast.Assert) and node.msg is None]
    environ = [node.lineno for node in NODES
               if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]
    assert len([line for line in environ if section_number(line) == 0]) == 1
    assert {section_number(line) for line in environ} == {0, len(SECTIONS)}

def test_source__no_code_in_strings_and_nothing_from_the_repository() -> None:
    """No code in strings is executed, and loaded files run no code."""
    called = {ast.unparse(node.func) for node in CALLS}
    assert not called & {"exec", "eval", "compile", "__import__", "runpy.run_path", "pickle.load", "pickle.loads"}
    loads = [ast.unparse(node) for node in CALLS if ast.unparse(node.func) == "torch.load"]
    assert loads and all("weights_only=True" in load for load in loads)
    for node in NODES:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") > 3:
            with pytest.raises(SyntaxError):                         # it is prose
                ast.parse(textwrap.dedent(node.value))
    project_modules = {path.stem for folder in ("data", "records", "tests") for path in (ROOT / folder).glob("**/*.py")}
    imported = {node.module for node in NODES if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in NODES if isinstance(node, ast.Import) for alias in node.names}
    assert not {name.split(".")[0] for name in imported} & (project_modules | {"data", "records", "tests", "tools"})


# ---- Sections -------------------------------------------------------------------------------------------------------
def test_sections__in_order_with_banner_plan_and_tests() -> None:
    banners = [line for line in LINES if line.startswith("# ===")]
    numbered = [(str(k), name) for k, name in enumerate(SECTIONS, 1)]
    assert [BANNER.match(line).groups() for line in banners] == numbered
    assert {len(line) for line in banners} == {MAX_COLUMNS}
    assert re.findall(r"^ +(\d+) (\w+) ", ast.get_docstring(TREE, clean=False), re.M) == numbered
    assert not [section for section in SECTIONS if not (ROOT / f"tests/test_{section.lower()}.py").exists()]

def names_used(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a module-level statement reads, including annotations and nested scopes."""
    is_module = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (is_module or s.is_global())}
    return names.union(*map(names_used, table.get_children()))

def test_sections__use_only_names_that_are_defined_above() -> None:
    """This holds inside sections too. Only methods of one class may use each other in any order, and a function itself.
    """
    defined = {}                         # name -> first line that defines it
    uses = []
    for node in TREE.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        table = symtable.symtable("\n".join(LINES[first - 1:node.end_lineno]), "statement", "exec")
        uses.append((first, names_used(table)))
        for symbol in table.get_symbols():
            if symbol.is_assigned() or symbol.is_imported():
                defined.setdefault(symbol.get_name(), first)
    assert len(defined) > 100 and section_number(defined["StepConfig"]) == 2 and section_number(defined["np"]) == 0
    known = defined.keys() | set(dir(builtins)) | {"__file__", "__name__"}
    assert not set().union(*(used for _, used in uses)) - known, "undefined names"
    below = [(line, name, defined[name]) for line, used in uses for name in used if defined.get(name, 0) > line]
    assert not below, "line of the use, name, line of the definition"

def test_train_step__five_calls_and_a_train_that_hides_none() -> None:
    """A training step is visible in one place, and the functions that outline a run define no inner functions."""
    functions = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}
    calls = [ast.unparse(node.func) for node in ast.walk(functions["train_step"]) if isinstance(node, ast.Call)]
    assert sorted(calls) == sorted(["engine.forward_backward", "loader.next", "loader.next_plans",
                                    "engine.prefetch_rows", "engine.optim_step", "engine.fetch_rows"])
    order = [ast.unparse(node.value.func).partition(".")[2] for node in functions["train_step"].body
             if isinstance(node, (ast.Assign, ast.Expr)) and isinstance(node.value, ast.Call)]
    assert order == ["forward_backward", "next_plans", "prefetch_rows", "optim_step", "fetch_rows"]
    for name in ("train", "train_loop", "train_step"):
        inner = [node for node in ast.walk(functions[name])
                 if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef))]
        assert inner == [functions[name]], f"{name}: {[ast.unparse(node)[:60] for node in inner[1:]]}"

Call = tuple[str, int, str, int]         # caller and its section, callee and its section

def calls_between_sections(run: Callable[[], Any]) -> set[Call]:
    """Return the calls of trainer code while `run` is running, on every thread, including resumptions of generators.

    The caller is the nearest frame of the trainer up the stack, because torch and the library call back. If there is
    none, as on a thread of a pool or of autograd, there is no caller.
    """
    sections: dict[CodeType, int] = {}   # 0: not the trainer's
    calls = set()

    def section_of(code: CodeType) -> int:
        if code not in sections:
            sections[code] = section_number(code.co_firstlineno) if code.co_filename == tg.__file__ else 0
        return sections[code]

    def note_call(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not section_of(frame.f_code):
            return
        caller = frame.f_back
        while caller is not None and not section_of(caller.f_code):
            caller = caller.f_back
        if caller is not None:
            calls.add((caller.f_code.co_qualname, section_of(caller.f_code), frame.f_code.co_qualname,
                       section_of(frame.f_code)))

    threading.setprofile(note_call)
    sys.setprofile(note_call)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls

def traced_runs(rank: Rank) -> set[Call]:
    """Trace warm-up and training in all stages, untying, validation, checkpoints, saves, a resumed run, a time budget.
    """
    comm = rank.comm()
    source = Path(tg.__file__).read_bytes()
    calls = set()

    def trace(name: str, *flags: str) -> None:
        cfg = tg.load_config(["--device=cpu", f"--run_dir={rank.folder}/{name}", *flags])
        calls.update(calls_between_sections(lambda: tg.train(cfg, comm, SimpleNamespace(log=None), source)))

    trace("first", "--preset=tiny", "--tables=trigram_embed 3 300; four_embed 4 300 1 1 host 4", "--max_steps=8",
          "--checkpoint_every=4", "--val_every=4", "--sample_tokens=1", "--debug_rows=1", f"--save={rank.folder}/save")
    trace("resumed", f"--resume={rank.folder}/first", "--max_steps=0")
    trace("budget", "--preset=tiny", "--time_budget=1", "--epochs=0", "--micro_batch_size=2")
    return calls

@pytest.mark.parametrize("world", [1, 2])
def test_sections__no_code_calls_a_later_section(ranks, world) -> None:
    """However it was passed or stored, no function, generator, closure or method of a later section is called."""
    calls = set().union(*ranks(world, traced_runs))
    named = {(caller, callee) for caller, _, callee, _ in calls}
    seen = {("train_step", "Engine.optim_step"), ("Engine.forward_backward", "GPT.losses"),
            ("Engine.forward_backward", "first_order_only.<locals>.wrapper"),         # called through autograd
            ("train_loop", "write_checkpoint"), ("schedule_cycle", "Clock.predict_next_cycle_start_ms"),
            ("finish_run", "save_weights"),
            ("Loader._build_cycle", "build_batches"), ("RowwiseTableGroup.update", "HostRowStore.write_back")}
    assert seen <= named, "the traced runs must contain these calls"
    downward = sorted(call for call in calls if call[3] > call[1])
    assert not downward, downward


# ---- Import ---------------------------------------------------------------------------------------------------------
def test_import__definitions_and_constants_only() -> None:
    """The only exceptions run when the file is the main program: at its end, and before torch is imported."""
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

def test_import__in_a_bare_process_does_nothing(tmp_path) -> None:
    """With an empty environment and directory: no file, process group, device, output, thread or signal handler."""
    command = [sys.executable, "-B", "-c", IMPORT, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert os.listdir(tmp_path) == []
