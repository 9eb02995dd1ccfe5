"""The whole trainer as the recipe says it: one rank, float64, slot by slot. Slow but right.

`Reference` is used like tg.Engine, with batches of one rank. It has no row plans, caches, row stores, shards, fused
matmuls or main_grad; gradients are autograd's. Layers, rates and schedule are read from the trainer's tables, numbers
of the recipe stand here. Below it are tables at W ranks: row r belongs to rank r mod W, and is its r div W-th.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import train_gpt as tg

F64 = torch.float64
GATE = 12                                # features that a gate reads
HASH = (36313, 27191)                    # of the newer and the older token
NORM_EPS = 2.0**-23
CAP, SHIFT, WIDTH = 23.0, 5.0, 7.5
POLAR = ((8.156554524902461, -22.48329292557795, 15.878769915207462),                # of the recipe
         (4.042929935166739, -2.808917465908714, 0.5000178451051316),
         (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
         (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
         (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
DOWN_RATE = 2.0                          # of down matrices of the MLP, times the rate of up matrices
# Of the fp8 head, each rounded to f32 as the products take it.
Y_SCALE, W_SCALE, GRAD_SCALE = (float(np.float32(largest / 448)) for largest in (100, 1.6, 0.75))
NUM_SIGN_VECTORS = 8192


# ---- Model
def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + NORM_EPS).sqrt()

def rotated(x: Tensor, positions: Tensor, frequencies: Sequence[float]) -> Tensor:
    """x (T, H, E) at positions (T, H): neighbours of the first half times exp(-i position frequency)."""
    angles = positions[..., None] * torch.tensor(frequencies, dtype=F64)
    turning, still = x.chunk(2, dim=-1)
    pairs = torch.complex(turning[..., 0::2], turning[..., 1::2])
    turned = torch.view_as_real(pairs * torch.exp(-1j * angles)).flatten(-2)
    return torch.cat((turned, still), dim=-1)

def sigmoid_gate(features: Tensor, weight: Tensor) -> Tensor:
    """Shares between 0 and 1: features (T, ...), weight (heads, GATE) -> (T, heads)."""
    return torch.sigmoid(features[:, :GATE] @ weight.t())

def attention(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, window: int, scale: float) -> Tensor:
    """q, k, v (N, H, E) -> (N, H, E): softmax over the keys that a query sees, its own and `window` before it, of its
    document; borders (C,) of documents ascend from 0."""
    at = torch.arange(len(q))
    documents = torch.searchsorted(borders.long(), at, right=True)
    back = at[:, None] - at
    seen = (back >= 0) & (back <= window) & (documents[:, None] == documents)
    scores = scale * torch.einsum("qhe,khe->hqk", q, k)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khe->qhe", weights, v)

def next_token_losses(logits: Tensor, targets: Tensor, weights: Sequence[float]) -> Tensor:
    """logits (T, V), targets (T,), weights of the next tokens -> (T,); none beyond the end of the slot."""
    log_p = capped(logits).log_softmax(dim=-1)
    losses = logits.new_zeros(len(targets))
    for ahead, weight in enumerate(weights[:len(targets)]):
        inside = len(targets) - ahead
        found = log_p[torch.arange(inside), targets[ahead:]]
        losses = losses - weight * torch.nn.functional.pad(found, (0, ahead))
    return losses

def capped(logits: Tensor) -> Tensor:
    return CAP * torch.sigmoid((logits + SHIFT) / WIDTH)

def nearest_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest of the finite numbers of an fp8 type, by brute force; of two as near, the even one."""
    words = torch.arange(256, dtype=torch.uint8)
    numbers = words.view(dtype).double()
    words = words[numbers.isfinite()]
    numbers = numbers[numbers.isfinite()]
    distance = (x.double()[..., None] - numbers).abs()
    nearest = distance.amin(dim=-1, keepdim=True)
    preferred = (distance == nearest) * (2 - (words & 1).double())
    return numbers[preferred.argmax(dim=-1)].copysign(x)

