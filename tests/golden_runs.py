"""Golden runs: does this trainer compute the same bits as that of an earlier commit?

    python tests/golden_runs.py [--base COMMIT] [--trainer FILE] [--only CASE,...] [--keep FILE]

Takes the trainer of a commit from git, runs both by their command lines on this machine (bits depend on processor and
torch), and compares the losses of all steps, the saved weights, and weights and optimizer state in checkpoints of the
same step. Prints one line per case; the exit status is 1 if a case differs. --keep stores the results of the base, for
the next comparison.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
BASE = "4ad3349"                         # the last trainer before it was halved
RUN_TIMEOUT_S = 600                      # for one run
LOSSES = dict(step="train_loss", val="val_loss")         # type of a line in log.jsonl -> key of its loss
TABLES = ("bigram_embed", "value_embed", "embed")        # dense tables, sharded by row
SHARDED = ("attn", "mlp", "lm_head")                     # weights whose optimizer state is sharded along dim 0
TINY = dict(preset="tiny", num_scheduled_steps=24, num_extension_steps=4, val_every=10, checkpoint_every=8,
            adam_every=2)
POCKET = dict(num_scheduled_steps=15, num_extension_steps=5, val_every=10, checkpoint_every=8, adam_every=2)
DTYPES = dict(f64="float64", fp32="float32", bf16="bfloat16")
STOP_EARLY = dict(max_steps=18)          # the head is untied at step 17
# label, order, rows, layer, update_every, lr_mul, wd_mul, beta2; most rows of the last table are never looked up
MIXED = [("more_bigram_embed", 2, 200, None, 4, 30.0, 4.0, 0.9), ("trigram_embed", 3, 300, 8, 2, 37.5, 5.0, 0.95),
         ("fourgram_embed", 4, 20000, 3, 2, 50.0, 2.0, 0.97)]

class Case(NamedTuple):
    """One run, or two runs of which the second one resumes from the checkpoint of the first."""
    world_size: int
    flags: dict[str, Any]
    resumes: bool = False

def tiny(dtype: str = "fp32", **flags: Any) -> dict[str, Any]:
    return TINY | dict(dtype=DTYPES[dtype]) | flags

def two_tables(update_every: int = 2) -> dict[str, Any]:
    return dict(tables=[(label, order, rows, None, update_every, 37.5, 5.0, 0.95)
                        for label, order, rows in (("more_bigram_embed", 2, 200), ("trigram_embed", 3, 300))])

def all_cases() -> dict[str, Case]:
    cases = {
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
        "every1-f64-w2": Case(2, tiny("f64", adam_every=1, **two_tables(1))),
        "every4-f64-w2": Case(2, tiny("f64", **two_tables(4))),
        "tables-bf16-w1": Case(1, tiny("bf16", micro_batch_size=4, **two_tables()))}
    for world_size in (1, 2, 4):
        cases[f"tables-f64-w{world_size}"] = Case(world_size, tiny("f64", **two_tables()))
        for dtype in DTYPES:
            cases[f"{dtype}-w{world_size}"] = Case(world_size, tiny(dtype))
    return cases


# ---- Running and reading
def table_text(table: tuple) -> str:
    """Write a table as trainers until 4ad3349 read it, with signs and location."""
    label, order, rows, layer, *rest = table
    return " ".join(map(str, (label, order, rows, "stream" if layer is None else layer, 0, "device", *rest)))

def launch(trainer: Path, world_size: int, flags: dict[str, Any]) -> None:
    """Run all ranks of a trainer. Raises RuntimeError if one fails."""
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    if "tables" in flags and "TABLE_SYNTAX" in trainer.read_text("utf-8"):
        flags = flags | dict(tables="; ".join(map(table_text, flags["tables"])))
    command += [str(trainer), *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, env=os.environ | dict(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {' '.join(done.stderr.split())[-400:]}")

def digest(x: torch.Tensor) -> str:
    """Hash type and bytes of a tensor, independent of its shape. Integers of all widths hash equally."""
    dtype = str(x.dtype).removeprefix("torch.")
    if not x.is_floating_point():
        x, dtype = x.long(), "integer"
    content = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{dtype} {hashlib.sha256(content).hexdigest()[:16]}"

def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    if not tensors.get("embed.m", torch.ones(1)).any():      # while tied, the embedding is the transposed head
        tensors["embed"] = tensors["lm_head"].t()
    return {name: digest(x) for name, x in sorted(tensors.items())}

def sorted_rows(rows: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{label}.{name}": x[by_name["ids"].argsort()] for label, by_name in rows.items()
            for name, x in by_name.items()}

def read_row_files(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Rows that trainers until 4ad3349 wrote beside weights and state, in several files per table."""
    columns = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("rows-*.pt")):
        for name, x in torch.load(path, weights_only=True).items():
            columns[path.name.split("-")[1]][name].append(x)
    return {label: {name: torch.cat(chunks) for name, chunks in by_name.items()} for label, by_name in columns.items()}

