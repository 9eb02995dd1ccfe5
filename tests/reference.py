"""A slow and simple version of the whole trainer, as RECIPE describes it: one rank, float64, one sequence at a time.

`Reference` is used like tg.Engine, with the batches of one rank. It has no row plans, caches, shards, fused matmuls or
main_grad; gradients are computed by autograd. It reads layers, learning rates and schedule from the trainer, but
repeats the constants of the recipe here. The last section has tables at W ranks: rank r % W owns row r, at index r // W
of its shard.
"""
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import train_gpt as tg

F64 = torch.float64
GATE_INPUTS = 12                         # features a gate reads
BIGRAM_FACTORS = (36313, 27191)          # multipliers of the newer and the older token
NORM_EPS = 2.0**-23
SOFTCAP, SOFTCAP_SHIFT, SOFTCAP_WIDTH = 23.0, 5.0, 7.5
POLAR_COEFS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),          # RECIPE
               (4.042929935166739, -2.808917465908714, 0.5000178451051316),
               (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
               (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
               (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
DOWN_LR_MUL = 2.0                        # learning rate of MLP down matrices, relative to up matrices
# Scales of the fp8 head, each rounded to f32 as the matmuls take it.
Y_SCALE, W_SCALE, GRAD_SCALE = (float(np.float32(largest / 448)) for largest in (100, 1.6, 0.75))


# ---- Model
def rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + NORM_EPS).sqrt()

def apply_rotary(x: Tensor, positions: Tensor, frequencies: Sequence[float]) -> Tensor:
    """Rotate pairs of adjacent channels: x (T, H, E) at positions (T, H) -> (T, H, E).

    The pairs of the first half of the channels are multiplied by exp(-i * position * frequency).
    """
    angles = positions[..., None] * torch.tensor(frequencies, dtype=F64)
    rotated, unrotated = x.chunk(2, dim=-1)
    pairs = torch.complex(rotated[..., 0::2], rotated[..., 1::2])
    result = torch.view_as_real(pairs * torch.exp(-1j * angles)).flatten(-2)
    return torch.cat((result, unrotated), dim=-1)

def sigmoid_gate(features: Tensor, weight: Tensor) -> Tensor:
    """Compute gates between 0 and 1: features (T, ...), weight (heads, GATE_INPUTS) -> (T, heads)."""
    return torch.sigmoid(features[:, :GATE_INPUTS] @ weight.t())

def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float) -> Tensor:
    """Compute softmax attention: q, k, v (N, H, E) -> (N, H, E).

    A query sees its own key and `window` keys before it, within its document. cu_seqlens (C,): ascending document
    bounds, from 0.
    """
    positions = torch.arange(len(q))
    doc_ids = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance <= window) & (doc_ids[:, None] == doc_ids)
    scores = scale * torch.einsum("qhe,khe->hqk", q, k)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khe->qhe", weights, v)

def next_token_losses(logits: Tensor, targets: Tensor, mtp_weights: Sequence[float]) -> Tensor:
    """Compute the loss of every position: logits (T, V), targets (T,) -> losses (T,).

    mtp_weights: weights of the 1st, 2nd, ... next token. Tokens beyond the end of the sequence do not count.
    """
    log_p = softcap(logits).log_softmax(dim=-1)
    losses = logits.new_zeros(len(targets))
    for ahead, weight in enumerate(mtp_weights[:len(targets)]):
        num_targets = len(targets) - ahead
        target_log_p = log_p[torch.arange(num_targets), targets[ahead:]]
        losses = losses - weight * torch.nn.functional.pad(target_log_p, (0, ahead))
    return losses

def softcap(logits: Tensor) -> Tensor:
    return SOFTCAP * torch.sigmoid((logits + SOFTCAP_SHIFT) / SOFTCAP_WIDTH)

def nearest_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest finite value of an fp8 dtype, ties to even, by comparing with all of them."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(dtype).double()
    codes = codes[values.isfinite()]
    values = values[values.isfinite()]
    distance = (x.double()[..., None] - values).abs()
    nearest = distance.amin(dim=-1, keepdim=True)
    preference = (distance == nearest) * (2 - (codes & 1).double())
    return values[preference.argmax(dim=-1)].copysign(x)

