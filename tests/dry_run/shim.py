"""Build fake_cuda.cpp and load it. Import this module before torch, in a process of its own: it changes the process."""
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SCRATCH = Path(os.environ.get("DRY_RUN_CACHE") or tempfile.mkdtemp(prefix="dry-run-"))
SOURCE = Path(__file__).with_name("fake_cuda.cpp")

def load_shim() -> None:
    assert "torch" not in sys.modules, "import shim before torch"
    torch = Path(importlib.util.find_spec("torch").origin).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + str(torch).encode()).hexdigest()[:16]
    library = SCRATCH / f"fake_cuda-{digest}.so"
    if not library.exists():
        unfinished = SCRATCH / f"{library.name}.{os.getpid()}"
        compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
        command = [compiler, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", f"-I{torch / 'include'}", str(SOURCE),
                   "-o", str(unfinished), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run(command, check=True)
        unfinished.rename(library)
    ctypes.CDLL(str(library))


os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(SCRATCH / "inductor"), TRITON_CACHE_DIR=str(SCRATCH / "triton"),
                  TORCHINDUCTOR_AUTOGRAD_CACHE="0", TORCHINDUCTOR_FX_GRAPH_CACHE="1")
SCRATCH.mkdir(parents=True, exist_ok=True)
load_shim()
