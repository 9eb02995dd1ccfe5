"""Slow but right: what the trainer does, in numpy, without ranks that work apart, plans, caches or homes.

Rows of a table of R rows at W ranks: row r belongs to rank r mod W, and is its r div W-th. Owner by owner the rows
stand in physical order, every slice R / W rows long, rounded up.
"""
from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def physical(row: int, world: int, rows: int) -> int:
    return row % world * -(-rows // world) + row // world


def cut(table: np.ndarray, world: int) -> list[np.ndarray]:
    """A table in logical order -> the slice of each owner; zeros where there is no row."""
    size = -(-len(table) // world)
    slices = [np.zeros((size, *table.shape[1:]), table.dtype) for _ in range(world)]
    for row, x in enumerate(table):
        slices[row % world][row // world] = x
    return slices


def put_together(slices: list[np.ndarray], rows: int) -> np.ndarray:
    world = len(slices)
    return np.stack([slices[row % world][row // world] for row in range(rows)])


def row_lists(read: list[np.ndarray], rows: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """read: logical rows of each rank in a cycle, with repetitions.

    Returns each rank's list, once each in physical order, and pieces[rank][owner]: the same list as places in the
    owners' slices.
    """
    world = len(read)
    size = -(-rows // world)
    lists = []
    pieces = []
    for mine in read:
        listed = sorted({physical(int(row), world, rows) for row in mine})
        lists.append(listed)
        by_owner = [[] for _ in range(world)]
        for row in listed:
            by_owner[row // size].append(row % size)
        pieces.append(by_owner)
    return lists, pieces


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


def lowbias32(x: np.ndarray) -> np.ndarray:
    """(...) u32 -> u32 that look unrelated to it: the finaliser "lowbias32" (Chris Wellons)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def to_bf16(p: np.ndarray, drawn: np.ndarray | None = None) -> np.ndarray:
    """f32 numbers that bf16 can hold: the nearest, or with drawn (0 to 2^16 - 1) one of both neighbours by chance."""
    bits = p.astype(np.float32).view(np.uint32)
    if drawn is None:
        drawn = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # nearest, ties to even
    return ((bits + drawn) & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass
class NaiveTable:
    """A table of n-grams under the row-wise rule: rows x width weights, from zero.

    Every update decays v of ALL rows and moves the weights of the rows that were asked for. The trainer touches these
    rows only, and catches up on what their v has missed: the same numbers, for v * beta2 * ... * beta2 is
    v * beta2^(e - last).
    """

    label: str
    rows: int
    width: int
    beta2: float
    eps: float
    dtype: type = np.float64
    bf16: str = ""                       # "nearest" or "stochastic": weights and what travels are bf16
    seed: int = 0

    def __post_init__(self) -> None:
        self.p = np.zeros((self.rows, self.width), self.dtype)
        self.v = np.zeros(self.rows, self.dtype)
        self.last = np.zeros(self.rows, int)
        self.updates = 0

    def update(self, asked: np.ndarray, sums: Sequence[np.ndarray], num_slots: int, lr: float, decay: float) -> None:
        """asked (rows,) bool: by any rank in this cycle. sums: of each rank, in rank order, (rows, width)."""
        self.updates += 1
        g = np.zeros_like(self.p)
        for of_rank in sums:
            g += to_bf16(of_rank) if self.bf16 else of_rank
        g *= self.dtype(1 / num_slots)

        self.v *= self.dtype(self.beta2)
        self.v[asked] += self.dtype(1 - self.beta2) * np.square(g[asked]).mean(axis=1)
        rate = self.dtype(lr * np.sqrt(1 - self.beta2**self.updates))
        u = rate * g / (np.sqrt(self.v)[:, None] + self.dtype(self.eps))
        agrees = u * self.p > 0
        moved = self.p - (u + self.p * agrees * self.dtype(lr * lr * decay))
        if self.bf16:
            moved = to_bf16(moved, self.drawn() if self.bf16 == "stochastic" else None)
        self.p[asked] = moved[asked]
        self.last[asked] = self.updates

    def drawn(self) -> np.ndarray:
        """(rows, width) u32 below 2^16, by (seed, label, row, update, column)."""
        start = np.uint32(zlib.crc32(f"{self.seed}/{self.label}".encode()))
        row = np.arange(self.rows, dtype=np.uint32)[:, None]
        column = np.arange(self.width, dtype=np.uint32)
        bits = lowbias32(row ^ start)
        bits = lowbias32(bits ^ np.uint32(self.updates))
        return lowbias32(bits ^ column) & np.uint32(0xFFFF)