def fp8_head(y, w, targets, weights, loss_scale, rows, logits_dtype=F64) -> dict[str, Tensor]:
    """The fp8 head with its roundings made explicit: losses, gradients of y and w, and what rounds. y (N, D), w (D, V),
    targets (B, T). rows (N,): gradient that arrives at each position, loss_weight times a factor. logits_dtype: None
    rounds nothing at all."""
    def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
        if logits_dtype is None:
            return x
        if dtype == torch.float8_e4m3fn:
            x = x.float()                                             # quotients of y and w are f32 numbers
        return nearest_fp8(x, dtype)

    y8 = rounded(y.detach() / Y_SCALE, torch.float8_e4m3fn)
    w8 = rounded(w.detach() / W_SCALE, torch.float8_e4m3fn)
    product = Y_SCALE * W_SCALE * (y8 @ w8)
    logits = product.to(logits_dtype or F64).double().requires_grad_()
    slots = logits.view(*targets.shape, -1)
    losses = torch.cat([next_token_losses(*slot, weights) for slot in zip(slots, targets)])
    grad, = torch.autograd.grad(losses.sum(), logits)
    payload = rounded(grad / GRAD_SCALE, torch.float8_e5m2)
    factor = (rows / loss_scale)[:, None]                 # of each position, besides the loss weight
    scaled = rounded(factor * payload, torch.float8_e5m2)
    scale = loss_scale * GRAD_SCALE
    grad_y = scale * W_SCALE * factor * (payload @ w8.t())
    grad_w = scale * Y_SCALE * (y8.t() @ scaled)
    found = dict(y8=y8, w8=w8, logits=logits, losses=losses, payload=payload, grad_y=grad_y, grad_w=grad_w)
    return {name: x.detach() for name, x in found.items()}


