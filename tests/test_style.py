"""Style of the trainer: size, density, order of sections and what each may name, no side effects on import."""
import ast
import builtins
import io
import os
import re
import subprocess
import symtable
import sys
import textwrap
import tokenize
from collections import Counter
from typing import NamedTuple

import pytest
from common import PROCESS_TIMEOUT_S, ROOT
from density import AIM, CONSTRUCTS, density, docstrings

pytestmark = pytest.mark.style           # judges this repository's main; a fork may have other sizes

SOURCE = ROOT / "train_gpt.py"
TEXT = SOURCE.read_text("utf-8")
LINES = TEXT.splitlines()
TREE = ast.parse(TEXT)
NODES = list(ast.walk(TREE))
FUNCTIONS = [node for node in NODES if isinstance(node, ast.FunctionDef)]
CALLS = [node for node in NODES if isinstance(node, ast.Call)]
MAX_COLUMNS = 120
# Weight of the trainer. Who adds a mechanism removes one: these limits only go down.
MOST = dict(lines=3_560, code=2_565, docstrings_per_100=20, prose_per_code=0.40, statements=2_290, functions=254,
            GPT=650, train_step=1_250)
MIN_MEAN_TOKENS = 12                                                 # per statement; AIM has the maximum
MAX_FUNCTION, MAX_KERNEL, MAX_TRAIN = 45, 60, 80                     # lines
MAX_TREE_BYTES = 45_000_000
RACE = ("Settings", "Schedule", "Model", "Updates", "Step")          # part I
MACHINERY = ("Base", "Kernels", "Data", "Rows", "Batches", "Groups", "Files", "Launch")             # part II
STARTING = ("Files", "Launch")                                       # these start the race, and may name all of it
SECTIONS = RACE + MACHINERY
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
def line_kinds() -> Counter:
    """Count lines of the trainer by kind: code, doc, comment, blank; and the comments behind code, `trailing`."""
    kinds = ["code" if line.strip() else "blank" for line in LINES]
    for node in docstrings(TREE):
        kinds[node.lineno - 1:node.end_lineno] = ["doc"] * (node.end_lineno - node.lineno + 1)
    comments = [token.start[0] for token in tokenize.generate_tokens(io.StringIO(TEXT).readline)
                if token.type == tokenize.COMMENT]
    trailing = 0
    for number in comments:
        if LINES[number - 1].strip().startswith("#"):
            kinds[number - 1] = "comment"
        else:
            trailing += 1
    return Counter(kinds, trailing=trailing)

def line_of(pattern: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if re.match(pattern, line))

def test_size__of_the_trainer() -> None:
    kinds = line_kinds()
    weight = dict(
        lines=len(LINES), code=kinds["code"], docstrings_per_100=100 * kinds["doc"] / kinds["code"],
        prose_per_code=(kinds["doc"] + kinds["comment"] + kinds["trailing"]) / kinds["code"],
        statements=sum(isinstance(node, ast.stmt) for node in NODES) - len(docstrings(TREE)), functions=len(FUNCTIONS),
        GPT=line_of(r"class GPT\b"), train_step=line_of(r"def train_step\b"))
    assert not {name: value for name, value in weight.items() if value > MOST[name]}, weight
    assert MIN_MEAN_TOKENS <= density(TEXT).figures["mean"] <= AIM["mean"], density(TEXT)
    for node in FUNCTIONS:
        limit = MAX_TRAIN if node.name == "train" else MAX_KERNEL if node.name.endswith("_kernel") else MAX_FUNCTION
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
# What part I must contain, {section: names}; a name with a dot is a method.
RACE_NAMES = dict(
    Settings=("LAYERS", "STAGES", "NgramTable", "Config", "PRESETS"),
    Schedule=("StepConfig", "Schedule", "Schedule.at"),
    Model=("TableSpec", "table_specs", "ParameterSpec", "parameter_specs", "GPT"),
    Updates=("polar_express", "normuon_direction", "normuon_update", "cautious_adam", "adam_update", "rowwise_update",
             "Optimizer", "Optimizer.step"),
    Step=("Engine", "Engine.forward_backward", "Engine.optim_step", "Engine.fetch_rows", "Engine.evaluate",
          "Engine.reset", "train_step", "train_loop"))
# Names of part I that the machinery may use, in addition to the constants of the settings.
SHARED = {"Layer", "Stage", "NgramTable", "Config", "StepConfig", "ParameterSpec", "TableSpec", "parameter_specs",
          "table_specs"}
class Statement(NamedTuple):
    """A top-level statement below the first banner: its section, the names it defines, the global names it uses."""
    section: str
    defined: set[str]
    used: set[str]

