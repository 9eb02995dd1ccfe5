"""Golden runs: store the bits that a trainer computes, and compare another trainer with them.

    python tests/golden_runs.py make TRAINER.py OUT.json [--only NAME,...]
    python tests/golden_runs.py compare TRAINER.py GOLDEN.json [--only NAME,...]

The script runs a trainer by its command line and reads the files that it writes; it never imports the trainer. It
compares the losses of all steps in log.jsonl, hashes of the weights that --save writes, and hashes of the state in the
last checkpoint. `compare` prints one line per case, and has exit status 1 if a case differs. Bits also depend on
processor, torch and Python, so run `make` and `compare` on the same machine.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

RUN_TIMEOUT_S = 600                      # for one run
OPTIONAL_ROW_STATE = (".v", ".last")     # older saves have no such tensors; they are compared if both sides have them
LOSSES = dict(step="train_loss", val="val_loss")         # type of a line in log.jsonl -> key of its loss
TINY = dict(preset="tiny", num_scheduled_steps=24, num_extension_steps=4, val_every=10, checkpoint_every=8,
            adam_every=2)
POCKET = dict(num_scheduled_steps=15, num_extension_steps=5, val_every=10, checkpoint_every=8, adam_every=2)
DTYPES = dict(f64="float64", fp32="float32", bf16="bfloat16")
OLD_FLAGS = dict(micro_batch_size="slots_per_micro_batch")
STOP_EARLY = dict(max_steps=18)          # the head is untied at step 17, after the last checkpoint
# N-gram tables, with the columns of --tables: label order rows layer signs location update_every lr wd beta2.
TWO_TABLES = "more_bigram_embed 2 200 stream 0 {0} {1}; trigram_embed 3 300 stream 1 {0} {1}"
# Three tables that differ in every column. Most rows of the last table are never looked up.
MIXED = dict(tables="more_bigram_embed 2 200 stream 0 host 4 30.0 4.0 0.9; "
             "trigram_embed 3 300 8 1 device 2 37.5 5.0 0.95; "
             "fourgram_embed 4 20000 3 1 host 2 50.0 2.0 0.97")

class Case(NamedTuple):
    """One run, or two runs of which the second one resumes from the checkpoint of the first."""
    world_size: int
    flags: dict[str, Any]
    resume_world_size: int = 0           # 0: do not resume

def tiny(dtype: str = "fp32", **flags: Any) -> dict[str, Any]:
    return TINY | dict(dtype=DTYPES[dtype]) | flags

def two_tables(location: str = "device", update_every: int = 2) -> dict[str, str]:
    return dict(tables=TWO_TABLES.format(location, update_every))

def all_cases() -> dict[str, Case]:
    cases = {
        "mixed-f64-w1": Case(1, tiny("f64", **MIXED)),
        "mixed-f64-w2": Case(2, tiny("f64", **MIXED)),
        "mixed-bf16-w2": Case(2, tiny("bf16", micro_batch_size=2, **MIXED)),
        "adam1-fp32-w1": Case(1, tiny(adam_every=1)),
        "adam1-fp32-w2": Case(2, tiny(adam_every=1)),
        "dense-fp32-w2": Case(2, tiny(row_comms="dense")),
        "dense-tables-fp32-w2": Case(2, tiny(row_comms="dense", **two_tables())),
        "debug-tables-fp32-w1": Case(1, tiny(debug_rows=1, **two_tables())),
        "debug-tables-fp32-w2": Case(2, tiny(debug_rows=1, **two_tables())),
        "emulated-fp32-w1": Case(1, tiny(head="emulated")),
        "emulated-bf16-w1": Case(1, tiny("bf16", head="emulated")),
        "resume-fp32-w2-w2": Case(2, tiny(**STOP_EARLY), resume_world_size=2),
        "resume-mixed-f64-w1-w1": Case(1, tiny("f64", **STOP_EARLY, **MIXED), resume_world_size=1),
        "resume-mixed-f64-w2-w4": Case(2, tiny("f64", **STOP_EARLY, **MIXED), resume_world_size=4),
        "resume-mixed-bf16-w4-w1": Case(4, tiny("bf16", **STOP_EARLY, **MIXED), resume_world_size=1),
        "pocket-w1": Case(1, dict(POCKET, preset="pocket")),
        "pocket-tables-w2": Case(2, dict(POCKET, preset="pocket_tables"))}
    for world_size in (1, 2, 4):
        for dtype in DTYPES:
            cases[f"{dtype}-w{world_size}"] = Case(world_size, tiny(dtype))
        for location in ("device", "host"):
            cases[f"tables-{location}-f64-w{world_size}"] = Case(world_size, tiny("f64", **two_tables(location)))
    for location in ("device", "host"):
        cases[f"tables-{location}-fp32-w2"] = Case(2, tiny(**two_tables(location)))
        cases[f"every1-{location}-f64-w2"] = Case(2, tiny("f64", adam_every=1, **two_tables(location, 1)))
        cases[f"every4-{location}-f64-w2"] = Case(2, tiny("f64", **two_tables(location, 4)))
        cases[f"tables-{location}-bf16-w1"] = Case(1, tiny("bf16", micro_batch_size=4, **two_tables(location)))
    return cases


# ---- Running and reading
def launch(trainer: Path, world_size: int, flags: dict[str, Any]) -> None:
    """Run all ranks of a trainer. Raises RuntimeError if one fails."""
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    if "    slots_per_micro_batch: " in trainer.read_text("utf-8"):               # a trainer from before 2026-11-26
        flags = {OLD_FLAGS.get(name, name): value for name, value in flags.items()}
    command += [str(trainer), *(f"--{name}={value}" for name, value in flags.items())]
    process = subprocess.Popen(command, env=os.environ | dict(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(RUN_TIMEOUT_S, process.terminate)                 # a launcher ends its ranks
    timer.start()
    stderr = process.communicate()[1]
    timer.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"status {process.returncode}: {' '.join(stderr.split())[-400:]}")

def digest(x: torch.Tensor) -> str:
    """Hash type and bytes of a tensor, independent of its shape. Integers of all widths hash equally."""
    dtype = str(x.dtype).removeprefix("torch.")
    if not x.is_floating_point():
        x = x.long()
        dtype = "integer"
    content = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{dtype} {hashlib.sha256(content).hexdigest()[:16]}"

def hashes(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Hash each tensor, and the table rows in the folder: all chunks together, in ascending order of ids."""
    columns = defaultdict(list)
    for path in sorted(folder.glob("rows-*.pt")):
        for name, x in torch.load(path, weights_only=True).items():
            columns[path.name.split("-")[1], name].append(x)
    for (label, name), chunks in columns.items():
        order = torch.cat(columns[label, "ids"]).argsort()
        tensors[f"{label}.{name}"] = torch.cat(chunks)[order]
    return {name: digest(x) for name, x in sorted(tensors.items())}

