"""Rehearse a run on GPUs that are not there: rehearsal/README.md says how, rehearsal/command.py does it."""
import sys

from rehearsal.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
