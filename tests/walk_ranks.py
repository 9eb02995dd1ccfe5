"""Walk all ranks of a run on GPUs that are not there, side by side: rehearsal/ranks.py does it."""
import sys

from rehearsal.ranks import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
