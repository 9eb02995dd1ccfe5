"""Tools for training logs and records: `python records <verb> ...`. Verbs have --help; README.md defines verdicts.

    try       run the trainer with and without a patch, interleaved, on the pocket track
    bench     run two trainers, or arms made by patches and flags, interleaved on this machine
    compare   is B faster than A, or its loss lower? From logs of this trainer and of related ones
    show      summarize a pool of runs, and test whether it proves the target
    place     is a run inside the band of a pool? Also during the run
    stand     compare the loss of a run with a record and with counts of its text, and plot it; run.sh does so
    new       create a record from runs
    check     compute every number of every record again
    table     print the records by track

Exit status: 0 success, 1 a check failed, 2 invalid input, 130 interrupted; the first five exit with that of the
verdict.
"""
from __future__ import annotations

import importlib
import sys

VERBS = {"try": "bench", "bench": "bench", "compare": "report", "show": "report", "place": "report", "new": "record",
         "check": "record", "table": "record", "stand": "stand"}

def main(argv: list[str]) -> int:
    """Run a verb; return the exit status. Invalid input is described on stderr, with status 2."""
    from tools.files import FOREIGN_ERRORS, ToolError, say
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    try:
        if argv[0] not in VERBS:
            raise ToolError(f"unknown verb {argv[0]}", found=argv[0], expected=f"one of {', '.join(VERBS)}",
                            hint="python records --help lists all verbs")
        status = importlib.import_module(f"tools.{VERBS[argv[0]]}").main(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        problem = ToolError(f"Python package {error.name}", found=f"not installed for {sys.executable}",
                            expected="the packages of records/requirements.txt",
                            hint=f"{sys.executable} -m pip install -r records/requirements.txt")
    except ToolError as error:
        problem = error
    except OSError as error:
        problem = ToolError(f"{error.filename or 'standard output'}", found=error.strerror or error,
                            expected="a regular file, or one that can be written", hint="check its path and its rights")
    except FOREIGN_ERRORS as error:
        problem = ToolError(f"records {argv[0]}", found=f"{type(error).__name__}: {error}",
                            expected="valid files and arguments",
                            hint=f"check the file or the value; python records check names damaged records; python "
                                 f"records {argv[0]} --help")
    say(f"error: {problem}", sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
