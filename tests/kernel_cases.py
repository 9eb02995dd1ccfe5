"""The Triton body of room 4 that multiplies, without a GPU.

    python tests/kernel_cases.py interpret|compile       fails where it is wrong; interpret wants TRITON_INTERPRET=1

The interpreter of Triton is wrong in bf16 (it cuts numbers off where a GPU rounds them, and multiplies their bits):
`mend_interpreter` lets torch convert them.
"""
from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as tg  # noqa: E402

SMALL = dict(ROWS=16, COLUMNS=32, DEPTH=16)
SHAPES = ((16, 32, 16), (1, 8, 8), (33, 40, 24), (50, 96, 56), (7, 200, 32), (64, 64, 128))       # (N, F, K)
MOST_ERROR = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}          # one rounding
MOST_SHARED = {80: 166_912, 90: 232_448, 100: 232_448}        # bytes: CUDA programming guide, table of limits
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


# ---- Interpreted
def as_torch(data: np.ndarray, kind: Any) -> Tensor:
    """Return what the interpreter holds, bf16 as its 16 bits, as torch reads it."""
    x = torch.from_numpy(np.ascontiguousarray(data))
    return x.view(torch.bfloat16) if kind.scalar.is_bf16() else x


def mend_interpreter() -> None:
    from triton.runtime import interpreter
    types = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32, fp64=torch.float64)

    def cast(self: Any, x: Any, kind: Any, *_: Any) -> Any:
        if kind.scalar.name not in types or not x.dtype.scalar.is_floating():
            return unchanged(self, x, kind)
        found = as_torch(x.data, x.dtype).to(types[kind.scalar.name])
        data = found.numpy() if found.dtype != torch.bfloat16 else found.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(data, kind.scalar)

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        left, right = as_torch(a.data, a.dtype), as_torch(b.data, b.dtype)
        product = left.float() @ right.float()
        return interpreter.TensorHandle(product.numpy() + total.data, total.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    unchanged = builder.cast_impl
    builder.create_fp_ext = builder.create_fp_trunc = builder.create_fp_to_fp = cast
    builder.create_dot = dot


def interpret() -> None:
    """Compare both passes with float64. Forward reads no squares: NaN stands there."""
    mend_interpreter()
    for dtype, shape, programs in itertools.product(MOST_ERROR, SHAPES, (1, 3)):
        count, columns, depth = shape
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(count, depth, generator=generator).to(dtype)
        w = torch.randn(columns, depth, generator=generator).to(dtype)
        product = x.double() @ w.double().t()
        exact = product.clamp(min=0).square()
        kept = exact.to(dtype)
        unread = torch.full_like(kept, torch.nan)
        grad = 2 * product * kept.double().sqrt()
        for backward, squares, want in ((False, unread, exact), (True, kept, grad)):
            out = torch.full_like(kept, torch.nan)
            tg.jitted(tg.relu_sq_kernel)[(programs,)](x, w, squares, out, *shape, BACKWARD=backward, **SMALL)
            error = float((out.double() - want).abs().max() / want.abs().max())
            assert error <= MOST_ERROR[dtype], (dtype, shape, programs, backward, error)


# ---- Compiled ahead of time
def resources(cubin: bytes) -> dict[str, int]:
    """Return REG, STACK and LOCAL of a kernel's machine code, by NVIDIA's tool that comes with Triton."""
    import triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def compile_ahead() -> None:
    """Compile the kernel for each card that takes it, in bf16, and look at what came of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    assert {10 * major + minor for major, minor in tg.RELU_SQ_TILES} == {*TENSOR_CORES}
    for ((major, minor), (tile, stages)), backward in itertools.product(tg.RELU_SQ_TILES.items(), (False, True)):
        card = 10 * major + minor
        constants = dict(BACKWARD=backward, **tile)
        options = dict(num_warps=constants.pop("num_warps"), num_stages=stages[backward])
        run_time = dict.fromkeys(("x", "w", "squares", "out"), "*bf16")
        run_time |= dict.fromkeys(("count", "columns", "depth"), "i32")
        divisible = {(at,): [["tt.divisibility", 16]] for at in range(len(run_time))}
        fixed = {(at,): value for at, value in enumerate(constants.values(), start=len(run_time))}
        source = ASTSource(fn=tg.jitted(tg.relu_sq_kernel), signature=run_time | dict.fromkeys(constants, "constexpr"),
                           attrs=divisible, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
        used, ptx = resources(made.asm["cubin"]), made.asm["ptx"]
        assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 255, (card, backward, used)
        assert made.metadata.shared <= MOST_SHARED[card], (card, backward)
        assert TENSOR_CORES[card] in ptx and "cp.async" in ptx, (card, backward)
        for line in made.asm["ttir"].splitlines():            # no array is taken further by a number of 32 bits
            assert "tt.addptr" not in line or re.search(r"(\bi|xi)64\b", line.rpartition(",")[2]), line


if __name__ == "__main__":
    dict(interpret=interpret, compile=compile_ahead)[sys.argv[1]]()
