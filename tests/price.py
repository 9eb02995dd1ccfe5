"""Print predicted times of the rehearsed run, or set measured ones beside them: rehearsal/price.py does it."""
import sys

from rehearsal.price import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
