"""Golden runs: does this trainer compute the same bits as that of an earlier commit?

    python tests/golden_runs.py [--base COMMIT] [--trainer FILE] [--only CASE,...] [--keep FILE]

Runs both by their command lines on this machine (bits depend on processor and torch), and compares the losses of all
steps, the saved weights, and weights and optimizer state in checkpoints of the same step. The exit status is 1 if a
case differs. --keep stores the results of the base, for the next comparison.
"""
import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
RUN_TIMEOUT_S = 600                      # for one run
LOSSES = dict(step="train_loss", val="val_loss")         # type of a line in log.jsonl -> key of its loss
TINY = dict(preset="tiny", num_scheduled_steps=24, num_extension_steps=4, val_every=10, checkpoint_every=8,
            adam_every=2)
POCKET = dict(num_scheduled_steps=15, num_extension_steps=5, val_every=10, checkpoint_every=8, adam_every=2)
DTYPES = dict(f64="float64", fp32="float32", bf16="bfloat16")
STOP_EARLY = dict(max_steps=18)          # the head is untied at step 17
# label, order, rows, update_every, lr_mul, wd_mul, beta2; most rows of the last table are never looked up
MIXED = [("more_bigram_embed", 2, 200, 4, 30.0, 4.0, 0.9), ("trigram_embed", 3, 300, 2, 37.5, 5.0, 0.95),
         ("fourgram_embed", 4, 20000, 2, 50.0, 2.0, 0.97)]

class Case(NamedTuple):
    world_size: int
    flags: dict[str, Any]
    resumes: bool = False                # a second run continues from the checkpoint of the first

def tiny(dtype: str = "fp32", **flags: Any) -> dict[str, Any]:
    return TINY | dict(dtype=DTYPES[dtype]) | flags

def two_tables(update_every: int = 2) -> dict[str, Any]:
    return dict(tables=[(label, order, rows, update_every, 37.5, 5.0, 0.95)
                        for label, order, rows in (("more_bigram_embed", 2, 200), ("trigram_embed", 3, 300))])

CASES = {
    "mixed-f64-w1": Case(1, tiny("f64", tables=MIXED)),
    "mixed-f64-w2": Case(2, tiny("f64", tables=MIXED)),
    "mixed-bf16-w2": Case(2, tiny("bf16", micro_batch_size=2, tables=MIXED)),
    "adam1-fp32-w1": Case(1, tiny(adam_every=1)),
    "adam1-fp32-w2": Case(2, tiny(adam_every=1)),
    "dense-fp32-w2": Case(2, tiny(row_comms="dense")),
    "dense-tables-fp32-w2": Case(2, tiny(row_comms="dense", **two_tables())),
    "emulated-fp32-w1": Case(1, tiny(head="emulated")),
    "emulated-bf16-w1": Case(1, tiny("bf16", head="emulated")),
    "resume-fp32-w2": Case(2, tiny(**STOP_EARLY), resumes=True),
    "resume-mixed-f64-w1": Case(1, tiny("f64", tables=MIXED, **STOP_EARLY), resumes=True),
    "pocket-w1": Case(1, dict(POCKET, preset="pocket")),
    "pocket-tables-w2": Case(2, dict(POCKET, preset="pocket_tables")),
    "tables-fp32-w2": Case(2, tiny(**two_tables())),
    "tables-bf16-w1": Case(1, tiny("bf16", micro_batch_size=4, **two_tables())),
    "every1-f64-w2": Case(2, tiny("f64", adam_every=1, **two_tables(1))),
    "every4-f64-w4": Case(4, tiny("f64", **two_tables(4))),
    **{f"tables-f64-w{world_size}": Case(world_size, tiny("f64", **two_tables())) for world_size in (1, 2, 4)},
    **{f"{dtype}-w{world_size}": Case(world_size, tiny(dtype)) for world_size in (1, 2, 4) for dtype in DTYPES}}


