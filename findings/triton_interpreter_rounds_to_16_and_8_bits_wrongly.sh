#!/usr/bin/env bash
# triton 3.7.1, with TRITON_INTERPRET=1: conversions of f32 do not round as PyTorch and GPUs do. To bf16, the lower bits
# are cut off: 1 + 0.9/128 becomes 1, not 1 + 1/128. To float8e5, 1.9 becomes 1.0, not 2.0: the mantissa is rounded up
# to a power of two, but the carry into the exponent is lost. A kernel that stores such values cannot be tested in the
# interpreter with tolerances of half a unit in the last place, and in fp8 hardly at all: store f32 there.
# Seen: "bf16: triton [1.0, 1.0], torch [1.0078125, 1.0078125]" and "e5m2: triton [1.0, 1.25, 1.5, 1.0], torch [2.0,
# 1.25, 1.5, 1.0]".
# The script fails if one of the results changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 triton==3.7.1 numpy==2.3.5
cat >"$folder/seen.py" <<'PYTHON'
import sys
import torch
import triton
import triton.language as tl

@triton.jit
def convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))

def both(values: list[float], dtype: torch.dtype) -> tuple[list[float], list[float]]:
    x = torch.tensor(values)
    out = torch.zeros(len(x), dtype=dtype)
    convert[(1,)](x, out, len(x))
    return out.tolist(), x.to(dtype).tolist()

bf16 = both([1 + 0.9 / 128, 1 + 0.6 / 128], torch.bfloat16)
e5m2 = both([1.9, 1.2, 1.6, 1.0], torch.float8_e5m2)
print(f"bf16: triton {bf16[0]}, torch {bf16[1]}")
print(f"e5m2: triton {e5m2[0]}, torch {e5m2[1]}")
sys.exit(not (bf16 == ([1.0, 1.0], [1.0078125] * 2) and e5m2[0][0] == 1.0 and e5m2[1][0] == 2.0))
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/seen.py"