def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Whole weights and state of a checkpoint, in either layout."""
    if (folder / "run.pt").exists():
        state = torch.load(folder / "run.pt", weights_only=True)["state"]
        return state | sorted_rows(read_row_files(folder))
    by_rank = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(len(list(folder.iterdir())))]
    state = {}
    for name, x in by_rank[0]["state"].items():
        label, _, state_name = name.partition(".")
        parts = [content["state"][name] for content in by_rank]
        if label in TABLES:
            x = torch.stack(parts, dim=1).flatten(0, 1)
        elif label in SHARDED and state_name:
            x = torch.cat(parts)
        state[name] = x
    rows = defaultdict(lambda: defaultdict(list))
    for rank, content in enumerate(by_rank):
        for label, by_name in content["rows"].items():
            rows[label]["ids"].append(by_name["local_rows"] * len(by_rank) + rank)
            for name in ("rows", "v", "last"):
                rows[label][name].append(by_name[name])
    return state | sorted_rows({label: {name: torch.cat(parts) for name, parts in by_name.items()}
                                for label, by_name in rows.items()})

def read_save(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "weights.pt").exists():
        rows = {label: dict(ids=by_name["ids"], rows=by_name["rows"])
                for label, by_name in read_row_files(folder).items()}
        return torch.load(folder / "weights.pt", weights_only=True) | sorted_rows(rows)
    tensors = load_file(folder / "weights.safetensors")
    rows = {name.removesuffix(".ids"): dict(ids=tensors.pop(name)) for name in list(tensors) if name.endswith(".ids")}
    for label in rows:
        rows[label]["rows"] = tensors.pop(f"{label}.rows")
    return tensors | sorted_rows(rows)

def run_case(case: Case, trainer: Path, scratch: Path) -> dict[str, dict[str, str]]:
    """Run a case; return losses and hashes by section and name, or {"failed": reason}."""
    scratch.mkdir()
    common = dict(device="cpu", sample_tokens=0)
    runs = [common | case.flags | dict(run_dir=scratch / "run")]
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
        result["weights"] = hashes(read_save(scratch / "save"))
    except (RuntimeError, OSError, LookupError, subprocess.TimeoutExpired) as error:
        return dict(failed=f"{type(error).__name__}: {error}")
    return result


# ---- Comparing
def differences(base: dict[str, dict], now: dict[str, dict]) -> list[str]:
    """Describe how two runs of a case differ: in bits, and in names. Each keeps checkpoints of other steps, too."""
    found = []
    sections = base.keys() & now.keys()
    if not any(section.startswith("state at") for section in sections):
        found.append("no checkpoint of the same step")
    for section in sorted(sections):
        before, after = base[section], now[section]
        differing = [name for name in before if name in after and after[name] != before[name]]
        if differing and section == "losses":
            pairs = [(float.fromhex(before[name]), float.fromhex(after[name])) for name in differing]
            largest = max(abs(y / x - 1) for x, y in pairs)
            found.append(f"{len(differing)} of {len(before)} losses from {differing[0]} on, at most {largest:.2e}")
        elif differing:
            found.append(f"bits of {section}: {', '.join(differing)}")
        if before.keys() != after.keys():
            found.append(f"names in {section} on one side only: {', '.join(sorted(before.keys() ^ after.keys()))}")
    return found

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help=f"commit of the trainer to compare with [{BASE}]")
    parser.add_argument("--trainer", type=Path, default=ROOT / "train_gpt.py")
    parser.add_argument("--only", default="", help=f"cases, separated by commas: {', '.join(all_cases())}")
    parser.add_argument("--keep", type=Path, help="JSON file with the results of the base")
    args = parser.parse_args()

    cases = all_cases()
    names = args.only.split(",") if args.only else list(cases)
    known = json.loads(args.keep.read_text()) if args.keep and args.keep.exists() else {}
    counts = Counter()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base.py")
        base.write_bytes(subprocess.run(["git", "-C", str(ROOT), "show", f"{args.base}:train_gpt.py"],
                                        capture_output=True, check=True).stdout)
        for name in names:
            start = time.monotonic()
            if name not in known:
                known[name] = run_case(cases[name], base, Path(folder, f"{name}-base"))
                if args.keep:
                    args.keep.write_text(json.dumps(known))
            now = run_case(cases[name], args.trainer.resolve(), Path(folder, name))
            failed = [result["failed"] for result in (known[name], now) if "failed" in result]
            text = "; ".join(failed or differences(known[name], now))
            outcome = "failed" if failed else "differs" if text else "same"
            counts[outcome] += 1
            print(f"{name:24} {time.monotonic() - start:5.1f} s  {outcome}{': ' if text else ''}{text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
