"""Rehearse a run on GPUs that are not there: dry_run/README.md says how, dry_run/command.py does it."""
import sys

from dry_run.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
