"""Run the tests that a fork must pass on trainers that were changed on purpose.

    python tests/forks.py [NAME ...] [-- arguments of pytest]

A fork is a patch in tests/forks/; its first line says what changes. Its tests, without the marks `recipe`, `style` and
`slow`, run in a temporary copy of the repository: the files of NUMERICS by default, all with `-- tests`.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = {path.stem: path for path in sorted((ROOT / "tests/forks").glob("*.patch"))}
TRAINER = "train_gpt.py"
FORK_MARKS = "not recipe and not style and not slow"
# The files that depend most on layers, optimizer and schedule.
NUMERICS = [f"tests/test_{name}.py" for name in (
    "base", "batches", "files", "groups", "kernels", "launch", "loop", "main", "main_grad", "model", "ranks",
    "schedule", "settings", "step", "tables", "updates")]

def copy_fork(patch: Path, folder: Path, part: str = ".") -> None:
    """Copy what git tracks or does not ignore, and apply a patch. Raises ValueError if the patch does not apply."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", part]
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

def run_tests(patch: Path, pytest_args: list[str]) -> tuple[int, str]:
    """Run the tests of a fork in a temporary copy of the repository; return pytest's exit status and output."""
    with tempfile.TemporaryDirectory() as folder:
        copy_fork(patch, Path(folder))
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-m", FORK_MARKS, *pytest_args]
        result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return result.returncode, result.stdout

def main(argv: list[str]) -> int:
    own, pytest_args = argv, NUMERICS
    if "--" in argv:
        own, pytest_args = argv[:argv.index("--")], argv[argv.index("--") + 1:]
    parser = argparse.ArgumentParser(prog="python tests/forks.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"forks to try; default: all of {', '.join(PATCHES)}")
    status = 0
    for name in parser.parse_args(own).names or PATCHES:
        fork_status, output = run_tests(PATCHES[name], pytest_args)
        print(f"---- {name}", output, sep="\n", flush=True)
        status |= fork_status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
