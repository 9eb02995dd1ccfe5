"""Print the predicted times that the expected costs of the dry run store; see dry_run/price.py."""
from dry_run import price

if __name__ == "__main__":
    print(price.format_prediction(price.load(price.EXPECTED_COSTS)))
