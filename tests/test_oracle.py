"""train_gpt.py against the reference vectors: all of the extract beside this file, and of ORACLE_DIR if it is there.

The second half is a test of the first: mistakes that are easily made, one by one, and the array at which each has to be
noticed.
"""
from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import CHECKS, EXTRACT, WHOLE, Mismatch, Oracle

import train_gpt as tg

pytestmark = pytest.mark.recipe

Patch = Callable[[pytest.MonkeyPatch], None]


def directories() -> Iterator[tuple[str, Path]]:
    yield "extract", EXTRACT
    yield "whole", WHOLE


def cases(*files: str) -> list:
    """(directory, file), of the given files or all; one skipped case for a directory that is not there."""
    found = []
    for name, path in directories():
        if not path.is_dir():
            skip = pytest.mark.skip(reason=f"no directory {path}: ORACLE_DIR may name one with all reference vectors")
            found.append(pytest.param(path, "", id=name, marks=skip))
        found += [pytest.param(path, file, id=f"{name}-{file}") for file in Oracle(path).files
                  if file in CHECKS and (not files or file in files)]
    return found


@pytest.mark.parametrize("path, file", cases())
def test_vectors(path: Path, file: str) -> None:
    CHECKS[file](Oracle(path))


@pytest.mark.parametrize("path, file", cases("s_acts", "s_grads"))
def test_config_s_in_single_precision(path: Path, file: str) -> None:
    CHECKS[file](Oracle(path, "float32"))


@pytest.mark.all
def test_trajectory_in_single_precision() -> None:
    CHECKS["traj"](Oracle(EXTRACT, "float32"))


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_trajectory_of_dense_rows_on_one_rank(dtype: str) -> None:
    """Sparse is the default; test_ranks.py has both on several ranks."""
    CHECKS["traj"](Oracle(EXTRACT, dtype, "dense"))


@pytest.mark.parametrize("path", [pytest.param(path, id=name) for name, path in directories()])
def test_every_file_has_a_check(path: Path) -> None:
    checked = {*CHECKS, "traj_init"}                                      # its arrays are where the trajectory starts
    assert set(Oracle(path).files) <= checked
    assert path == EXTRACT or not path.is_dir() or set(Oracle(path).files) == checked


def test_a_forgotten_array_is_noticed() -> None:
    vectors = Oracle(EXTRACT).open("bigram")
    with pytest.raises(AssertionError, match="nothing looks at .*sequence_rows"):
        vectors.finish()


def test_extract_is_small() -> None:
    assert sum(path.stat().st_size for path in EXTRACT.rglob("*.*")) <= 3_000_000


