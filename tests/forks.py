"""Test forks: run the tests that a fork must pass on trainers that were changed on purpose.

    python tests/forks.py [NAME ...] [-- arguments of pytest]

A fork is a patch in tests/forks/; its first line says what changes. Each fork is tested in a temporary copy of the
repository, without the tests that have the mark `recipe`, `style` or `slow`. By default, the files of NUMERICS run;
`-- tests` runs all files, and `-- tests/test_model.py` one. The output has one line per failed test, and one per fork.
The exit status is 1 if a test has failed.
"""
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PATCHES = {path.stem: path for path in sorted((ROOT / "tests/forks").glob("*.patch"))}
TRAINER = "train_gpt.py"
FORK_MARKS = "not recipe and not style and not slow"
# The files that depend most on layers, optimizer and schedule.
NUMERICS = [f"tests/test_{name}.py" for name in (
    "base", "batches", "files", "groups", "kernels", "launch", "loop", "main", "main_grad", "model", "ranks",
    "schedule", "settings", "step", "tables", "updates")]

class Outcome(NamedTuple):
    """Outcome of the tests of one fork: exit status and summary line of pytest, names of the failed tests, output."""
    status: int
    summary: str
    failed: list[str]
    output: str

def copy_fork(patch: Path, folder: Path) -> None:
    """Copy the files that git tracks or does not ignore to an empty directory, and apply a patch to the trainer.

    Raises ValueError if the patch does not apply.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():                           # a deleted file is still listed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    if (ROOT / ".venv").exists():
        (folder / ".venv").symlink_to(ROOT / ".venv")
    # The ceiling makes git treat the folder as outside any repository, wherever it is.
    environment = os.environ | dict(GIT_CEILING_DIRECTORIES=str(folder.resolve().parent))
    result = subprocess.run(["git", "apply", str(patch)], cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"{patch.name} does not apply to {TRAINER}: {result.stderr.strip()}")

def run_tests(patch: Path, pytest_args: list[str]) -> Outcome:
    """Run the tests of a fork in a temporary copy of the repository. pytest_args: files and options."""
    with tempfile.TemporaryDirectory() as folder:
        copy_fork(patch, Path(folder))
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-m", FORK_MARKS, *pytest_args]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\w+(?:\[.*?\])?)(?: - .*)?$", result.stdout, re.MULTILINE)
    lines = result.stdout.splitlines()
    return Outcome(result.returncode, lines[-1] if lines else "no output", failed, result.stdout + result.stderr)

def main(argv: list[str]) -> int:
    own, pytest_args = argv, []
    if "--" in argv:
        own, pytest_args = argv[:argv.index("--")], argv[argv.index("--") + 1:]
    parser = argparse.ArgumentParser(prog="python tests/forks.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"forks to try; default: all of {', '.join(PATCHES)}")
    parser.add_argument("--out", type=Path, help="directory for the output of pytest, one file per fork")
    args = parser.parse_args(own)
    unknown = sorted(set(args.names) - set(PATCHES))
    if unknown:
        parser.error(f"unknown fork: {', '.join(unknown)}; expected one of {', '.join(PATCHES)}")
    status = 0
    for name in args.names or PATCHES:
        outcome = run_tests(PATCHES[name], pytest_args or NUMERICS)
        for test in outcome.failed:
            print(f"{name}: {test}")
        print(f"{name}: {outcome.summary}", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{name}.txt").write_text(outcome.output)
        status |= outcome.status != 0
    return status

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
