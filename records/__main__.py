"""Evidence tools: `python records <verb> ...`. Each verb explains itself with --help; README.md says what words mean.

try       a patch of the trainer: run with and without it in turn, on the pocket track
bench     two trainers, or arms made by patches and flags, in turn on this machine
compare   A against B: is B faster, or its loss lower? Logs of this trainer and of its relatives
show      one pool of runs: its numbers, and whether it proves the target
place     is my one run inside the band of a pool? Also while it is still going
stand     the loss of a run beside a record and a trigram model of its data, and its picture; after a run of run.sh
new       makes a record folder from runs
check     computes every number of every record again
table     prints the records by track
Exit status: 0 done, 1 a check failed, 2 bad input, 130 interrupted; of the first five the verdict."""
from __future__ import annotations

import importlib
import sys

VERBS = {"try": "bench", "bench": "bench", "compare": "report", "show": "report", "place": "report", "new": "record",
         "check": "record", "table": "record", "stand": "record"}

def main(argv: list[str]) -> int:
    """Run a verb; what is wrong with its input goes to stderr, with status 2."""
    from tools.read import ToolError
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    try:
        if argv[0] not in VERBS:
            raise ToolError("verb", argv[0], f"one of {', '.join(VERBS)}", "python records --help")
        return importlib.import_module(f"tools.{VERBS[argv[0]]}").main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        print(ToolError(sys.executable, f"no package {error.name}", "those of records/requirements.txt",
                        f"{sys.executable} -m pip install -r records/requirements.txt"), file=sys.stderr)
    except ToolError as error:
        print(error, file=sys.stderr)
    except (OSError, ValueError, LookupError, ArithmeticError) as error:
        found = f"{type(error).__name__}: {error}"
        print(ToolError(argv[0], found, "files and settings as --help has them", "look at it"), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
