"""What main_grad is worth on one rank that takes its slots one by one.

    python tests/bench_main_grad.py [--preset=pocket]

Three ways to add up the gradients of a step, with the same weights, slots and products: autograd's .grad (bf16), a
main_grad in f32, and a sum in f64 of what each slot alone gives main_grad. Printed are, for the banks and
the head in bf16, the relative error of the first two against the third; and, in the preset's own type, the time of a
forward_backward in turn, median and extremes, with the ratio of the medians.
"""
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import train_gpt as t
from common import fill_randomly, random_batch

OWNED = ("attn", "mlp", "lm_head")
ROUNDS = 9
TOKENS = "formula:4096:4095:1000000:1"                                        # what fixes the vocabulary


def executor(cfg: t.Config, main_grad: bool) -> t.Executor:
    """With the weights of every call; without main_grad autograd keeps all gradients."""
    made = t.Executor(cfg, t.Fabric(torch.device("cpu"), 0, 1), t.attention_reference, "plain", 1)
    fill_randomly(made.model)
    if not main_grad:
        for label in OWNED:
            del made.model.get_parameter(label).main_grad
    return made


def gradient(made: t.Executor, label: str) -> torch.Tensor:
    weight = made.model.get_parameter(label)
    return weight.main_grad if weight.grad is None else weight.grad


def errors(cfg: t.Config, batch: t.Batch, values: t.Values) -> dict[str, tuple[float, float]]:
    """By label: relative error of .grad, and of main_grad."""
    summed = []
    for main_grad in (False, True):
        made = executor(cfg, main_grad)
        made.forward_backward(batch, values)
        summed.append({label: gradient(made, label).double() for label in OWNED})

    exact = {label: torch.zeros_like(summed[0][label]) for label in OWNED}
    alone = executor(cfg, True)
    for slot in range(len(batch.tokens)):
        alone.forward_backward(batch.map(lambda x, slot=slot: x[slot:slot + 1]), values)
        for label in OWNED:
            exact[label] += gradient(alone, label).double()
        alone.drop_gradients()

    found = {}
    for label, want in exact.items():
        of_autograd, of_main_grad = (float((each[label] - want).norm() / want.norm()) for each in summed)
        found[label] = of_autograd, of_main_grad
    return found


def milliseconds(cfg: t.Config, batch: t.Batch, values: t.Values) -> tuple[list[float], list[float]]:
    """Of forward_backward with autograd's .grad and with main_grad, in turn."""
    sides = [executor(cfg, main_grad) for main_grad in (False, True)]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):
        for made, found in zip(sides, times):
            began = time.perf_counter()
            made.forward_backward(batch, values)
            if turn:                                                          # the first touches new memory
                found.append(1000 * (time.perf_counter() - began))
            made.drop_gradients()
    return times


def main() -> None:
    preset, flags = t.parse_flags(sys.argv[1:] or ["--preset=pocket"])
    shards = t.find_shards(TOKENS)
    cfg = t.resolve(replace(flags, device="cpu", compile=0, epochs=0), shards, shards)
    values = t.Schedule(cfg).at(1)
    length = values.slot_tokens
    batch = random_batch(cfg, 0, cfg.num_slots, length, step=1)
    print(f"{preset}: {cfg.num_slots} slots of {length} tokens, one by one; {torch.get_num_threads()} threads")
    for label, (of_autograd, of_main_grad) in errors(replace(cfg, dtype="bfloat16"), batch, values).items():
        print(f"{label:8} error of .grad in bf16 {of_autograd:.1e}, of main_grad in f32 {of_main_grad:.1e}")
    before, after = milliseconds(cfg, batch, values)
    for name, found in ((".grad", before), ("main_grad", after)):
        print(f"{name:9} {statistics.median(found):8.1f} ms ({min(found):.1f} to {max(found):.1f}), n = {len(found)}")
    print(f"ratio {statistics.median(after) / statistics.median(before):.3f}")


if __name__ == "__main__":
    main()
