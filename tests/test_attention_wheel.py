"""FlashAttention 4 as torch calls it, without a GPU: its kernels are compiled for fake tensors, and none is run.

torch unpacks what the package's forward returns, and releases of the package differ in that. A pair of versions that
does not fit fails here, and not on a rented card. The trainer compares numbers when it starts; this test does not.
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
                       reason="no flash-attn-4 package: requirements-gpu.txt"),
    pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 takes no attention windows for it")]

def attend(capability: int) -> None:
    """Call forward and backward through torch, with layouts, documents and a window of the trainer."""
    import flash_attn.cute.interface  # noqa: F401   before the lines below: it would look for the GPU that they promise
    from torch.nn.attention import _fa4
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (capability, 0)
    _fa4._FA4_MODULE_PATH = "flash_attn.cute.interface"
    tokens, heads, width = 700, 2, 128
    shape = tokens, heads, width
    options = dict(scale=0.1, window_size_left=128, window_size_right=0)
    with FakeTensorMode():
        q, k, grad = (torch.empty(shape, device="cuda", dtype=BF16) for _ in range(3))
        # The values of a plain layer are a slice of the product that has queries, keys and values.
        v = torch.empty_strided(shape, (3 * heads * width, width, 1), device="cuda", dtype=BF16)
        bounds = torch.empty(7, device="cuda", dtype=torch.int32)
        spans = bounds, bounds, 269, 269
        out, logsumexp, state, offset, _ = _fa4._fa4_flash_attention_forward_impl(
            q, k, v, *spans, 0.0, False, False, **options)
        grads = _fa4._fa4_flash_attention_backward_impl(
            grad, q, k, v, out, logsumexp, *spans, 0.0, False, state, offset, **options)
    for x in (out, *grads):
        assert x.shape == shape and x.dtype == BF16 and x.is_contiguous()
    assert len(grads) == 3
    assert logsumexp.shape == (heads, tokens) and logsumexp.dtype == F32

@pytest.mark.parametrize("capability", CAPABILITIES)
def test_flash_attention_4__returns_what_torch_unpacks(capability) -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    # The first chooses among the package's kernels, the second is the target of their compiler.
    card = dict(FLASH_ATTENTION_ARCH=f"sm_{capability}0", CUTE_DSL_ARCH=f"sm_{capability}0a")
    command = [sys.executable, "-W", "ignore", "-c", f"import test_attention_wheel as t; t.attend({capability})"]
    environment = os.environ | dict(PYTHONPATH=paths) | card
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
