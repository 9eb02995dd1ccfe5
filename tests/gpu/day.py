"""Check and measure this machine's GPUs with one command: is the trainer correct here, and as fast as predicted?

    python tests/gpu/day.py [--out=DIR] [--parts=NAME,...] [--limit=SECONDS]
    python tests/gpu/day.py --device=cpu          dry run: the same code at tiny sizes, on a machine without a GPU

It needs torch, numpy and the repository, but no network. Every step is a process with a time limit, and its whole
process group is killed at the end. DIR/day.json has a list `steps` (name, verdict, seconds, figures, reason) and is
replaced atomically after each step. Verdicts and exit status (EXIT_STATUS): records/guide/FIRST_GPU_RUN.md.
"""
import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from dry_run import price

Facts = dict[str, Any]
EXIT_STATUS = {"red": 1, "skipped": 1, "yellow": 3, "green": 0, "dry run": 0}           # from worst to best
CPU_LIMIT_S = 300                        # for any step, because a dry run may share its cores
REAP_S = 5                               # for a killed process to end
GPT2_SIZES = 50_257, 50_256              # vocabulary size, BOS id
MAX_LOSS_DIFFERENCE = 0.05               # nats per token, in each step, between the fast path and float32
SLOW_STEP_RATIO = 1.15                   # measured / predicted
SLOW_OPERATION_RATIO = 1.1               # trainer / plain PyTorch
MEMORY_RATIOS = 0.4, 1.1                 # measured / predicted peak, least and most
UNIFORM_LOSS = math.log(50_257)          # nats per token
FREE_FRACTION = 0.95                     # of the GPUs' memory before a run
INSTALL_HINT = "run pip install -r requirements-gpu.txt for faster attention, and repeat this step"

class Verdict(Exception):
    """The verdict of a step, and the reason."""


# ---- Processes
def run_ranks(command: list[str], ranks: list[dict[str, str]], output: Path, seconds: float) -> list[int] | None:
    """Run the command once per rank, with these environment variables. At the end, kill all processes of all groups.

    Returns the exit statuses; None if a rank has not ended after these seconds.
    """
    deadline = time.monotonic() + seconds
    children = []
    try:
        with open(output, "wb") as file:
            for variables in ranks:
                children.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, start_new_session=True,
                                                 stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT))
        return [child.wait(deadline - time.monotonic()) for child in children]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):                     # all of its group have ended
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):              # blocked in the driver
                child.wait(REAP_S)

def rank_variables(world_size: int) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = dict(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=str(port))
    return [common | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world_size)]