def names_used(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a module-level statement reads, including annotations and nested scopes."""
    is_module = table.get_type() == "module"
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (is_module or s.is_global())}
    return names.union(*map(names_used, table.get_children()))

def quoted_names(node: ast.stmt) -> set[str]:
    """Return the names in annotations that are written as strings."""
    names = set()
    for annotated in ast.walk(node):
        for annotation in (getattr(annotated, "annotation", None), getattr(annotated, "returns", None)):
            for part in ast.walk(annotation or ast.Module()):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names |= {name.id for name in ast.walk(ast.parse(part.value)) if isinstance(name, ast.Name)}
    return names

def statements_of(source: str) -> list[Statement]:
    """Return the top-level statements of a source whose sections begin with banners; "" is the section above them."""
    lines = source.splitlines()
    matches = {number: BANNER.match(line) for number, line in enumerate(lines, 1)}
    banners = {number: match[2] for number, match in matches.items() if match}
    found = []
    for node in ast.parse(source).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        section = "".join([name for start, name in banners.items() if start <= first][-1:])
        table = symtable.symtable("\n".join(lines[first - 1:node.end_lineno]), "statement", "exec")
        defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        found.append(Statement(section, defined, names_used(table) | quoted_names(node)))
    return found

def wrong_names(statements: list[Statement]) -> dict[str, set[str]]:
    """Return {section of part II: names that it may not use}.

    These are names of sections below it and, except in the sections that start the race, names of part I that are
    neither shared nor constants of the settings.
    """
    section_of = {}
    for statement in statements:
        section_of |= {name: statement.section for name in statement.defined if name not in section_of}
    constants = {name for name, section in section_of.items() if section == RACE[0] and name.isupper()}
    wrong = {}
    for statement in statements:
        if statement.section not in MACHINERY:
            continue
        above = MACHINERY[:MACHINERY.index(statement.section) + 1]
        for name in statement.used & section_of.keys() - SHARED - constants:
            owner = section_of[name]
            allowed = ("", *above, *RACE) if statement.section in STARTING else ("", *above)
            if owner not in allowed:
                wrong.setdefault(statement.section, set()).add(name)
    return wrong

def test_sections__in_order_with_banner_plan_and_tests() -> None:
    banners = [line for line in LINES if line.startswith("# ===")]
    numbered = [(str(k), name) for k, name in enumerate(SECTIONS, 1)]
    assert [BANNER.match(line).groups() for line in banners] == numbered
    assert {len(line) for line in banners} == {MAX_COLUMNS}
    assert re.findall(r"^ +(\d+) (\w+) ", ast.get_docstring(TREE, clean=False), re.M) == numbered
    assert not [section for section in SECTIONS if not (ROOT / f"tests/test_{section.lower()}.py").exists()]

def test_sections__the_race_is_in_part_one() -> None:
    statements = statements_of(TEXT)
    for section, names in RACE_NAMES.items():
        defined = set().union(*(statement.defined for statement in statements if statement.section == section))
        assert set(names) <= defined, f"{section}: {set(names) - defined}"

def test_sections__machinery_names_only_settings_specs_and_what_is_above() -> None:
    statements = statements_of(TEXT)
    defined = set().union(*(statement.defined for statement in statements))
    known = defined | set(dir(builtins)) | {"__file__", "__name__"}
    assert not set().union(*(statement.used for statement in statements)) - known, "undefined names"
    assert len(defined) > 100 and SHARED <= defined
    assert wrong_names(statements) == {}

MACHINE = """
import torch
# ====== Section 1: Settings ===
LAYERS = (1,)
def flag(): pass
# ====== Section 3: Model ===
class GPT: pass
def table_specs(): return blend(torch, LAYERS)
# ====== Section 8: Data ===
def blend(x: {annotation}) -> None:
    {statement}
# ====== Section 9: Rows ===
def rows(): return GPT
# ====== Section 13: Launch ===
def train(): return GPT, flag, rows
"""

@pytest.mark.parametrize("annotation,statement,wrong", [
    ("int", "torch.ones(LAYERS), table_specs()", set()), ("int", "flag()", {"flag"}), ("GPT", "pass", {"GPT"}),
    ("list['GPT']", "pass", {"GPT"}), ("int", "return rows", {"rows"}), ("int", "GPT = rows = x; return GPT", set()),
    ("int", "return lambda: [train for _ in x]", {"train"})])
def test_wrong_names(annotation, statement, wrong) -> None:
    """A section of part II is wrong to name the model, a helper of the settings, or a section below it."""
    statements = statements_of(MACHINE.format(annotation=annotation, statement=statement))
    assert wrong_names(statements) == dict(Rows={"GPT"}) | ({"Data": wrong} if wrong else {})

def test_train_step__five_calls_and_a_train_that_hides_none() -> None:
    """A training step is visible in one place, and the functions that outline a run define no inner functions."""
    functions = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}
    calls = [ast.unparse(node.func) for node in ast.walk(functions["train_step"]) if isinstance(node, ast.Call)]
    assert sorted(calls) == sorted(["engine.forward_backward", "loader.next", "loader.next_plans",
                                    "engine.optim_step", "engine.fetch_rows"])
    order = [ast.unparse(node.value.func).partition(".")[2] for node in functions["train_step"].body
             if isinstance(node, (ast.Assign, ast.Expr)) and isinstance(node.value, ast.Call)]
    assert order == ["forward_backward", "next_plans", "optim_step", "fetch_rows"]
    for name in ("train", "train_loop", "train_step"):
        inner = [node for node in ast.walk(functions[name])
                 if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef))]
        assert inner == [functions[name]], f"{name}: {[ast.unparse(node)[:60] for node in inner[1:]]}"


# ---- Import ---------------------------------------------------------------------------------------------------------
def test_import__definitions_and_constants_only() -> None:
    """The only exceptions run when the file is the main program: at its end, and before torch is imported."""
    main = [node for node in TREE.body if isinstance(node, ast.If)]
    assert {ast.unparse(node.test) for node in main} == {"__name__ == '__main__' and '__file__' in globals()"}
    assert len(main) == 2 and main[-1] is TREE.body[-1]
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
