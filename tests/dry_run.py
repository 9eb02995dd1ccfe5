"""Dry run: run the trainer on fake CUDA tensors; see dry_run/README.md and dry_run/command.py."""
import sys

from dry_run.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
