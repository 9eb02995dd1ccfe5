"""The Triton bodies of room 4 that multiply, without a GPU.

    python tests/kernel_cases.py FILE interpret|compile       results as JSON; interpret wants TRITON_INTERPRET=1

The interpreter of Triton is wrong in bf16 (it cuts numbers off where a GPU rounds them, and multiplies their bits):
`mend_interpreter` lets torch convert them.
"""
from __future__ import annotations

import json
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
MOST_SHARED = {80: 166_912, 90: 232_448, 100: 232_448}        # bytes: CUDA programming guide, table of limits
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


# ---- Interpreted
def as_torch(data: np.ndarray, kind: Any) -> Tensor:
    """What the interpreter holds, bf16 as its 16 bits, as torch reads it."""
    x = torch.from_numpy(np.ascontiguousarray(data))
    return x.view(torch.bfloat16) if kind.scalar.is_bf16() else x


def as_numpy(x: Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy()


def mend_interpreter() -> None:
    from triton.runtime import interpreter
    types = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32, fp64=torch.float64)

    def cast(self: Any, x: Any, kind: Any, *_: Any) -> Any:
        if kind.scalar.name not in types or not x.dtype.scalar.is_floating():
            return unchanged(self, x, kind)
        converted = as_torch(x.data, x.dtype).to(types[kind.scalar.name])
        return interpreter.TensorHandle(as_numpy(converted), kind.scalar)

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        left, right = as_torch(a.data, a.dtype), as_torch(b.data, b.dtype)
        product = left.float() @ right.float()
        return interpreter.TensorHandle(product.numpy() + total.data, total.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    unchanged = builder.cast_impl
    builder.create_fp_ext = builder.create_fp_trunc = builder.create_fp_to_fp = cast
    builder.create_dot = dot


def launch(x: Tensor, w: Tensor, squares: Tensor, backward: bool, tile: dict[str, int], programs: int) -> Tensor:
    out = torch.full_like(squares, torch.nan)
    tg.jitted(tg.relu_sq_kernel)[(programs,)](x, w, squares, out, len(x), len(w), x.shape[1], BACKWARD=backward, **tile)
    return out


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def interpret() -> dict[str, float]:
    """Largest errors against float64, by type, pass and shape."""
    mend_interpreter()
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for count, columns, depth in SHAPES:
            generator = torch.Generator().manual_seed(count)
            x = torch.randn(count, depth, generator=generator).to(dtype)
            w = torch.randn(columns, depth, generator=generator).to(dtype)
            product = x.double() @ w.double().t()
            squares = product.clamp(min=0).square()
            for programs in (1, 3):
                shape = f"{dtype} {count} {columns} {depth} {programs}"
                unread = torch.full_like(squares, torch.nan, dtype=dtype)
                forward = launch(x, w, unread, False, SMALL, programs)
                found[f"forward {shape}"] = error_of(forward, squares)
                kept = squares.to(dtype)
                backward = launch(x, w, kept, True, SMALL, programs)
                found[f"backward {shape}"] = error_of(backward, 2 * product * kept.double().sqrt())
    return found


# ---- Compiled ahead of time
def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK and LOCAL of a kernel's machine code, by NVIDIA's tool that comes with Triton."""
    import triton
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def narrow_offsets(ttir: str) -> list[str]:
    """Lines of the intermediate form that take an array further by a number of 32 bits."""
    narrow = []
    for line in ttir.splitlines():
        of_offset = line.rpartition(",")[2]
        if "tt.addptr" in line and not re.search(r"(\bi|xi)64\b", of_offset):
            narrow.append(line.strip())
    return narrow


def compiled(capability: int, backward: bool, dtype: str, tile: dict[str, int], stages: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    arrays = dict.fromkeys(("x", "w", "squares", "out"), f"*{dtype}")
    lengths = dict.fromkeys(("count", "columns", "depth"), "i32")
    constants = dict(BACKWARD=backward, **tile)
    options = dict(num_warps=constants.pop("num_warps"), num_stages=stages)
    run_time = arrays | lengths
    signature = run_time | dict.fromkeys(constants, "constexpr")
    divisible = {(at,): [["tt.divisibility", 16]] for at in range(len(run_time))}
    places = enumerate(constants.values(), start=len(run_time))
    fixed = {(at,): value for at, value in places}
    kernel = tg.jitted(tg.relu_sq_kernel)
    source = ASTSource(fn=kernel, signature=signature, attrs=divisible, constexprs=fixed)

    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    found = resources(made.asm["cubin"])
    found.update(shared=made.metadata.shared, most_shared=MOST_SHARED[capability])
    found.update(products=ptx.count(TENSOR_CORES[capability]), copies=ptx.count("cp.async"))
    return dict(found, narrow=narrow_offsets(made.asm["ttir"]))


def compile_ahead() -> dict[str, dict]:
    found = {}
    for (major, minor), (tile, stages) in tg.RELU_SQ_TILES.items():
        for backward in (False, True):
            capability = 10 * major + minor
            found[f"{capability} {backward}"] = compiled(capability, backward, "bf16", tile, stages[backward])
    return found


if __name__ == "__main__":
    results = dict(interpret=interpret, compile=compile_ahead)[sys.argv[2]]()
    Path(sys.argv[1]).write_text(json.dumps(results))
