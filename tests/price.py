"""Print the predicted times of the dry run, or compare them with measured times; see dry_run/price.py."""
import sys

from dry_run.price import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
