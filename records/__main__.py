"""Evidence tools: `python records <verb> ...`. Each verb explains itself with --help; rules are in README.md here.

compare   A against B: is B faster at the same loss? Reads logs of this trainer and of its relatives
bench     runs two trainers in turns on this machine, then compares
ablate    switches techniques off one at a time
new       makes a record folder from runs
check     recomputes every number of every record
table     prints the records by track
Exit status: 0 done, 1 a check failed, 2 bad input, 130 interrupted."""
from __future__ import annotations

import importlib, sys

VERBS = {"compare": "compare", "bench": "bench", "ablate": "ablate", "new": "shelf", "check": "shelf", "table": "shelf"}

def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    from tools.logs import ToolError
    verb, *rest = argv
    try:
        if verb not in VERBS:
            raise ToolError("verb", verb, f"one of {', '.join(VERBS)}", "python records --help")
        module = importlib.import_module(f"tools.{VERBS[verb]}")
        return module.main(argv if VERBS[verb] == "shelf" else rest)
    except (ToolError, OSError, ValueError, LookupError, ArithmeticError) as error:
        print(error if isinstance(error, ToolError) else ToolError(verb, f"{type(error).__name__}: {error}",
              "files and settings as --help has them", "look at what is named"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