# ---- Updates
def polar(x: Tensor) -> Tensor:
    """The polynomials act on singular values: X -> a X + (b A + c A A) X with A = X X^T is s -> a s + b s^3 + c s^5."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    norms = s.norm(dim=-1, keepdim=True)
    s = s / (1.02 * norms + 1e-6)
    for a, b, c in POLAR:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v

def normuon(p, g, state, mu, beta2, lr, muls, decay) -> Tensor:
    """One step of matrices (M, r, c), and of their state. muls (M, 1, 1); returns the new p."""
    axis = -1 if p.shape[-2] >= p.shape[-1] else -2
    state["momentum"] = mu * state["momentum"] + (1 - mu) * g
    o = polar((1 - mu) * g + mu * state["momentum"])
    mean_square = o.square().mean(dim=axis, keepdim=True)
    state["second"] = beta2 * state["second"] + (1 - beta2) * mean_square
    scaled = o / state["second"].clamp(min=1e-10).sqrt()
    length = torch.linalg.matrix_norm(scaled, keepdim=True).clamp(min=1e-10)
    update = scaled * torch.linalg.matrix_norm(o, keepdim=True) / length
    rate = lr * muls
    return p - (update * p >= 0) * p * decay * lr * rate - update * rate

def adam(p, g, state, number, betas, eps, lr, decay) -> Tensor:
    """Update a parameter and its state for the number-th time; returns the new p."""
    beta1, beta2 = betas
    state["m"] = beta1 * state["m"] + (1 - beta1) * g
    state["v"] = beta2 * state["v"] + (1 - beta2) * g.square()
    size = lr * math.sqrt(1 - beta2**number) / (1 - beta1**number)
    update = size * state["m"] / (state["v"].sqrt() + eps)
    return p - update - (update * p > 0) * p * lr * lr * decay

class Reference:
    """Weights, gradients and updates of a run, each in one piece, by label."""
    def __init__(self, cfg: tg.Config, weights: dict[str, Tensor]) -> None:
        """weights: of all parameters, or for `optim_step` alone of some."""
        self.cfg = cfg
        self.rows = {row.label: row for row in tg.parameter_specs(cfg)}
        self.p = {label: x.detach().double().clone() for label, x in weights.items()}
        self.ngrams = {}
        for line in cfg.tables:
            self.ngrams[line.label] = NaiveTable(line.label, line.rows, cfg.model_dim, line.beta2, cfg.adam_eps)
        self.state = {label: self.zero_state(label, p) for label, p in self.p.items()}
        self.updates = dict.fromkeys(self.p, 0)                               # by Adam
        self.discard_grads()

    def zero_state(self, label: str, p: Tensor) -> dict[str, Tensor]:
        if self.rows[label].optimizer == "adam":
            return dict(m=torch.zeros_like(p), v=torch.zeros_like(p))
        matrices = self.matrices(label, p)
        axis = -1 if matrices.shape[-2] >= matrices.shape[-1] else -2
        return dict(momentum=torch.zeros_like(matrices), second=torch.zeros_like(matrices.narrow(axis, 0, 1)))

    def matrices(self, label: str, x: Tensor) -> Tensor:
        """A bank as its matrices: those of attention are square, those of the MLP of the bank's own height."""
        width = x.shape[-1]
        return x.reshape(-1, width if label == "attn" else x.shape[-2], width)

    def discard_grads(self) -> None:
        self.grads = {label: torch.zeros_like(p) for label, p in self.p.items()}
        self.ngram_grads = {label: np.zeros_like(table.p) for label, table in self.ngrams.items()}
        self.asked = {label: np.zeros(table.rows, bool) for label, table in self.ngrams.items()}

    def leaves(self) -> dict[str, Tensor]:
        """All that losses depend on, by label, to take gradients of."""
        wholes = self.p | {label: torch.from_numpy(table.p) for label, table in self.ngrams.items()}
        return {label: p.clone().requires_grad_() for label, p in wholes.items()}

    def losses(self, leaves, batch, slot, values, weights, seen=None) -> Tensor:
        """Each position's loss in one slot of a batch, (T,). seen gets the activations, by name."""
        seen = {} if seen is None else seen
        by_layer = {label: leaves[label].unbind() for label in ("attn", "mlp")}
        self.stream(leaves | by_layer, batch, slot, values, seen)
        logits = seen["final_norm"] @ leaves["lm_head"]
        seen.update(raw_logits=logits, logits=capped(logits), lse=capped(logits).logsumexp(dim=-1))
        return next_token_losses(logits, batch.targets[slot], weights)

    def stream(self, p, batch, slot, values, seen) -> None:
        """Puts into `seen` what enters the head, and all before it."""
        cfg = self.cfg
        tokens = batch.tokens[slot].long()
        sizes = {name: len(values) for name, values in tg.initial_scalars(cfg).items()}
        scalars = dict(zip(sizes, p["scalars"].split([*sizes.values()])))
        e = p["embed"][tokens]
        gate = scalars["smear"] * sigmoid_gate(e[1:], p["smear_gate"])
        u = torch.cat((e[:1], e[1:] + gate * e[:-1]))
        x = x0 = norm(u)
        bigrams = p["bigram_embed"][batch.row_index["bigram_embed"][slot].long()]
        seen.update(embed=e, smear=u, x0=x0, x0_bigram=bigrams)
        streams = [(scalars["bigram"], bigrams)]
        values_of = {}
        for depth, layer in enumerate(tg.LAYERS):
            if layer.value_embed is not None:
                rows = layer.value_embed * cfg.padded_vocab + tokens
                values_of[depth] = [(layer.value_embed, p["value_embed"][rows])]
        gates = tg.NUM_VALUE_EMBEDS
        for line in cfg.tables:
            found = self.ngram_rows_of(line, p[line.label], batch.tokens[slot].numpy())
            if line.layer is None:
                streams.append((scalars[line.label], found))
            else:
                values_of.setdefault(line.layer, []).append((gates, found))
                gates += 1

        kept = {}
        for depth, layer in enumerate(tg.LAYERS):
            if layer.add_saved:
                gate = torch.sigmoid(scalars["skip"]) * 2 * sigmoid_gate(x0, p["skip_gate"])
                x = x + gate * kept[layer.add_saved]
                seen.update(skip_gate_out=gate, after_skip=x)
            x = scalars["residual"][depth] * x + p["x0_lambdas"][depth] * x0
            x = x + sum(share[depth] * rows for share, rows in streams)
            seen[f"mix{depth}"] = x
            if layer.attention != "none":
                scales = scalars["attention"][2 * depth:2 * depth + 2]
                rows = values_of.get(depth, ())
                added = self.attend(p, depth, norm(x), scales, rows, batch.cu_seqlens[slot], values, seen)
                seen[f"attn{depth}"] = added
                x = x + added
            up, down = p["mlp"][depth]
            seen[f"mlp{depth}"] = torch.relu(norm(x) @ up.t()).square() @ down
            x = x + seen[f"mlp{depth}"]
            kept[layer.save_as] = x
        seen["after_backout"] = x - scalars["backout"] * kept[tg.BACKOUT]
        seen["final_norm"] = norm(seen["after_backout"])

    def attend(self, p, depth, n, scales, value_rows, borders, values, seen) -> Tensor:
        """What attention adds to the stream. n (T, D) -> (T, D)."""
        layer = tg.LAYERS[depth]
        H = self.cfg.num_heads
        length, width = n.shape
        at = tg.ATTENTION_LAYERS.index(depth)
        *qkv, out = p["attn"][at].split(width)
        q, k, v = (n @ (scales[0] * matrix).t() for matrix in qkv)
        q = norm(q.view(length, H, -1))
        k = norm(k.view(length, H, -1))
        v = v.view(length, H, -1)
        paired = layer.attention == "paired"
        for place, rows in value_rows:
            half = GATE // 2
            features = n if paired else torch.cat((n[:, :half], rows[:, :half]), dim=1)
            gate = 2 * sigmoid_gate(features, p["ve_gate_bank"][place])
            v = v + gate[..., None] * rows.view(v.shape)

        # Heads j and j + H/2 of a paired layer share a sequence of 2T positions; their angles take turns by head.
        positions = torch.arange(length)[:, None].expand(length, H)
        per_token = 1
        if paired:
            per_token = 2
            positions = 2 * positions + torch.arange(H) % 2
        q, k = (rotated(x, positions, values.rotary.frequencies) for x in (q, k))
        if layer.key_offset:
            turning, still = k.chunk(2, dim=-1)
            shifted = torch.cat((still[:1], still[:-1]))
            k = torch.cat((turning, shifted), dim=-1)
        window = values.long_window if layer.window == "long" else values.short_window
        lanes = H // per_token

        def in_sequence(x: Tensor) -> Tensor:
            """(T, H, E) -> (per_token T, lanes, E)."""
            return torch.stack([x[:, lane::lanes].flatten(0, 1) for lane in range(lanes)], dim=1)

        q, k, v = map(in_sequence, (q, k, v))
        y = attention(q, k, v, per_token * borders, window, values.rotary.attn_scale)
        y = y.reshape(length, H, -1)
        gated = y * sigmoid_gate(n, p["attn_gate_bank"][at])[..., None]
        seen.update({f"q{depth}": q, f"k{depth}": k, f"v{depth}": v, f"y{depth}": y, f"yg{depth}": gated})
        return gated.flatten(1) @ (scales[1] * out).t()

    def ngram_rows_of(self, line: tg.NgramTable, table: Tensor, tokens: np.ndarray) -> Tensor:
        factors, sign_factors = tg.NGRAM_FACTORS[line.order]
        rows = ngram_rows(tokens, factors, line.rows)
        self.asked[line.label][rows] = True
        found = table[rows]
        if line.signs:
            found = found * tg.sign_vectors(found.shape[1])[ngram_rows(tokens, sign_factors, NUM_SIGN_VECTORS + 1)]
        return found

    def forward_backward(self, batch: tg.Batch, values: tg.StepConfig) -> tg.StepLoss:
        """Add the gradient of the sum of the slots' losses; `batch` is of one rank, with rows of whole tables."""
        leaves = self.leaves()
        sums = []
        for slot in range(len(batch.tokens)):
            loss = self.losses(leaves, batch, slot, values, values.mtp_weights).sum()
            loss.backward()
            sums.append(loss.detach())
        for label, leaf in leaves.items():
            if label in self.grads:
                self.grads[label] += leaf.grad
            else:
                self.ngram_grads[label] += leaf.grad.numpy()
        return tg.StepLoss(torch.stack(sums), batch.tokens.numel())

    def optim_step(self, values: tg.StepConfig) -> None:
        """Banks at every step, a table of n-grams at its cadence, all else at the end of an Adam cycle."""
        cfg = self.cfg
        for label in self.p:
            row = self.rows[label]
            if row.optimizer == "normuon":
                self.p[label] = self.moved_bank(label, values)
                self.grads[label].zero_()
            elif values.update_adam and not (label == "embed" and values.tied):
                g = self.grads[label]
                if label == "lm_head" and values.tied:
                    g = g + self.grads["embed"].t()
                self.updates[label] += 1
                lr = values.adam_lr * row.lr_mul
                decay = cfg.adam_weight_decay * row.wd_mul
                self.p[label] = adam(self.p[label], g / cfg.seqs_per_step, self.state[label], self.updates[label],
                                     row.betas, cfg.adam_eps, lr, decay)
        for line in cfg.tables:
            if (values.step + 1) % line.update_every == 0:
                asked = self.asked[line.label]
                grad = self.ngram_grads[line.label]
                lr = values.adam_lr * line.lr_mul
                decay = cfg.adam_weight_decay * line.wd_mul
                self.ngrams[line.label].update(asked, [grad], cfg.seqs_per_step, lr, decay)
                asked[:] = False
                grad[:] = 0
        if values.update_adam:
            for label, grad in self.grads.items():
                if self.rows[label].optimizer == "adam":
                    grad.zero_()
            if values.tied:
                self.p["embed"] = self.p["lm_head"].t().clone()
        if values.untie_after:
            self.state["embed"] = {name: x.t().clone() for name, x in self.state["lm_head"].items()}
            self.updates["embed"] = self.updates["lm_head"]

    def moved_bank(self, label: str, values: tg.StepConfig) -> Tensor:
        p = self.matrices(label, self.p[label])
        g = self.matrices(label, self.grads[label]) / self.cfg.seqs_per_step
        aspect = max(1.0, p.shape[1] / p.shape[2])
        muls = torch.full((len(p), 1, 1), math.sqrt(aspect), dtype=F64)
        if label == "mlp":
            muls[1::2] *= DOWN_RATE                                           # up, down, up, down, ...
        moved = normuon(p, g, self.state[label], values.momentum, self.cfg.normuon_beta2, values.normuon_lr, muls,
                        self.cfg.normuon_weight_decay)
        return moved.view_as(self.p[label])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tg.Batch], values: tg.StepConfig) -> float:
        """Mean loss per token of the next token."""
        leaves = self.leaves()
        found = []
        for batch in batches:
            found += [self.losses(leaves, batch, slot, values, (1.0,)) for slot in range(len(batch.tokens))]
        return float(torch.cat(found).mean())

    def full_state(self, values: tg.StepConfig, with_moments: bool) -> dict[str, Tensor]:
        """Return weights and moments by name, as `tg.Engine.whole_state` does."""
        moments = {f"{label}.{name}": x for label, state in self.state.items() for name, x in state.items()}
        return self.p | moments if with_moments else self.p