# ---- Running and reading
def launch(trainer: Path, world_size: int, flags: dict[str, Any]) -> None:
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command += [str(trainer), *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, env=os.environ | dict(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {' '.join(done.stderr.split())[-400:]}")

def hashes(x: Any, name: str = "") -> dict[str, str]:
    """Hash type and bytes of each tensor in nested dicts, by name."""
    if isinstance(x, dict):
        return {key: digest for part in x for key, digest in hashes(x[part], f"{name} {part}".strip()).items()}
    content = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {name: f"{x.dtype} {hashlib.sha256(content).hexdigest()[:16]}"}

def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Weights, optimizer state and rows of each rank."""
    contents = {path.stem: torch.load(path, weights_only=True) for path in folder.iterdir()}
    return {rank: dict(state=content["state"], rows=content["rows"]) for rank, content in contents.items()}

def run_case(case: Case, trainer: Path, scratch: Path) -> dict[str, dict[str, str]]:
    """Return losses and hashes by section and name, or {"failed": reason}."""
    scratch.mkdir()
    common = dict(device="cpu", sample_tokens=0)
    runs = [common | case.flags | dict(run_dir=scratch / "run")]
    if "tables" in case.flags and "layer: int | None" in trainer.read_text("utf-8"):       # a field until 2026-11-29
        runs[0]["tables"] = [(*row[:3], None, *row[3:]) for row in case.flags["tables"]]
    if case.resumes:
        runs.append(common | dict(resume=scratch / "run", run_dir=scratch / "resumed", max_steps=0))
    runs[-1]["save"] = scratch / "save"
    result = dict(losses={})
    try:
        for flags in runs:
            launch(trainer, case.world_size, flags)
            for line in (flags["run_dir"] / "log.jsonl").read_text("utf-8").splitlines():
                event = json.loads(line)
                if event["type"] in LOSSES:
                    result["losses"][f"{event['type']} {event['step']}"] = event[LOSSES[event["type"]]].hex()
            for folder in (flags["run_dir"] / "checkpoints").glob("step-*"):
                result[f"state at {int(folder.name[5:])}"] = hashes(read_checkpoint(folder))
        result["weights"] = hashes(load_file(scratch / "save/weights.safetensors"))
    except (RuntimeError, OSError, LookupError, subprocess.TimeoutExpired) as error:
        return dict(failed=f"{type(error).__name__}: {error}")
    return result


# ---- Comparing
def differences(base: dict[str, dict], now: dict[str, dict]) -> list[str]:
    """Describe how two runs of a case differ, in bits and in names."""
    found = []
    if base.keys() != now.keys():
        found.append(f"on one side only: {', '.join(sorted(base.keys() ^ now.keys()))}")
    for section in sorted(base.keys() & now.keys()):
        before, after = base[section], now[section]
        differing = [name for name in before if after.get(name) != before[name]]
        if differing and section == "losses":
            by = max(abs(float.fromhex(before[name]) - float.fromhex(after.get(name, "nan"))) for name in differing)
            found.append(f"{len(differing)} of {len(before)} losses from {differing[0]} on, by at most {by:.1e}")
        elif differing or before.keys() != after.keys():
            found.append(f"{section}: {', '.join(differing) or 'other names'}")
    return found

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="commit of the trainer to compare with [HEAD]")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt.py")
    parser.add_argument("--only", default="", help=f"cases, separated by commas: {', '.join(CASES)}")
    parser.add_argument("--keep", type=Path, help="JSON file with the results of the base")
    args = parser.parse_args()

    names = args.only.split(",") if args.only else list(CASES)
    known = json.loads(args.keep.read_text()) if args.keep and args.keep.exists() else {}
    counts = Counter()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base.py")
        base.write_bytes(subprocess.run(["git", "-C", str(ROOT), "show", f"{args.base}:train_gpt.py"],
                                        capture_output=True, check=True).stdout)
        for name in names:
            start = time.monotonic()
            if name not in known:
                known[name] = run_case(CASES[name], base, Path(folder, f"{name}-base"))
                if args.keep:
                    args.keep.write_text(json.dumps(known))
            now = run_case(CASES[name], args.trainer.resolve(), Path(folder, name))
            failed = [result["failed"] for result in (known[name], now) if "failed" in result]
            found = differences(known[name], now)
            outcome = "failed" if failed else "differs" if found else "same"
            counts[outcome] += 1
            seconds = time.monotonic() - start
            print(f"{name:24} {seconds:5.1f} s  {outcome}", *(failed or found), sep="\n    ", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["same"] < len(names))


if __name__ == "__main__":
    sys.exit(main())
