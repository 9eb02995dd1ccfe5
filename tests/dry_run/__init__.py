"""A walk of the trainer on GPUs that are not there: README.md says what it proves."""
