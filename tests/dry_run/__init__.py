"""The dry run: the trainer on fake CUDA tensors. README.md explains what it proves."""
