"""Write tests/vectors: an extract of a directory of reference vectors, in the same layout.

    python tests/make_vectors.py            reads ORACLE_DIR, by default ../shared/oracle/a next to the repository

The extract omits arrays and computes no new ones. Two measures limit it to 3 MB. In config S, only the first layers
have parameters: the others are set to 0, and tests compare only what precedes them. Table rows that no stored token
looks up are also set to 0.
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
NUM_LAYERS = 4                                   # layers of config S that have parameters
NUM_VALUE_EMBEDS = 2                             # value embeddings of these layers
NOTE = f"made by tests/make_vectors.py; in s_inputs, parameters behind the attention of layer {NUM_LAYERS - 1} are 0"
LAYERS = [str(depth) for depth in range(NUM_LAYERS)]

KEEP = {                                         # file -> patterns of its keys
    "s_inputs": ("*",),
    "s_acts": ("rows16", "sumsq.embed", "sumsq.smear", "sumsq.x0", "sumsq.x0_bigram",
               *(f"sumsq.{name}{depth}" for depth in LAYERS for name in ("mix", "attn", "q", "k", "v", "y", "yg")),
               *(f"sumsq.mlp{depth}" for depth in LAYERS[:-1]), "long.attn*", "yarn1.attn[0-9]", "yarn1.windows",
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

def zero_unused_inputs(arrays: dict[str, np.ndarray], meta: dict) -> None:
    """Set the parameters of config S that do not affect the extracted arrays to 0."""
    tokens = arrays["tokens"]
    vocab = meta["config_s"]["vocab_size"]
    arrays["p16.attn"][NUM_LAYERS:] = 0
    arrays["p16.mlp"][NUM_LAYERS - 1:] = 0
    arrays["p16.lm_head"][:] = 0
    rows_read = dict(embed=tokens, bigram_embed=arrays["bigram_ids"],
                     value_embed=np.concatenate([tokens + table * vocab for table in range(NUM_VALUE_EMBEDS)]))
    for label, rows in rows_read.items():
        unread = np.ones(len(arrays[f"p16.{label}"]), bool)
        unread[rows] = False
        arrays[f"p16.{label}"][unread] = 0

def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays so that np.load can read them, each with the smaller of two compressions.

    bzip2 compresses random values better than deflate, which np.savez_compressed uses.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array)
            data = buffer.getvalue()
            bzip2_is_smaller = len(bz2.compress(data)) < len(zlib.compress(data))
            info = zipfile.ZipInfo(f"{key}.npy")        # its fixed date makes equal contents equal bytes
            info.compress_type = zipfile.ZIP_BZIP2 if bzip2_is_smaller else zipfile.ZIP_DEFLATED
            archive.writestr(info, data)

def main() -> None:
    meta = json.loads((SOURCE / "meta.json").read_text())
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(SOURCE / "loader_shards", TARGET / "loader_shards")
    (TARGET / "meta.json").write_text(json.dumps({"extract": NOTE, **meta}, indent=1) + "\n")
    for name, patterns in KEEP.items():
        with np.load(SOURCE / f"{name}.npz") as vectors:
            arrays = {key: vectors[key] for key in vectors
                      if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)}
        if name == "s_inputs":
            zero_unused_inputs(arrays, meta)
        if name == "traj_init":
            arrays["p16.mlp"][meta["padding"]["mlp_bank_layers"]:] = 0
        write_npz(TARGET / f"{name}.npz", arrays)
    print(f"{sum(path.stat().st_size for path in TARGET.rglob('*.*')):,} bytes")


if __name__ == "__main__":
    main()