# ---- The day
class Day:
    """Directory, device and figures of earlier steps. Starts the processes of a step."""
    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.device: str = args.device
        self.cpu = args.device == "cpu"
        self.end = time.monotonic() + (args.limit or math.inf)
        self.deadline = math.inf                              # when the current step is killed
        self.figures: dict[str, Facts] = {}                   # step -> figures
        for kind in ("train", "val"):
            write_text(self.out / f"text_{kind}.bin", kind)
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        os.environ.setdefault("TORCH_LOGS", "recompiles")
        os.environ["PYTHONUNBUFFERED"] = "1"

    def call(self, name: str, *arguments: str, ranks: int = 0) -> str:
        """Run Python on `ranks` ranks (0: without a launcher's variables) until the step's deadline; return its end."""
        threads = 1 if self.cpu else max(1, os.cpu_count() // max(1, ranks))
        variables = [dict(OMP_NUM_THREADS=str(threads)) | rank_vars for rank_vars in rank_variables(ranks) or [{}]]
        seconds = self.deadline - time.monotonic()
        output = self.out / f"{name}.txt"
        statuses = run_ranks([sys.executable, *arguments], variables, output, seconds)
        lines = [line.strip() for line in output.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()]
        tail = " | ".join([line for line in lines if line][-6:])[-500:]
        if statuses is None:
            verdict = "skipped" if time.monotonic() > self.end else "red"
            raise Verdict(verdict, f"{name} did not end within {seconds:.0f} s: {tail}")
        status = max(statuses, key=abs)
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise Verdict("red", f"{name} {how}: {tail}")
        return tail

    def probe(self, probe: str) -> Facts:
        path = self.out / f"{probe}.json"
        self.call(probe, str(HERE / "gpu_cases.py"), probe, self.device, str(path))
        return json.loads(path.read_text("utf-8"))

    def train(self, name: str, *flags: str, script: tuple[str, ...] = ("train_gpt.py",), ranks: int = 0) -> Path:
        """Run the first steps of preset `record`, or `tiny` on a CPU, through all stages on the text of `pocket`.

        Returns the run directory. ranks: 0 is all GPUs.
        """
        folder = self.out / name
        preset, steps, extension, val_tokens = ("tiny", 12, 6, 512) if self.cpu else ("record", 60, 10, 262_144)
        memory = self.figures["preflight"]["memory_gib"]      # as in run.sh and HARDWARE.md
        if not self.cpu and memory < 60:
            flags = "--micro_batch_size=1", *flags
            preset = "record" if memory >= 29 else "record_24gb"
        self.call(name, *script, f"--preset={preset}", f"--device={self.device}", f"--run_dir={folder}",
                  f"--num_scheduled_steps={steps}", f"--num_extension_steps={extension}", "--epochs=0",
                  f"--train_files={self.out}/text_train.bin", f"--val_files={self.out}/text_val.bin", "--val_every=0",
                  f"--val_tokens={val_tokens}", f"--val_batch_tokens={val_tokens}", "--sample_tokens=0",
                  *flags, ranks=ranks or self.world_size())
        return folder

    def world_size(self) -> int:
        """Return the number of ranks: at most one per GPU, and a divisor of the 8 sequences of a step."""
        gpus = self.figures["preflight"]["gpus"]
        return max(world_size for world_size in (1, 2, 4, 8) if world_size <= max(1, gpus))

def write_text(path: Path, kind: str) -> None:
    """Write the text of `pocket` as a shard with GPT-2's vocabulary; only the id of BOS differs."""
    # A header has 256 words of 4 bytes; words 3 and 4 are the vocabulary size and the BOS id.
    shard = np.fromfile(ROOT / f"data/pocket/pocket_{kind}_000000.bin", "<u2")
    header, tokens = shard[:512], shard[512:]
    tokens[tokens == header[8]] = GPT2_SIZES[1]
    header[6], header[8] = GPT2_SIZES
    shard.tofile(path)


# ---- Steps. Each gets the day and its figures, to which it adds results. It returns remarks, which make it yellow.
def preflight(day: Day, figures: Facts) -> list[str]:
    """Does torch find a GPU, and is its memory free?"""
    figures |= day.probe("preflight")
    if figures["free_fraction"] < FREE_FRACTION:
        return [f"{figures['free_fraction']:.0%} of the memory is free: another process uses the GPU"]
    return []

def operations(day: Day, figures: Facts) -> list[str]:
    """Does every operation match float64, and is it faster than plain PyTorch?"""
    wrong = []
    remarks = []
    for name, case in day.probe("operations").items():
        figures[name] = ms = case["ms"]
        wrong += case["wrong"]
        if ms.get("trainer", 0.0) > SLOW_OPERATION_RATIO * ms.get("plain", math.inf):
            remarks.append(f"{name}: {ms['trainer']:.3f} ms, plain PyTorch takes {ms['plain']:.3f}")
    if wrong:
        raise Verdict("red", "; ".join(wrong))
    return remarks

def events_of(folder: Path, kind: str) -> list[Facts]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return [event for event in events if event["type"] == kind]

def measured_stages(folder: Path) -> dict[str, float]:
    """Return the mean ms per step of each stage before the extension."""
    header, = events_of(folder, "header")
    ms_after = {event["step"]: event["train_time_ms"] for event in events_of(folder, "step")}
    num_stages = len(header["config"]["stages"]) - 1
    steps = header["config"]["num_scheduled_steps"] // num_stages
    found = {}
    for stage in range(num_stages):
        first = stage * steps + steps // 4                    # the host runs ahead at both ends of a stage
        last = (stage + 1) * steps - steps // 8
        found[f"stage {stage + 1}"] = (ms_after[last] - ms_after[first]) / (last - first)
    return found

def predicted(day: Day, kernel: str) -> tuple[dict[str, float], int]:
    """Return the predicted ms per step of each stage, and the peak in MiB, for this world size; {} and 0 if unknown."""
    costs = price.load(price.EXPECTED_COSTS)
    world_size = str(day.world_size())
    if day.cpu or world_size not in costs["worlds"]:
        return {}, 0
    peaks = [phase["sums"]["peak_bytes"] for phase in costs["worlds"][world_size]["phases"].values()]
    ms = {}
    if costs["card"] in day.figures["preflight"]["card"]:
        attention_kind = "FA3" if kernel.startswith(("FA3", "FA4")) else "FA2"
        ms = dict(zip(costs["steps"], price.stage_times(costs, world_size, attention_kind, costs["steps"])))
    return ms, max(peaks) >> 20

def stages(day: Day, figures: Facts) -> list[str]:
    """Does the trainer run all stages without a recompile, within the predicted memory and times?

    Profiles two steps: RUN_DIR has the trace, and the step's output a table of the longest operations.
    """
    # The profile is of the extension, so that it does not slow down the stages whose times are compared.
    first = 14 if day.cpu else 64
    fast_path = ["--dtype=bfloat16", "--head=emulated"] if day.cpu else []
    folder = day.train("stages", *fast_path, script=("tests/profile_steps.py", f"{first}:{first + 2}"))
    header, = events_of(folder, "header")
    result, = events_of(folder, "result")
    losses = [event["train_loss"] for event in events_of(folder, "step")]
    peak = result["peak_memory_mib"].get("allocated", 0)
    predicted_ms, predicted_peak = predicted(day, header["attention"])
    figures |= dict(run_dir=str(folder), attention=header["attention"], head=header["head"], world=header["world_size"],
                    first_loss=losses[0], last_loss=losses[-1], val_loss=result["val_loss"], peak_mib=peak,
                    predicted_peak_mib=predicted_peak, recompiles=result.get("recompiles", 0))
    figures["phases_ms"] = {event["name"]: event["ms"] for event in events_of(folder, "phase")}
    remarks = []
    facts = day.figures["preflight"]
    if facts["capability"][0] in (9, 10) and header["attention"].startswith("varlen"):
        remarks.append(f"attention is FlashAttention 2 ({header['attention']}) on a {facts['card']}: {INSTALL_HINT}")
    for stage, ms in measured_stages(folder).items():
        expected = predicted_ms.get(stage, math.inf)
        figures[stage] = dict(ms=ms, predicted_ms=predicted_ms.get(stage))
        if ms > SLOW_STEP_RATIO * expected:
            remarks.append(f"{stage}: {ms:.1f} ms a step, {ms / expected:.2f} of the predicted {expected:.1f}")
    if figures["recompiles"]:
        raise Verdict("red",
                      f"{figures['recompiles']} graphs were compiled after the warm-up; its output has the reasons")
    least, most = MEMORY_RATIOS
    if predicted_peak and not least < peak / predicted_peak < most:
        raise Verdict("red", f"peak memory {peak} MiB, predicted {predicted_peak} MiB")
    if not result["val_loss"] < UNIFORM_LOSS:
        raise Verdict("red", f"loss {result['val_loss']:.3f} after {len(losses)} steps, "
                             f"uniform guess {UNIFORM_LOSS:.3f}")
    if not predicted_ms and not day.cpu:
        remarks.append(f"times are not judged: no prediction for {day.world_size()} x {facts['card']}")
    return remarks

def match(day: Day, figures: Facts) -> list[str]:
    """Does the fast path (bfloat16, fp8, compiled kernels, all GPUs) have the losses of plain float32 on one GPU?

    Compares the losses of the next token, because the multi-token loss is a sum and not in nats per token.
    """
    # All these steps are in the first stage, so smaller batches in later stages do not change them. With large batches,
    # float32 without compiled kernels needs more memory than a GPU has. The micro-batch size changes only rounding.
    steps = 4 if day.cpu else 12
    flags = [f"--max_steps={steps}", f"--stages={day.figures['preflight']['stages_first_batch']}"]
    folders = [day.figures.get("stages", {}).get("run_dir") or day.train("match-fast", *flags)]
    folders.append(day.train("match-float32", *flags, "--dtype=float32", "--head=plain", "--attention=reference",
                             "--compile=0", "--micro_batch_size=1", ranks=1))
    logs = [events_of(Path(folder), "step")[:steps] for folder in folders]
    fast, plain = ([event["train_loss_next"] for event in log] for log in logs)
    differences = [a - b for a, b in zip(fast, plain, strict=True)]
    figures |= dict(fast=fast, float32=plain, differences=differences)
    if not all(abs(difference) < MAX_LOSS_DIFFERENCE for difference in differences):  # False for NaN
        raise Verdict("red", f"losses of the fast path minus those of float32: {differences}, "
                             f"allowed +- {MAX_LOSS_DIFFERENCE}")
    return []

def tests(day: Day, figures: Facts) -> list[str]:
    """Do the tests that need a GPU pass?"""
    if not day.figures["preflight"]["pytest"]:
        raise Verdict("skipped", "pytest is not installed: pip install pytest")
    chosen = ["tests/gpu", "-m", "gpu or gpus2"]
    if day.cpu:
        chosen = ["tests/gpu/test_gpu.py", "-k", "cpu-mlp"]
    pytest = ("-m", "pytest", "-q", "-rfs", "--tb=short", "-p", "no:cacheprovider")
    figures["summary"] = day.call("tests", *pytest, *chosen)
    return []

STEPS = {                                # most valuable first, with the seconds until it is killed
    "preflight": (preflight, 60), "operations": (operations, 240), "stages": (stages, 600), "match": (match, 260),
    "tests": (tests, 900)}

def run_step(day: Day, name: str) -> Facts:
    judge, max_seconds = STEPS[name]
    start = time.monotonic()
    day.deadline = min(start + (CPU_LIMIT_S if day.cpu else max_seconds), day.end)
    day.figures[name] = figures = {}
    verdict = "skipped"
    if name != "preflight" and not day.figures["preflight"]:
        reason = "preflight is red"
    elif day.end < start:
        reason = "no time is left: raise --limit"
    else:
        try:
            reason = "; ".join(judge(day, figures))
            verdict = "yellow" if reason else "green"
            if day.cpu:
                verdict = "dry run"
        except Verdict as error:
            verdict, reason = error.args
        except Exception as error:                            # unreadable results, a full disk: the day continues
            verdict, reason = "red", f"results cannot be read: {type(error).__name__}: {str(error)[:300]}"
    return dict(name=name, verdict=verdict, seconds=round(time.monotonic() - start, 1), figures=figures, reason=reason)


# ---- The command
def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: a dry run at tiny sizes [%(default)s]")
    parser.add_argument("--out", type=Path, default=ROOT / f"logs/day-{time.strftime('%Y%m%d-%H%M%S')}",
                        help="new directory for all results [logs/day-TIME]")
    parser.add_argument("--parts", default=",".join(STEPS), help="steps to run [%(default)s]")
    parser.add_argument("--limit", type=float, default=0.0,
                        help="seconds for all steps together; 0: no limit [%(default)s]")
    args = parser.parse_args(argv)
    args.parts = ["preflight", *args.parts.split(",")]
    unknown = [name for name in args.parts if name not in STEPS]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)}; expected some of {', '.join(STEPS)}")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True)
    return args

def main(argv: list[str]) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    day = Day(args)
    path = day.out / "day.json"
    source_sha256 = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()
    requested = [name for name in STEPS if name in args.parts]
    steps = []
    for name in requested:
        step = run_step(day, name)
        steps.append(step)
        worst = min((step["verdict"] for step in steps), key=list(EXIT_STATUS).index)
        verdict = worst if name == requested[-1] else "unfinished"
        content = dict(device=args.device, source_sha256=source_sha256, verdict=verdict, steps=steps)
        partial_path = path.with_suffix(".part")
        partial_path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        os.replace(partial_path, path)
        print(f"{time.monotonic() - start:5.0f} s  {name}: {step['verdict']}  {step['reason']}".rstrip(), flush=True)
    failed = [f"{step['name']} {step['verdict']}" for step in steps if EXIT_STATUS[step["verdict"]]]
    causes = f": {', '.join(failed)}" if failed else ""
    print(f"day: {worst.upper()}, {len(steps)} of {len(STEPS)} steps{causes}; {path}")
    return EXIT_STATUS[worst]


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:        # nohup ignores SIGHUP
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))   # `run_ranks` ends the step's processes
    sys.exit(main(sys.argv[1:]))