# ---- Rows and tables
def cut(table: np.ndarray, world: int) -> list[np.ndarray]:
    """A table in logical order -> the shard of each owner; zeros where there is no row."""
    size = -(-len(table) // world)
    padded = np.zeros((size * world, *table.shape[1:]), table.dtype)
    padded[:len(table)] = table
    return [padded[rank::world] for rank in range(world)]

def put_together(shards: list[np.ndarray], rows: int) -> np.ndarray:
    world = len(shards)
    return np.stack([shards[row % world][row // world] for row in range(rows)])

def bigram_rows(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Rows of (token before, token) in one slot, (T,); position 1 takes the last row's number for the first token."""
    return ngram_rows(np.concatenate([[rows - 1], tokens[1:]]), HASH, rows)

def ngram_rows(tokens: np.ndarray, constants: Sequence[int], rows: int) -> np.ndarray:
    """Row of the n-gram that ends at each position of one slot, (T,); constants belong to the newest token first."""
    found = []
    for at in range(len(tokens)):
        if at < len(constants) - 1:
            found.append(rows - 1)                                            # no such n-gram
            continue
        mixed = 0
        for back, constant in enumerate(constants):
            mixed ^= int(tokens[at - back]) * constant % 2**32
        signed = mixed - 2**32 * (mixed >= 2**31)
        found.append(signed % (rows - 1))                                     # Python's: never negative
    return np.array(found)

def to_bf16(p: np.ndarray) -> np.ndarray:
    """Round f32 numbers to the nearest bf16 number, ties to even; the result is f32."""
    bits = p.astype(np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)

@dataclass
class NaiveTable:
    """A table of n-grams under the row-wise rule: rows x width weights, from zero. Every update decays v of ALL rows
    and moves the weights of the rows that were asked for. The trainer touches these rows only, and catches up on what
    their v has missed: the same numbers, for v * beta2 * ... * beta2 is v * beta2^(e - last)."""
    label: str
    rows: int
    width: int
    beta2: float
    eps: float
    dtype: type = np.float64
    bf16: bool = False                   # weights and exchanged gradients are bf16

    def __post_init__(self) -> None:
        self.p = np.zeros((self.rows, self.width), self.dtype)
        self.v = np.zeros(self.rows, self.dtype)
        self.last = np.zeros(self.rows, int)
        self.updates = 0

    def update(self, asked: np.ndarray, sums: Sequence[np.ndarray], seqs_per_step: int, lr: float,
               decay: float) -> None:
        """asked (rows,) bool: by any rank in this cycle. sums: of each rank, in rank order, (rows, width)."""
        self.updates += 1
        g = np.zeros_like(self.p)
        for of_rank in sums:
            g += to_bf16(of_rank) if self.bf16 else of_rank
        g *= self.dtype(1 / seqs_per_step)

        self.v *= self.dtype(self.beta2)
        self.v[asked] += self.dtype(1 - self.beta2) * np.square(g[asked]).mean(axis=1)
        rate = self.dtype(lr * np.sqrt(1 - self.beta2**self.updates))
        u = rate * g / (np.sqrt(self.v)[:, None] + self.dtype(self.eps))
        agrees = u * self.p > 0
        moved = self.p - (u + self.p * agrees * self.dtype(lr * lr * decay))
        if self.bf16:
            moved = to_bf16(moved)
        self.p[asked] = moved[asked]
        self.last[asked] = self.updates
