"""Tools for training logs and records: `python records <verb> ...`. Verbs have --help; README.md defines verdicts.

    try       run the trainer with and without a patch, interleaved, on the pocket track
    bench     run two trainers, or one with other flags, interleaved on this machine
    compare   is B faster than A, or its loss lower? From logs of this trainer and of related ones
    show      summarize runs: test a target, place one in the band of others, or beside a record
    new       create a record from runs
    check     compute every number of every record again
    table     print the records by track
    export    copy curves to CSV, TensorBoard, Trackio or Weights & Biases

Exit status: 0 success, 1 `check` found a difference or a run of a bench failed, 2 invalid input, or runs that
form no record, 130 interrupted; the first four exit with that of the verdict (README.md).
"""
import argparse
import importlib
import sys

# Module of each verb. Its `main` takes a parser and the arguments, the verb among them, and returns the exit status.
VERBS = {"try": "bench", "bench": "bench", "compare": "report", "show": "show", "new": "record", "check": "record",
         "table": "record", "export": "export"}

def main(argv: list[str]) -> int:
    """Run a verb; return the exit status. Invalid input is described on stderr, with status 2."""
    from tools.files import FOREIGN_ERRORS, ToolError, say
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    try:
        if argv[0] not in VERBS:
            raise ToolError(f"there is no verb {argv[0]}: give one of {', '.join(VERBS)}")
        module = importlib.import_module(f"tools.{VERBS[argv[0]]}")
        parser = argparse.ArgumentParser(f"python records {argv[0]}", description=module.__doc__, allow_abbrev=False,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
        return module.main(parser, argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        problem = f"{error}: {sys.executable} -m pip install {error.name}"
    except (ToolError, OSError) as error:
        problem = str(error)
    except FOREIGN_ERRORS as error:
        problem = (f"a file or an argument is damaged ({type(error).__name__}: {error}): python records check names "
                   "damaged records")
    say(f"error: {problem}", sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
