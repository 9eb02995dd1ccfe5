"""FlashAttention 4 as torch calls it, without a GPU: its kernels are compiled for fake tensors, and none runs.

Releases of the package return different numbers of values. A pair of versions that does not fit torch fails here
instead of on a rented GPU; the trainer compares numbers when it starts.
"""
import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch
from common import BF16, F32, ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

import train_gpt as tg

CAPABILITIES = [capability for capability, names in tg.ATTENTION_BY_CAPABILITY.items() if "FA4" in names]

pytestmark = [
    pytest.mark.skipif(not any(importlib.metadata.distributions(name="flash-attn-4")),
                       reason="no flash-attn-4 package; see requirements-gpu.txt"),
    pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 lacks its attention windows")]

def attend(capability: int) -> None:
    import flash_attn.cute.interface  # noqa: F401   first, because with the lines below it would look for a GPU
    from torch.nn.attention import _fa4
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (capability, 0)
    _fa4._FA4_MODULE_PATH = "flash_attn.cute.interface"
    tokens, heads, head_dim = 700, 2, 128
    shape = tokens, heads, head_dim
    kwargs = dict(scale=0.1, window_size_left=128, window_size_right=0)
    with FakeTensorMode():
        q, k, grad = (torch.empty(shape, device="cuda", dtype=BF16) for _ in range(3))
        # In a plain layer, v is a slice of the matmul output with q, k and v.
        v = torch.empty_strided(shape, (3 * heads * head_dim, head_dim, 1), device="cuda", dtype=BF16)
        cu_seqlens = torch.empty(7, device="cuda", dtype=torch.int32)
        seqlen_args = cu_seqlens, cu_seqlens, 269, 269
        out, logsumexp, rng_state, offset, _ = _fa4._fa4_flash_attention_forward_impl(
            q, k, v, *seqlen_args, 0.0, False, False, **kwargs)
        grads = _fa4._fa4_flash_attention_backward_impl(
            grad, q, k, v, out, logsumexp, *seqlen_args, 0.0, False, rng_state, offset, **kwargs)
    for x in (out, *grads):
        assert x.shape == shape and x.dtype == BF16 and x.is_contiguous()
    assert len(grads) == 3
    assert logsumexp.shape == (heads, tokens) and logsumexp.dtype == F32

@pytest.mark.parametrize("capability", CAPABILITIES)
def test_flash_attention_4__returns_what_torch_unpacks(capability) -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    # The first variable selects the package's kernels, the second one the target of their compiler.
    arch_env = dict(FLASH_ATTENTION_ARCH=f"sm_{capability}0", CUTE_DSL_ARCH=f"sm_{capability}0a")
    command = [sys.executable, "-W", "ignore", "-c", f"import test_attention_wheel as t; t.attend({capability})"]
    env = os.environ | dict(PYTHONPATH=paths) | arch_env
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
