"""What every test needs: train_gpt.py can be imported, and tiny tensors do not pay for threads."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_configure() -> None:
    torch.set_num_threads(1)