def fp8_head(y: Tensor, w: Tensor, targets: Tensor, mtp_weights: Sequence[float], grad_losses: Tensor,
             logits_dtype: torch.dtype | None = F64) -> dict[str, Tensor]:
    """Compute the fp8 head with explicit roundings: losses, gradients of y and w, and the rounded values.

    y (N, D), w (D, V), targets (B, T). grad_losses (N,): upstream gradient of each position's loss; only its ratio to
    the largest one is rounded with the payload. logits_dtype: rounds the logits; None disables every rounding.
    """
    def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
        if logits_dtype is None:
            return x
        if dtype == torch.float8_e4m3fn:
            x = x.float()                                             # quotients of y and w are f32
        return nearest_fp8(x, dtype)

    y8 = rounded(y.detach() / Y_SCALE, torch.float8_e4m3fn)
    w8 = rounded(w.detach() / W_SCALE, torch.float8_e4m3fn)
    unscaled = Y_SCALE * W_SCALE * (y8 @ w8)
    logits = unscaled.to(logits_dtype or F64).double().requires_grad_()
    seq_logits = logits.view(*targets.shape, -1)
    losses = torch.cat([next_token_losses(*seq, mtp_weights) for seq in zip(seq_logits, targets)])
    grad, = torch.autograd.grad(losses.sum(), logits)
    payload = rounded(grad / GRAD_SCALE, torch.float8_e5m2)
    largest = grad_losses.abs().max()
    ratios = (grad_losses / largest)[:, None]
    scaled_payload = rounded(ratios * payload, torch.float8_e5m2)
    scale = largest * GRAD_SCALE
    grad_y = scale * W_SCALE * ratios * (payload @ w8.t())
    grad_w = scale * Y_SCALE * (y8.t() @ scaled_payload)
    results = dict(y8=y8, w8=w8, logits=logits, losses=losses, payload=payload, grad_y=grad_y, grad_w=grad_w,
                   grad_logits=grad)
    return {name: x.detach() for name, x in results.items()}


# ---- Updates
def polar_express(x: Tensor) -> Tensor:
    """Apply the Polar Express polynomials to the singular values of x.

    X -> a X + (b A + c A A) X with A = X X^T maps a singular value s to a s + b s^3 + c s^5.
    """
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    norms = s.norm(dim=-1, keepdim=True)
    s = s / (1.02 * norms + 1e-6)
    for a, b, c in POLAR_COEFS:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v

def normuon(p: Tensor, g: Tensor, state: dict[str, Tensor], mu: float, beta2: float, lr: float, lr_muls: Tensor,
            weight_decay: float) -> Tensor:
    """Update matrices p (M, r, c) and their state by one NorMuon step; lr_muls (M, 1, 1). Returns the new p."""
    axis = -1 if p.shape[-2] >= p.shape[-1] else -2
    state["momentum"] = mu * state["momentum"] + (1 - mu) * g
    direction = polar_express((1 - mu) * g + mu * state["momentum"])
    mean_square = direction.square().mean(dim=axis, keepdim=True)
    state["second"] = beta2 * state["second"] + (1 - beta2) * mean_square
    scaled = direction / state["second"].clamp(min=1e-10).sqrt()
    norm = torch.linalg.matrix_norm(scaled, keepdim=True).clamp(min=1e-10)
    update = scaled * torch.linalg.matrix_norm(direction, keepdim=True) / norm
    rate = lr * lr_muls
    return p - (update * p >= 0) * p * weight_decay * lr * rate - update * rate

def adam(p: Tensor, g: Tensor, state: dict[str, Tensor], update_num: int, betas: tuple[float, float], eps: float,
         lr: float, weight_decay: float) -> Tensor:
    """Update a parameter and its state by Adam; update_num counts its updates from 1. Returns the new p."""
    beta1, beta2 = betas
    state["m"] = beta1 * state["m"] + (1 - beta1) * g
    state["v"] = beta2 * state["v"] + (1 - beta2) * g.square()
    step_size = lr * math.sqrt(1 - beta2**update_num) / (1 - beta1**update_num)
    update = step_size * state["m"] / (state["v"].sqrt() + eps)
    return p - update - (update * p > 0) * p * lr * lr * weight_decay

