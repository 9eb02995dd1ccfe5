"""Print predicted times of the rehearsed run, or set measured ones beside them: dry_run/price.py does it."""
import sys

from dry_run.price import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
