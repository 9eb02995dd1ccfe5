#!/usr/bin/env bash
# torch 2.13.0: the first loss.backward(gradient) of a process imports sympy and torch.fx's symbolic shapes, also without
# torch.compile; loss.backward() imports neither. In a profile of the start-up of a small trainer, on two busy cores, it
# was 2.5 of 13.4 s. Call backward() without arguments where the gradient is 1.
# Seen: "backward(): 0 modules of sympy; backward(gradient): 419". The script fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/seen.py" <<'PYTHON'
import sys
import torch

def modules_of_sympy() -> int:
    return sum(name.split(".")[0] == "sympy" for name in sys.modules)

x = torch.ones(3, requires_grad=True)
(2 * x).sum().backward()
without = modules_of_sympy()
(2 * x).sum().backward(torch.ones(()))
with_gradient = modules_of_sympy()
print(f"backward(): {without} modules of sympy; backward(gradient): {with_gradient}")
sys.exit(not (without == 0 and with_gradient > 100))
PYTHON
"$folder/venv/bin/python" "$folder/seen.py"