def test_defaults_are_the_recipe() -> None:
    """The vectors' constants are the defaults of Config and of the module; sizes of a run and of the tests are not."""
    meta = Oracle(EXTRACT).meta
    slots = meta["recipe"]["num_slots"]
    cfg = Oracle(EXTRACT).config("schedule", [tokens // slots for tokens in meta["schedule"]["batch_tokens"]])
    own = {"dtype", "head", "device", "padded_vocab", "momentum_warmup_steps", "momentum_cooldown_steps"}
    for field in fields(tg.Config):
        assert field.name in own or getattr(cfg, field.name) == getattr(tg.Config(), field.name), field.name
    assert meta["recipe"]["rms_eps"] == tg.RMS_EPS
    assert meta["recipe"]["softcap"] == [tg.LOGIT_CAP, tg.LOGIT_SHIFT, tg.LOGIT_WIDTH]

# ----------------------------------------------------------------------------------------------------------------------
# Ways to make a mistake
# ----------------------------------------------------------------------------------------------------------------------

def constant(name: str, value: object) -> Patch:
    return lambda patch: patch.setattr(tg, name, value)


def layers(changes: dict[int, dict[str, Any]]) -> Patch:
    """Other words in the layer table."""
    return constant("LAYERS", tuple(replace(layer, **changes.get(depth, {})) for depth, layer in enumerate(tg.LAYERS)))


def wrapped(owner: Any, name: str, call: Callable) -> Patch:
    """Instead of owner.name(...): call(real function, its arguments by name)."""
    def apply(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)
        signature = inspect.signature(real)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            return call(lambda **named: real(**named), signature.bind(*args, **kwargs).arguments)
        wrong.__signature__ = signature
        patch.setattr(owner, name, wrong)
    return apply


def given(owner: Any, name: str, **changes: Callable[[dict], Any]) -> Patch:
    """A function that gets other arguments, each made from all that it was given."""
    return wrapped(owner, name, lambda real, a: real(**{**a, **{key: change(a) for key, change in changes.items()}}))


def returned(owner: Any, name: str, change: Callable[[Any, dict], Any]) -> Patch:
    return wrapped(owner, name, lambda real, a: change(real(**a), a))


def kernel(**changes: Callable[[dict], Any]) -> Patch:
    return given(tg, "attention_reference", **changes)


def values_with(**changes: Callable[[tg.Values], Any]) -> Patch:
    """An optimizer that takes something else for the step's values, behind the comparison of the schedule."""
    return given(tg.Optimizer, "step", values=lambda a: replace(
        a["values"], **{name: change(a["values"]) for name, change in changes.items()}))


def both(*patches: Patch) -> Patch:
    return lambda patch: [apply(patch) for apply in patches]


def smear_inside_documents(a: dict) -> torch.Tensor:
    tokens = a["batch"].tokens
    return a["scalars"]["smear"] * (tokens[:, 1:, None] != tokens[0, 0])


def value_tables_in_reverse(found: tuple, _: dict) -> tuple:
    x0, streams, values = found
    rows = [joined[0][1] for joined in values.values()]
    values = {depth: [(joined[0][0], row)] for (depth, joined), row in zip(values.items(), reversed(rows))}
    return x0, streams, values


def rotate_pairs_far_apart(real: Callable, a: dict) -> torch.Tensor:
    """Channels i and i + E/2 instead of neighbours."""
    width = a["x"].shape[-1]
    pairs = torch.arange(width).view(2, -1).T[:width // 4].flatten()
    order = torch.cat((pairs, torch.tensor([c for c in range(width) if c not in pairs.tolist()])))
    return real(**{**a, "x": a["x"][..., order]})[..., order.argsort()]


def rotate_all_channels(real: Callable, a: dict) -> torch.Tensor:
    halves = [torch.cat((half, half), dim=-1) for half in a["x"].chunk(2, dim=-1)]
    return torch.cat([real(**{**a, "x": half}).chunk(2, dim=-1)[0] for half in halves], dim=-1)


def rotate_by_stream_position(real: Callable, a: dict) -> torch.Tensor:
    """Paired layers only: first half of the heads at 2t, second half at 2t + 1."""
    slots, length, half, two, width = a["x"].shape
    tables = {name: a[name].transpose(1, 2) for name in ("cos", "sin")}
    return real(x=a["x"].reshape(slots, length, two, half, width), **tables).reshape(a["x"].shape)


def pair_neighbours(real: Callable, a: dict) -> torch.Tensor:
    if a["layer"].attention != "paired":
        return real(**a)
    order = torch.arange(a["self"].heads).view(-1, 2).T.flatten()         # 0, 2, 4, ..., 1, 3, 5, ...
    qkv = a["qkv"].unflatten(-1, (3, len(order), -1))[..., order, :].flatten(-3)
    return real(**a | dict(qkv=qkv))[:, :, order.argsort()]


def window_in_tokens(real: Callable, a: dict) -> torch.Tensor:
    factor = 2 if a["layer"].attention == "paired" else 1
    return real(**a | dict(span=replace(a["span"], window=factor * a["span"].window)))


def mtp_targets_around_the_slot(_: Callable, a: dict) -> tuple[torch.Tensor, torch.Tensor]:
    targets, weights = a["targets"], a["weights"]
    columns = torch.stack([targets.roll(-k, dims=1) for k in range(len(weights))], dim=-1)
    return columns.flatten(0, 1), weights.expand(targets.numel(), -1)


def hash_with_the_true_first_token(real: Callable, a: dict) -> np.ndarray:
    """Position 1 as if it stood one position later."""
    hashed, late = real(**a), real(**{**a, "tokens": np.insert(a["tokens"], 0, 0)})
    hashed[1:2] = late[2:3]
    return hashed


def no_nesterov(patch: pytest.MonkeyPatch) -> None:
    """The momentum alone is orthogonalised; NorMuon has just updated it in place."""
    seen = []
    given(tg, "normuon_direction", momentum=lambda a: seen.append(a["momentum"]) or a["momentum"])(patch)
    given(tg, "polar_express", x=lambda a: seen[-1])(patch)


def normuon_with_strict_mask(_: Callable, a: dict) -> None:
    """In float64, without a mantissa."""
    update = tg.normuon_direction(a["grad"] * a["grad_scale"], a["momentum"], a["second"], a["mu"], a["beta2"], F64)
    p, rates = a["p"], a["lr_muls"] * a["lr"]
    p.copy_(p - p * (update * p > 0) * a["decay"] * rates - update * rates)


def round_mantissa_away(real: Callable, a: dict) -> None:
    """To nearest."""
    real(**a)
    if a["mantissa"] is not None:
        a["p"].copy_(tg.with_mantissa(a["p"], a["mantissa"]))
        a["mantissa"].zero_()


def adam_at_every_step() -> Patch:
    return both(given(tg.Optimizer, "__init__", cfg=lambda a: replace(a["cfg"], adam_every=1)),
                values_with(adam_step=lambda _: True))


def no_factor_of_the_shape(real: Callable, a: dict) -> None:
    real(**a)
    if a["row"].optimizer == "normuon":
        a["self"].lr_muls /= a["self"].lr_muls.min()


def adam_decay_everywhere(real: Callable, a: dict) -> None:
    before = a["p"].clone()
    real(**{**a, "decay": 0 * a["decay"]})
    a["p"] -= before * a["decay"]


def drop_gradients(real: Callable, a: dict) -> None:
    real(**a)
    for entry in a["self"].entries.values():
        entry.clear()


def forget_embed_gradient(real: Callable, a: dict) -> None:
    if a["values"].tied and a["values"].adam_step:
        a["self"].entries["embed"].table.row_grads.zero_()
    real(**a)


def one_update_too_few(real: Callable, a: dict) -> tuple:
    """Of the embedding after the untying: as if only then it began to count."""
    if a["row"].label != "embed":
        return real(**a)
    values, every = a["values"], a["self"].cfg.adam_every
    return real(**a | dict(values=replace(values, step=values.step - every)))


def cooldown_from_all_steps(real: Callable, a: dict) -> None:
    real(**a)
    schedule = a["self"]
    schedule.cooldown_start = int(schedule.total_steps * (1 - schedule.cfg.cooldown_frac))


def without_last_growth(values: tg.Values, a: dict) -> tg.Values:
    cfg = a["self"].cfg
    return replace(values, long_window=cfg.stages[values.stage].long_window * cfg.window_block)


REAL_AT = tg.Schedule.at


def token_weights_of_the_next_step(values: tg.Values, a: dict) -> tg.Values:
    return replace(values, mtp_weights=REAL_AT(a["self"], a["step"] + 1).mtp_weights)


def last_end_not_lowered(slot: tg.Slot, _: dict) -> tg.Slot:
    slot.cu_seqlens[-1] += 1
    return slot


def rank_major(slots: list, fabric: tg.Fabric) -> list:
    """An order in which every W-th slot gives each rank neighbours."""
    return [slots[i] for i in np.arange(len(slots)).reshape(fabric.world, -1).T.flatten()]


def validation_rank_major(real: Callable, a: dict) -> Iterator[tg.Batch]:
    data = a["self"]
    blocks = [data.slots[at:at + data.cfg.num_slots] for at in range(0, len(data.slots), data.cfg.num_slots)]
    data.slots = [slot for block in blocks for slot in rank_major(block, data.fabric)]
    return real(**a)


F64, E4M3, E5M2 = torch.float64, torch.float8_e4m3fn, torch.float8_e5m2


def gradient_in_e4m3(real: Callable, a: dict) -> torch.Tensor:
    if a["grad"].dtype != E5M2:
        return real(**a)
    exact = torch.empty_like(a["logits"])
    losses = real(**a | dict(grad=exact))
    a["grad"].copy_(exact.to(E4M3).float())
    return losses


def head_loss_backward(patch: pytest.MonkeyPatch) -> None:
    real = tg.HeadLoss.backward
    patch.setattr(tg.HeadLoss, "backward", staticmethod(lambda ctx, grad: real(ctx, torch.ones_like(grad))))

# ----------------------------------------------------------------------------------------------------------------------
# Mistakes: name, file, key at which it has to be noticed, patch
# ----------------------------------------------------------------------------------------------------------------------

MISTAKES = (
    # model
    ("norm without eps", "s_acts", "sumsq.x0", constant("RMS_EPS", 2.2e-16)),
    ("norm eps 1e-5", "s_acts", "sumsq.x0", constant("RMS_EPS", 1e-5)),
    ("smear stops at document starts", "s_acts", "sumsq.smear", given(
        tg.GPT, "inputs", scalars=lambda a: a["scalars"] | dict(smear=smear_inside_documents(a)))),
    ("window of w keys", "s_acts", "sumsq.attn0", kernel(
        span=lambda a: replace(a["span"], window=a["span"].window - 1))),
    ("no document mask", "s_acts", "sumsq.attn0", kernel(
        cu_seqlens=lambda a: torch.tensor([0, len(a["q"])]), span=lambda a: replace(a["span"], max_len=len(a["q"])))),
    ("scale 1/sqrt(E)", "s_acts", "sumsq.attn0", kernel(
        span=lambda a: replace(a["span"], scale=a["q"].shape[-1] ** -0.5))),
    ("paired window in tokens", "s_acts", "sumsq.attn0", wrapped(tg.GPT, "attend", window_in_tokens)),
    ("paired neighbour heads", "s_acts", "sumsq.attn0", wrapped(tg.GPT, "attend", pair_neighbours)),
    ("paired angle from the stream", "s_acts", "sumsq.attn0", wrapped(tg, "rotate", rotate_by_stream_position)),
    ("rotation the other way", "s_acts", "sumsq.attn0", given(tg, "rotate", sin=lambda a: -a["sin"])),
    ("rotary pairs far apart", "s_acts", "sumsq.attn0", wrapped(tg, "rotate", rotate_pairs_far_apart)),
    ("all channels rotate", "s_acts", "sumsq.attn0", wrapped(tg, "rotate", rotate_all_channels)),
    ("rotary base 10000", "s_inputs", "yarn0.angular_freq", constant("ROTARY_BASE", 1e4)),
    ("queries and keys not normalised", "s_acts", "sumsq.attn0", wrapped(
        tg, "rms_norm", lambda real, a: a["x"] if a["x"].dim() == 4 else real(**a))),
    ("attention gate with factor 2", "s_acts", "sumsq.attn0", returned(tg.GPT, "attend", lambda y, _: 2 * y)),
    ("relu, not squared", "s_acts", "sumsq.mlp0", constant(
        "relu_sq_mlp", lambda n, up, down: tg.linear(n, up).relu() @ down.matrix)),
    ("value tables in reverse", "s_acts", "sumsq.v1", returned(tg.GPT, "inputs", value_tables_in_reverse)),
    ("key offset on a short layer", "s_acts", "sumsq.k1", layers({1: dict(key_shift=True)})),
    ("key offset missing", "s_acts", "sumsq.k3", layers({3: dict(key_shift=False)})),
    ("long layer with the short window", "s_acts", "sumsq.y3", layers({3: dict(window="short")})),
    ("skip from layer 2", "traj", "val_loss.0", layers({2: dict(keep_as=tg.SKIP), 3: dict(keep_as="")})),
    ("backout from layer 6", "traj", "val_loss.0", layers({6: dict(keep_as=tg.BACKOUT), 7: dict(keep_as="")})),
    ("softcap without shift", "traj", "val_loss.0", constant("LOGIT_SHIFT", 0.0)),
    ("token weights normalised", "traj", "slot_loss.0", given(
        tg, "mtp_targets", weights=lambda a: a["weights"] / a["weights"].sum())),
    ("targets around the slot's end", "traj", "slot_loss.0", wrapped(tg, "mtp_targets", mtp_targets_around_the_slot)),
    ("mean instead of sum", "traj", "slot_loss.0", returned(tg.GPT, "losses", lambda x, _: x / x.shape[1])),
    # hash
    ("hash factors swapped", "bigram", "row", both(
        constant("HASH_CURRENT", tg.HASH_PREVIOUS), constant("HASH_PREVIOUS", tg.HASH_CURRENT))),
    ("hash modulo rows", "bigram", "row", given(tg, "bigram_hash", rows=lambda a: a["rows"] + 1)),
    ("position 1 from the true token", "bigram", "position1_row", wrapped(
        tg, "bigram_hash", hash_with_the_true_first_token)),
    # optimizer and trajectory
    ("Adam on every step", "traj", "samp.1.*", adam_at_every_step()),
    ("even gradients thrown away", "traj", "grad_samp.1.*", wrapped(tg.Optimizer, "step", drop_gradients)),
    ("embed gradient not added", "traj", "samp.2.lm_head", wrapped(tg.Optimizer, "step", forget_embed_gradient)),
    ("gradient of slots not averaged", "traj", "s*.[12].*", both(
        *(given(tg, name, grad_scale=lambda _: 1.0) for name in ("normuon_update", "adam_update")))),
    ("no Nesterov term", "traj", "samp.1.attn", no_nesterov),
    ("momentum constant", "traj", "samp.1.attn", values_with(momentum=lambda _: 0.95)),
    ("down matrices at the single rate", "traj", "samp.1.mlp", constant("DOWN_LR_MUL", 1.0)),
    ("no factor of the shape", "traj", "lr.0.mlp", wrapped(
        tg.Sharded, "__init__", no_factor_of_the_shape)),
    ("NorMuon mask > 0", "traj", "samp.1.mlp", wrapped(tg, "normuon_update", normuon_with_strict_mask)),
    ("NorMuon decay without factors", "traj", "samp.1.mlp", given(
        tg, "normuon_update", decay=lambda a: a["decay"] / a["lr_muls"])),
    ("Adam decay without mask", "opt", "adam.*.p[13]", wrapped(tg, "adam_update", adam_decay_everywhere)),
    ("moments not copied at the untying", "opt", "adam.split.embed_m_after", wrapped(
        tg.Optimizer, "_untie", lambda *_: None)),
    ("step count not copied", "opt", "adam.embed.p*", wrapped(tg.Optimizer, "adam_numbers", one_update_too_few)),
    ("mantissa rounded away", "opt", "mt.*", wrapped(tg, "normuon_update", round_mantissa_away)),
    # schedule
    ("untied one Adam step late", "schedule", "tied_during_update", returned(
        tg.Schedule, "at", lambda values, a: replace(values, untie=a["step"] == a["self"].untie_step + 2))),
    ("YaRN never", "schedule", "yarn_f64.plain.freq.1", returned(
        tg, "rotary_by_stage", lambda rotary, a: rotary[:1] * len(rotary))),
    ("YaRN without the scale", "schedule", "yarn_f64.plain.scale.1", returned(
        tg, "rotary_by_stage", lambda rotary, a: [x._replace(attn_scale=rotary[0].attn_scale) for x in rotary])),
    ("no last growth of the window", "schedule", "windows_final_validation", returned(
        tg.Schedule, "at", without_last_growth)),
    ("token weights of the next step", "schedule", "mtp*", returned(
        tg.Schedule, "at", token_weights_of_the_next_step)),
    ("cooldown from all steps", "schedule", "lr_mul", wrapped(tg.Schedule, "__init__", cooldown_from_all_steps)),
    # loader
    ("cut one token late", "loader", "train_w*", given(
        tg, "pack_block", max_doc_len=lambda a: a["max_doc_len"] + 1)),
    ("last end not lowered", "loader", "train_w*.cu_seqlens", returned(tg, "make_slot", last_end_not_lowered)),
    ("the cut document read again", "loader", "train_w*.inputs", returned(
        tg, "pack_block", lambda packed, _: packed and (packed[0], packed[1] - 1))),
    ("slots rank-major", "loader", "train_w[248].inputs", returned(
        tg.Loader, "_block", lambda out, a: (out[0], rank_major(out[1], a["self"].fabric)))),
    ("validation slots rank-major", "loader", "val_w[248].inputs", wrapped(
        tg.ValidationSet, "batches", validation_rank_major)),
    # fp8
    ("fp8 inputs at scale 1", "fp8", "x_e4m3", constant("FP8_Y_SCALE", 1.0)),
    ("fp8 weights at scale 1/448", "fp8", "w_e4m3", constant("FP8_W_SCALE", 1 / 448)),
    ("fp8 quotient through bf16", "fp8", "x_e4m3", constant(
        "e4m3", lambda x, scale: (x.float() / scale).bfloat16().to(E4M3))),
    ("fp8 gradient at scale 1", "fp8", "*.grad_*", constant("FP8_GRAD_SCALE", 1.0)),
    ("fp8 gradient in e4m3", "fp8", "*.grad_*", wrapped(tg, "losses_with_gradient", gradient_in_e4m3)),
    ("fp8 without the incoming gradient", "fp8", "*.mixed.grad_*", head_loss_backward),
)


def slow(file: str) -> tuple:
    """Marks of a mistake that takes a trajectory to show."""
    return (pytest.mark.all,) if file == "traj" else ()


@pytest.mark.parametrize("file, key, mistake", [
    pytest.param(file, *row, id=name, marks=slow(file)) for name, file, *row in MISTAKES])
def test_mistake_is_noticed(file: str, key: str, mistake: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(Mismatch) as noticed:
        CHECKS[file](Oracle(EXTRACT))
    assert fnmatch.fnmatchcase(noticed.value.key, key), noticed.value