class Reference:
    """Weights, gradients and optimizer state of a run, unsharded, by label."""
    def __init__(self, cfg: tg.Config, weights: dict[str, Tensor]) -> None:
        """weights: of all parameters, or only of some if nothing but `optim_step` is called."""
        self.cfg = cfg
        self.specs = {spec.label: spec for spec in tg.parameter_specs(cfg)}
        self.p = {label: x.detach().double().clone() for label, x in weights.items()}
        self.ngrams = {}
        for table in cfg.tables:
            self.ngrams[table.label] = NaiveTable(table.label, table.rows, cfg.model_dim, table.beta2, cfg.adam_eps)
        self.state = {label: self.init_state(label, p) for label, p in self.p.items()}
        self.updates = dict.fromkeys(self.p, 0)                               # number of Adam updates
        self.discard_grads()

    def init_state(self, label: str, p: Tensor) -> dict[str, Tensor]:
        if self.specs[label].optimizer == "adam":
            return dict(m=torch.zeros_like(p), v=torch.zeros_like(p))
        matrices = self.matrices(label, p)
        axis = -1 if matrices.shape[-2] >= matrices.shape[-1] else -2
        return dict(momentum=torch.zeros_like(matrices), second=torch.zeros_like(matrices.narrow(axis, 0, 1)))

    def matrices(self, label: str, x: Tensor) -> Tensor:
        """View a bank as its matrices: attention matrices are square, MLP matrices have the height of the bank."""
        width = x.shape[-1]
        return x.reshape(-1, width if label == "attn" else x.shape[-2], width)

    def discard_grads(self) -> None:
        self.grads = {label: torch.zeros_like(p) for label, p in self.p.items()}
        self.ngram_grads = {label: np.zeros_like(table.p) for label, table in self.ngrams.items()}
        self.requested = {label: np.zeros(table.num_rows, bool) for label, table in self.ngrams.items()}

    def leaves(self) -> dict[str, Tensor]:
        """Copy everything the losses depend on into leaves for autograd, by label."""
        full = self.p | {label: torch.from_numpy(table.p) for label, table in self.ngrams.items()}
        return {label: p.clone().requires_grad_() for label, p in full.items()}

    def losses(self, leaves: dict[str, Tensor], batch: tg.Batch, seq: int, step_cfg: tg.StepConfig,
               mtp_weights: Sequence[float], activations: dict[str, Tensor] | None = None) -> Tensor:
        """Compute the loss of every position of one sequence, (T,). activations: receives intermediate results by name.
        """
        activations = {} if activations is None else activations
        banks = {label: leaves[label].unbind() for label in ("attn", "mlp")}
        self.hidden_states(leaves | banks, batch, seq, step_cfg, activations)
        logits = activations["final_norm"] @ leaves["lm_head"]
        activations.update(raw_logits=logits, logits=softcap(logits), lse=softcap(logits).logsumexp(dim=-1))
        return next_token_losses(logits, batch.targets[seq], mtp_weights)

    def hidden_states(self, p: dict[str, Any], batch: tg.Batch, seq: int, step_cfg: tg.StepConfig,
                      activations: dict[str, Tensor]) -> None:
        """Store the input of the head and everything before it in `activations`."""
        cfg = self.cfg
        tokens = batch.tokens[seq].long()
        sizes = {name: len(values) for name, values in tg.initial_scalars(cfg).items()}
        scalars = dict(zip(sizes, p["scalars"].split([*sizes.values()])))
        e = p["embed"][tokens]
        gate = scalars["smear"] * sigmoid_gate(e[1:], p["smear_gate"])
        u = torch.cat((e[:1], e[1:] + gate * e[:-1]))
        x = x0 = rms_norm(u)
        rows = batch.lookup_rows["bigram_embed"][seq].long()
        if batch.plans:                      # then they are indices in the plan of the bigram table
            rows = torch.from_numpy(bigram_rows(batch.tokens[seq].numpy(), cfg.bigram_rows)).long()
        bigrams = p["bigram_embed"][rows]
        activations.update(embed=e, smear=u, x0=x0, x0_bigram=bigrams)
        residual_inputs = [(scalars["bigram_embed"], bigrams)]
        for table in cfg.tables:
            rows = self.lookup_ngrams(table, p[table.label], batch.tokens[seq].numpy())
            residual_inputs.append((scalars[table.label], rows))

        saved = {}
        for i, layer in enumerate(tg.LAYERS):
            if layer.add_saved:
                gate = torch.sigmoid(scalars["skip"]) * 2 * sigmoid_gate(x0, p["skip_gate"])
                x = x + gate * saved[layer.add_saved]
                activations.update(skip_gate_out=gate, after_skip=x)
            x = scalars["residual"][i] * x + p["x0_lambdas"][i] * x0
            x = x + sum(coefs[i] * rows for coefs, rows in residual_inputs)
            activations[f"mix{i}"] = x
            if layer.attention != "none":
                scales = scalars["attention"][2 * i:2 * i + 2]
                value_rows = None
                if layer.value_embed is not None:
                    value_rows = p["value_embed"][layer.value_embed * cfg.padded_vocab + tokens]
                added = self.attend(p, i, rms_norm(x), scales, value_rows, batch.cu_seqlens[seq], step_cfg,
                                    activations)
                activations[f"attn{i}"] = added
                x = x + added
            up, down = p["mlp"][i]
            activations[f"mlp{i}"] = torch.relu(rms_norm(x) @ up.t()).square() @ down
            x = x + activations[f"mlp{i}"]
            saved[layer.save_as] = x
        activations["after_backout"] = x - scalars["backout"] * saved[tg.BACKOUT] if tg.BACKOUT in saved else x
        activations["final_norm"] = rms_norm(activations["after_backout"])

    def attend(self, p: dict[str, Any], i: int, x: Tensor, scales: Tensor, value_rows: Tensor | None,
               cu_seqlens: Tensor, step_cfg: tg.StepConfig, activations: dict[str, Tensor]) -> Tensor:
        """Compute what attention adds to the residual stream: x (T, D) -> (T, D)."""
        layer = tg.LAYERS[i]
        H = self.cfg.num_heads
        T, D = x.shape
        attn_idx = tg.ATTENTION_LAYERS.index(i)
        *qkv, out = p["attn"][attn_idx].split(D)
        q, k, v = (x @ (scales[0] * matrix).t() for matrix in qkv)
        q = rms_norm(q.view(T, H, -1))
        k = rms_norm(k.view(T, H, -1))
        v = v.view(T, H, -1)
        paired = layer.attention == "paired"
        if value_rows is not None:
            half = GATE_INPUTS // 2
            features = x if paired else torch.cat((x[:, :half], value_rows[:, :half]), dim=1)
            gate = 2 * sigmoid_gate(features, p["ve_gate_bank"][layer.value_embed])
            v = v + gate[..., None] * value_rows.view(v.shape)

        # Heads j and j + H/2 of a paired layer share a sequence of 2T positions. Even heads have the even positions.
        positions = torch.arange(T)[:, None].expand(T, H)
        positions_per_token = 1
        if paired:
            positions_per_token = 2
            positions = 2 * positions + torch.arange(H) % 2
        q, k = (apply_rotary(z, positions, step_cfg.rotary.frequencies) for z in (q, k))
        if layer.key_offset:
            rotated, unrotated = k.chunk(2, dim=-1)
            shifted = torch.cat((unrotated[:1], unrotated[:-1]))
            k = torch.cat((rotated, shifted), dim=-1)
        window = step_cfg.long_window if layer.window == "long" else step_cfg.short_window
        num_seqs = H // positions_per_token

        def in_sequence(x: Tensor) -> Tensor:
            """(T, H, E) -> (positions_per_token T, num_seqs, E)."""
            return torch.stack([x[:, seq::num_seqs].flatten(0, 1) for seq in range(num_seqs)], dim=1)

        q, k, v = map(in_sequence, (q, k, v))
        y = attention(q, k, v, positions_per_token * cu_seqlens, window, step_cfg.rotary.attn_scale)
        y = y.reshape(T, H, -1)
        gated = y * sigmoid_gate(x, p["attn_gate_bank"][attn_idx])[..., None]
        activations.update({f"q{i}": q, f"k{i}": k, f"v{i}": v, f"y{i}": y, f"yg{i}": gated})
        return gated.flatten(1) @ (scales[1] * out).t()

    def lookup_ngrams(self, table: tg.NgramTable, weights: Tensor, tokens: np.ndarray) -> Tensor:
        rows = ngram_rows(tokens, tg.NGRAM_FACTORS[table.order], table.rows)
        self.requested[table.label][rows] = True
        return weights[rows]

    def forward_backward(self, batch: tg.Batch, step_cfg: tg.StepConfig) -> tg.StepLoss:
        """Add the gradient of the summed losses of all sequences. `batch` is of one rank and indexes full tables."""
        leaves = self.leaves()
        seq_sums = []
        next_sum = torch.zeros(())
        for seq in range(len(batch.tokens)):
            with torch.no_grad():
                next_sum = next_sum + self.losses(leaves, batch, seq, step_cfg, (1.0,)).sum()
            loss = self.losses(leaves, batch, seq, step_cfg, step_cfg.mtp_weights).sum()
            loss.backward()
            seq_sums.append(loss.detach())
        for label, leaf in leaves.items():
            if label in self.grads:
                self.grads[label] += leaf.grad
            else:
                self.ngram_grads[label] += leaf.grad.numpy()
        return tg.StepLoss(torch.stack(seq_sums), next_sum)

    def optim_step(self, step_cfg: tg.StepConfig) -> None:
        """Update the parameters that are due.

        Banks are due on every step, n-gram tables every `update_every` steps, the rest at the end of an Adam interval.
        """
        cfg = self.cfg
        updates_adam = (step_cfg.step + 1) % cfg.adam_every == 0
        for label in self.p:
            spec = self.specs[label]
            if spec.optimizer == "normuon":
                self.p[label] = self.updated_bank(label, step_cfg)
                self.grads[label].zero_()
            elif updates_adam and not (label == "embed" and step_cfg.tied):
                g = self.grads[label]
                if label == "lm_head" and step_cfg.tied:
                    g = g + self.grads["embed"].t()
                self.updates[label] += 1
                lr = step_cfg.adam_lr * spec.lr_mul
                weight_decay = cfg.adam_weight_decay * spec.wd_mul
                self.p[label] = adam(self.p[label], g / cfg.seqs_per_step, self.state[label], self.updates[label],
                                     spec.betas, cfg.adam_eps, lr, weight_decay)
        for table in cfg.tables:
            if (step_cfg.step + 1) % table.update_every == 0:
                requested = self.requested[table.label]
                grad = self.ngram_grads[table.label]
                lr = step_cfg.adam_lr * table.lr_mul
                weight_decay = cfg.adam_weight_decay * table.wd_mul
                self.ngrams[table.label].update(requested, [grad], cfg.seqs_per_step, lr, weight_decay)
                requested[:] = False
                grad[:] = 0
        if updates_adam:
            for label, grad in self.grads.items():
                if self.specs[label].optimizer == "adam":
                    grad.zero_()
            if step_cfg.tied:
                self.p["embed"] = self.p["lm_head"].t().clone()
        if step_cfg.untie_after:
            self.state["embed"] = {name: x.t().clone() for name, x in self.state["lm_head"].items()}
            self.updates["embed"] = self.updates["lm_head"]

    def updated_bank(self, label: str, step_cfg: tg.StepConfig) -> Tensor:
        p = self.matrices(label, self.p[label])
        g = self.matrices(label, self.grads[label]) / self.cfg.seqs_per_step
        aspect = max(1.0, p.shape[1] / p.shape[2])
        lr_muls = torch.full((len(p), 1, 1), math.sqrt(aspect), dtype=F64)
        if label == "mlp":
            lr_muls[1::2] *= DOWN_LR_MUL                                      # order: up, down, up, down, ...
        updated = normuon(p, g, self.state[label], step_cfg.momentum, self.cfg.normuon_beta2, step_cfg.normuon_lr,
                          lr_muls, self.cfg.normuon_weight_decay)
        return updated.view_as(self.p[label])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tg.Batch], step_cfg: tg.StepConfig) -> float:
        """Return the mean loss per token, of the next token only."""
        leaves = self.leaves()
        losses = []
        for batch in batches:
            losses += [self.losses(leaves, batch, seq, step_cfg, (1.0,)) for seq in range(len(batch.tokens))]
        return float(torch.cat(losses).mean())

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and moments by name, as `tg.Engine.tensors` does."""
        return self.p | {f"{label}.{name}": x for label, state in self.state.items() for name, x in state.items()}


# ---- Rows and tables
def split_by_owner(table: np.ndarray, world_size: int) -> list[np.ndarray]:
    """Split a table in the order of global rows into the shards of its owners, padded with zeros."""
    shard_rows = -(-len(table) // world_size)
    padded = np.zeros((shard_rows * world_size, *table.shape[1:]), table.dtype)
    padded[:len(table)] = table
    return [padded[rank::world_size] for rank in range(world_size)]

def merge_shards(shards: list[np.ndarray], num_rows: int) -> np.ndarray:
    world_size = len(shards)
    return np.stack([shards[row % world_size][row // world_size] for row in range(num_rows)])

def bigram_rows(tokens: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the bigram row of each position of a sequence, (T,).

    The hash at position 1 uses the index of the last row as the previous token, in place of the first token.
    """
    return ngram_rows(np.concatenate([[num_rows - 1], tokens[1:]]), BIGRAM_FACTORS, num_rows)

