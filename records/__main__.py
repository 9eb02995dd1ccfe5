"""Evidence tools: `python records <verb> ...`. Each verb explains itself with --help; rules are in README.md here.

compare   A against B: is B faster at the same loss? Reads logs of this trainer and of its relatives
show      one pool of runs: its numbers, p against the target, outliers, drift, what an entry needs
place     is my one run inside the band of a pool? Also while it is still going
bench     runs two trainers in turns on this machine, then compares
ablate    switches techniques off one at a time
new       makes a record folder from runs
check     recomputes every number of every record
table     prints the records by track
Exit status: 0 done, 1 a check failed, 2 bad input, 130 interrupted; of compare, show, place and
bench the verdict."""
from __future__ import annotations

import importlib
import sys

VERBS = {"compare": ("compare", "main"), "show": ("pool", "main_show"), "place": ("pool", "main_place"),
         "bench": ("bench", "main"), "ablate": ("ablate", "main"), "new": ("shelf", "main"),
         "check": ("shelf", "main"), "table": ("shelf", "main")}


def main(argv: list[str]) -> int:
    if not argv:
        print(__doc__.strip())
        return 2
    if argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    try:
        return call(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def call(argv: list[str]) -> int:
    """Run a verb; what is wrong with its input goes to stderr, with status 2."""
    from tools.logs import ToolError
    verb, *rest = argv
    try:
        if verb not in VERBS:
            raise ToolError("verb", verb, f"one of {', '.join(VERBS)}", "python records --help")
        module, function = VERBS[verb]
        verb_of = getattr(importlib.import_module(f"tools.{module}"), function)
        return verb_of(argv if module == "shelf" else rest)              # shelf has several verbs
    except ToolError as error:
        print(error, file=sys.stderr)
    except (OSError, ValueError, LookupError, ArithmeticError) as error:
        found = f"{type(error).__name__}: {error}"
        print(ToolError(verb, found, "files and settings as --help has them", "look at what is named"), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
