"""Read the samples of one data set in one slice, in order, from any position of an epoch on."""

from typing import TypeAlias

import numpy as np

from dali_pipes.order.passes import Span
from dali_pipes.order.randomness import Int64s

Taken: TypeAlias = tuple[Int64s, Int64s]
"""Ordinals, and the occurrence of each in the epoch."""


class Cursor:
    """Reads one lane from a position of the epoch on; skips the windows before it without permuting them."""

    def __init__(self, span: Span, slice_: int, position: int) -> None:
        self._pieces = span.pieces(slice_, start=position)
        self._max_copies = span.passes.part.max_copies
        self._ordinals = self._copies = np.empty(0, np.int64)
        self._next = next(self._pieces, None)
        if self._next is not None:
            self._number, self._repeat = self._next.number - 1, self._next.repeat
        else:
            (last,) = span.pieces(slice_, start=span.length - 1)
            is_whole = last.begin + 1 == last.stop
            self._number, self._repeat = last.number - (not is_whole), last.repeat

    @property
    def finished(self) -> int:
        """Number of windows that were read to their end."""
        return self._number + (len(self._ordinals) == 0)

    @property
    def num_occurrences(self) -> int:
        """A number above all occurrences so far."""
        return (self._repeat + 1) * self._max_copies

    def take(self, num: int) -> Taken:
        ordinals: list[Int64s] = []
        occurrences: list[Int64s] = []
        while num:
            if not len(self._ordinals):
                self._open_next()
                continue
            taken = self._ordinals[:num]
            self._ordinals = self._ordinals[num:]
            ordinals.append(taken)
            occurrence = np.full(len(taken), self._repeat * self._max_copies, np.int64)
            if len(self._copies):
                occurrence += self._copies[:num]
                self._copies = self._copies[num:]
            occurrences.append(occurrence)
            num -= len(taken)
        if len(ordinals) == 1:
            return ordinals[0], occurrences[0]
        empty = [np.empty(0, np.int64)]
        return np.concatenate(ordinals or empty), np.concatenate(occurrences or empty)

    def _open_next(self) -> None:
        piece = self._next
        assert piece is not None, "no step takes more samples than the epoch has"
        ordinals, copies = piece.pass_.samples(piece.shards)
        self._ordinals = ordinals[piece.begin : piece.stop]
        if copies is not None:
            self._copies = copies[piece.begin : piece.stop]
        self._number, self._repeat = piece.number, piece.repeat
        self._next = next(self._pieces, None)
