"""Rows of an embedding table both ways, for all W ranks in one process: the scheme of room 6, without anything clever.

A table has R rows. Row r belongs to rank r mod W, its r div W-th; the owner alone has the current row, its moments and
its update. Owner by owner the rows stand in physical order, every slice C = R / W rows long, rounded up. A cycle:

    plans      every rank lists the rows that it will read, once each, in physical order: so the list falls into W
               pieces, one per owner
    exchange   every rank sends each piece to its owner, who learns which reader asks for which rows
    fetch      owners send the rows of these pieces back, and a rank that puts the pieces in a row has its list again
    (the ranks look rows up, and add a gradient line to a row's sum for each time it was read)
    returned   the sums take the same way home: piece by piece to the owners, who add them up, rank by rank
    (the owners update ALL rows of their slices: a row that no one reads has moments too)

and the next fetch comes after the update. Lists, rows and sums of rank r are at [r]; of tables, numpy arrays.
"""
from __future__ import annotations

import numpy as np


def physical(row: int, world: int, rows: int) -> int:
    return row % world * -(-rows // world) + row // world


def cut(table: np.ndarray, world: int) -> list[np.ndarray]:
    """A table in logical order -> the slice of each owner; zeros where there is no row."""
    slices = [np.zeros((-(-len(table) // world), *table.shape[1:]), table.dtype) for _ in range(world)]
    for row, x in enumerate(table):
        slices[row % world][row // world] = x
    return slices


def whole(slices: list[np.ndarray], rows: int) -> np.ndarray:
    return np.stack([slices[row % len(slices)][row // len(slices)] for row in range(rows)])


def plan(read: list[np.ndarray], rows: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """read: logical rows of each rank in a cycle, with repetitions. Returns each rank's list, and pieces[rank][owner]:
    the same list as places in the owners' slices."""
    world = len(read)
    size = -(-rows // world)
    lists = [sorted({physical(int(row), world, rows) for row in mine}) for mine in read]
    return lists, [[[row % size for row in mine if row // size == owner] for owner in range(world)] for mine in lists]


def exchange(pieces: list[list[list[int]]]) -> list[list[list[int]]]:
    """asked_by_reader[owner][reader]: what each owner has learnt."""
    return [[of_reader[owner] for of_reader in pieces] for owner in range(len(pieces))]


def fetch(slices: list[np.ndarray], asked_by_reader: list[list[list[int]]]) -> list[np.ndarray]:
    """The cache of each reader: the rows of its list, in order."""
    return [np.concatenate([slices[owner][asked_by_reader[owner][reader]] for owner in range(len(slices))])
            for reader in range(len(slices))]


def index(read: np.ndarray, listed: list[int], world: int, rows: int) -> list[int]:
    """Where in a rank's list, cache and sums each of its reads is found."""
    return [listed.index(physical(int(row), world, rows)) for row in read]


def compact(places: list[int], gradients: np.ndarray, listed: list[int]) -> np.ndarray:
    """Sums of a rank's gradient lines, one for each row of its list."""
    sums = np.zeros((len(listed), gradients.shape[1]), gradients.dtype)
    for place, line in zip(places, gradients):
        sums[place] += line
    return sums


def give_back(sums: list[np.ndarray], pieces: list[list[list[int]]], size: int) -> list[np.ndarray]:
    """The gradient of each owner's slice: pieces of the ranks' sums, added in the order of ranks."""
    returned = [np.zeros((size, sums[0].shape[1]), sums[0].dtype) for _ in pieces]
    for of_rank, mine in zip(pieces, sums):
        first = 0
        for owner, places in enumerate(of_rank):
            for place, line in zip(places, mine[first:]):
                returned[owner][place] += line
            first += len(places)
    return returned
