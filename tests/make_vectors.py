"""Write tests/vectors: a small part of a directory of reference vectors, in the same layout.

    python tests/make_vectors.py            reads ORACLE_DIR, default ../shared/oracle/a beside the repository

Nothing is computed, only left out. Two things keep the extract below 3 MB. Config S keeps the parameters of its first
layers; the others are 0, and only what lies before them is compared. Rows of tables that no stored token reads are 0.
"""
from __future__ import annotations

import bz2
import fnmatch
import io
import json
import os
import shutil
import zipfile
import zlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / os.environ.get("ORACLE_DIR", "../shared/oracle/a")
TARGET = ROOT / "tests/vectors"
DEPTHS = 4                                       # config S: layers that keep their parameters
VALUE_TABLES = 2                                 # that they read
NOTE = f"made by tests/make_vectors.py; in s_inputs, parameters behind the attention of layer {DEPTHS - 1} are 0"
FIRST = [str(depth) for depth in range(DEPTHS)]

KEEP = {                                         # file -> patterns of its keys
    "s_inputs": ("*",),
    "s_acts": ("rows16", "sumsq.embed", "sumsq.smear", "sumsq.x0", "sumsq.x0_bigram",
               *(f"sumsq.{name}{depth}" for depth in FIRST for name in ("mix", "attn", "q", "k", "v", "y", "yg")),
               *(f"sumsq.mlp{depth}" for depth in FIRST[:-1]), "long.attn*", "yarn1.attn[0-9]", "yarn1.windows",
               "yarn1.angular_freq", "yarn1.attn_scale"),
    "traj_init": ("*",),
    "traj": ("tokens.*", "targets.*", "cu_seqlens.*", "bigram_ids.*", "val_*", "idx.*", "dims", "bos", "boundaries",
             "split_step", "slot_loss.*", "mtp.*", "windows.*", "yarn.[036]*", "lr_mul.*", "momentum.*", "adam_step.*",
             "split_after.*", "lr.[05].*", "grad_norm.[0379].*", "grad_samp.[01].*", "samp.[12].*", "samp.1[02].*",
             "norm.1[02].*", "full.12.*", "st_v2.1.*", "st_mom.2.*", "st_[mv].10.*", "st_step.12.*"),
    "opt": ("pe_*.tall", "pe_*.rank5", "pe_*.zero", "nm_wide.[gh]*0", "nm_wide.p[01]", "nm_wide.mom1", "nm_wide.v2_1",
            "adam.[!b]*.p_init", "adam.[!b]*.g?", "adam.lr_mul.*", "adam.split.*", "adam.[!b]*.[pmvt][37]",
            "mt.[pm]_in", "mt.g?", "mt.wd_lr?", "mt.?_out2"),
    "loader": ("*.slot_tokens*", "train_w2.*", "send_w8.*", "switch_w8.[ic]*", "val_w2.*", "valcross_w8.[ic]*"),
    "schedule": ("*",),
    "bigram": ("*",),
    "fp8": ("x16", "w16", "targets", "*_s", "grad_s.*", "mtp.*", "grad_out.*", "?_e4m3", "*.m3.*.grad_logits_e5m2",
            "*.losses", "f64logits.m3.ones.grad_x", "f64logits.m3.mixed.grad_x",
            "bf16logits.m3.eighth.grad_x"),
}

def small_inputs(arrays: dict[str, np.ndarray], meta: dict) -> None:
    """Set the parameters of config S that no kept array depends on to 0."""
    tokens = arrays["tokens"]
    vocab = meta["config_s"]["vocab_size"]
    arrays["p16.attn"][DEPTHS:] = 0
    arrays["p16.mlp"][DEPTHS - 1:] = 0
    arrays["p16.lm_head"][:] = 0
    read = dict(embed=tokens, bigram_embed=arrays["bigram_ids"],
                value_embed=np.concatenate([tokens + table * vocab for table in range(VALUE_TABLES)]))
    for label, rows in read.items():
        unread = np.ones(len(arrays[f"p16.{label}"]), bool)
        unread[rows] = False
        arrays[f"p16.{label}"][unread] = 0

def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """np.load reads it; bzip2 packs words of random numbers better than the deflate of np.savez_compressed."""
    with zipfile.ZipFile(path, "w") as file:
        for key, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array)
            data = content.getvalue()
            smaller = len(bz2.compress(data)) < len(zlib.compress(data))
            info = zipfile.ZipInfo(f"{key}.npy")        # a fixed date: equal bytes every time
            info.compress_type = zipfile.ZIP_BZIP2 if smaller else zipfile.ZIP_DEFLATED
            file.writestr(info, data)

def main() -> None:
    meta = json.loads((SOURCE / "meta.json").read_text())
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(SOURCE / "loader_shards", TARGET / "loader_shards")
    (TARGET / "meta.json").write_text(json.dumps({"extract": NOTE, **meta}, indent=1) + "\n")
    for file, patterns in KEEP.items():
        with np.load(SOURCE / f"{file}.npz") as whole:
            arrays = {key: whole[key] for key in whole if any(fnmatch.fnmatchcase(key, glob) for glob in patterns)}
        if file == "s_inputs":
            small_inputs(arrays, meta)
        if file == "traj_init":
            arrays["p16.mlp"][meta["padding"]["mlp_bank_layers"]:] = 0
        write_npz(TARGET / f"{file}.npz", arrays)
    print(f"{sum(path.stat().st_size for path in TARGET.rglob('*.*')):,} bytes")


if __name__ == "__main__":
    main()