def read_run(run_dir: Path, result: dict[str, dict[str, str]]) -> None:
    for line in (run_dir / "log.jsonl").read_text("utf-8").splitlines():
        event = json.loads(line)
        if event["type"] in LOSSES:
            result["losses"][f"{event['type']} {event['step']}"] = float(event[LOSSES[event["type"]]]).hex()
    newest = max((run_dir / "checkpoints").glob("step-*"))
    state = torch.load(newest / "run.pt", weights_only=True)["state"]
    if "weights" in state:               # layout of checkpoints until commit cf1861c
        state = state["weights"] | state["moments"]
    result[f"state at {int(newest.name[5:])}"] = hashes(state, newest)

def run_case(case: Case, trainer: Path, scratch: Path) -> dict[str, dict[str, str]]:
    """Run a case; return losses and hashes by section and name, or {"failed": reason}."""
    scratch.mkdir()
    common = dict(device="cpu", sample_tokens=0)
    runs = [(case.world_size, common | case.flags | dict(run_dir=scratch / "run"))]
    if case.resume_world_size:
        resume_flags = dict(resume=scratch / "run", run_dir=scratch / "resumed", max_steps=0)
        runs.append((case.resume_world_size, common | resume_flags))
    runs[-1][1]["save"] = scratch / "save"
    result = dict(losses={})
    try:
        for world_size, flags in runs:
            launch(trainer, world_size, flags)
            read_run(flags["run_dir"], result)
        result["weights"] = hashes(torch.load(scratch / "save/weights.pt", weights_only=True), scratch / "save")
    except (RuntimeError, OSError, LookupError, TypeError, ValueError) as error:
        return dict(failed=f"{type(error).__name__}: {error}")
    return result


# ---- Comparing
def differences(stored: dict[str, dict], now: dict[str, dict]) -> list[str]:
    """Describe how two runs of a case differ: in bits, and in names."""
    found = []
    for section, before in stored.items():
        after = now.get(section, {})
        differing = [name for name in before if name in after and after[name] != before[name]]
        if differing and section == "losses":
            pairs = [(float.fromhex(before[name]), float.fromhex(after[name])) for name in differing]
            largest = max(abs(y / x - 1) for x, y in pairs)
            found.append(f"{len(differing)} of {len(before)} losses from {differing[0]} on, at most {largest:.2e}")
        elif differing:
            found.append(f"bits of {section}: {', '.join(differing)}")
        names = [name for name in before.keys() ^ after.keys()
                 if section != "weights" or not name.endswith(OPTIONAL_ROW_STATE)]
        if names:
            found.append(f"names in {section} on one side only: {', '.join(sorted(names))}")
    return found

def versions() -> dict[str, str]:
    return dict(python=sys.version.split()[0], torch=torch.__version__, cpu=torch.backends.cpu.get_cpu_capability())

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("make", "compare"))
    parser.add_argument("trainer", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--only", default="", help=f"cases, separated by commas: {', '.join(all_cases())}")
    args = parser.parse_args()

    cases = all_cases()
    names = args.only.split(",") if args.only else list(cases)
    golden = dict(versions=versions(), cases={})
    if args.task == "compare":
        golden = json.loads(args.golden.read_text("utf-8"))
        if golden["versions"] != versions():
            print(f"note: made with {golden['versions']}, compared with {versions()}: bits may differ for this reason")

    counts = Counter()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            start = time.monotonic()
            results[name] = run_case(cases[name], args.trainer.resolve(), Path(folder, name))
            outcome, text = "made", results[name].get("failed", "")
            if text:
                outcome = "failed"
            elif args.task == "compare":
                text = "; ".join(differences(golden["cases"][name], results[name]))
                outcome = "differs" if text else "same"
            counts[outcome] += 1
            print(f"{name:28} {time.monotonic() - start:5.1f} s  {outcome}{': ' if text else ''}{text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if args.task == "make":
        args.golden.write_text(json.dumps(dict(versions=versions(), cases=results), indent=0), "utf-8")
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