def ngram_rows(tokens: np.ndarray, factors: Sequence[int], num_rows: int) -> np.ndarray:
    """Return the row of the n-gram that ends at each position of a sequence, (T,). factors: the newest token's first.
    """
    result = []
    for i in range(len(tokens)):
        if i < len(factors) - 1:
            result.append(num_rows - 1)                                       # no n-gram ends here
            continue
        hashed = 0
        for offset, factor in enumerate(factors):
            hashed ^= int(tokens[i - offset]) * factor % 2**32
        signed = hashed - 2**32 * (hashed >= 2**31)
        result.append(signed % (num_rows - 1))                                # Python's %: never negative
    return np.array(result)

def to_bf16(p: np.ndarray) -> np.ndarray:
    """Round f32 values to the nearest bf16 values, ties to even; the result is f32."""
    bits = p.astype(np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) & np.uint32(0xFFFF0000)).view(np.float32)

@dataclass
class NaiveTable:
    """An n-gram table under the row-wise rule, with weights (num_rows, width) that start at zero.

    Every update decays v of ALL rows, and changes the weights of the requested rows. The trainer updates only the
    requested rows, and catches up on the decays that their v has missed. The results are equal, because v * beta2 * ...
    * beta2 is v * beta2^(update - last).
    """
    label: str
    num_rows: int
    width: int
    beta2: float
    eps: float
    dtype: type = np.float64
    bf16: bool = False                   # weights and exchanged gradients are bf16

    def __post_init__(self) -> None:
        self.p = np.zeros((self.num_rows, self.width), self.dtype)
        self.v = np.zeros(self.num_rows, self.dtype)
        self.last_update = np.zeros(self.num_rows, int)
        self.updates = 0

    def update(self, requested: np.ndarray, grads_by_rank: Sequence[np.ndarray], seqs_per_step: int, lr: float,
               weight_decay: float) -> None:
        """Update the table. requested (num_rows,) bool: rows that any rank looked up in this interval.

        grads_by_rank: summed gradients (num_rows, width) of each rank, in rank order.
        """
        self.updates += 1
        g = np.zeros_like(self.p)
        for grad in grads_by_rank:
            g += to_bf16(grad) if self.bf16 else grad
        g *= self.dtype(1 / seqs_per_step)

        self.v *= self.dtype(self.beta2)
        self.v[requested] += self.dtype(1 - self.beta2) * np.square(g[requested]).mean(axis=1)
        rate = self.dtype(lr * np.sqrt(1 - self.beta2**self.updates))
        update = rate * g / (np.sqrt(self.v)[:, None] + self.dtype(self.eps))
        agrees = update * self.p > 0
        updated = self.p - (update + self.p * agrees * self.dtype(lr * lr * weight_decay))
        if self.bf16:
            updated = to_bf16(updated)
        self.p[requested] = updated[requested]
        self.last_update[requested] = self.updates
