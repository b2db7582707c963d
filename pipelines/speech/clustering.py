"""Groups vectors of speech by speaker: agglomerative clustering in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
_APART = 0.2
_MAX_NODES = 1_000  # vectors that are compared with each other; with more, the most similar ones are merged first


def cluster(vectors: Array, weights: Array, windows: Array, similarity: float, limits: tuple[int, int], least: float) -> Array:
    """Return the mean vectors of clusters, of length 1: float32 `[clusters, dim]`.

    The two clusters that are most similar are merged until no two are as similar as `similarity`. Their similarity is the
    cosine of their mean vectors, less `_APART` times the share of the smaller one that is heard beside the other in the same
    windows, because the vectors of a window are those of different speakers. A cluster with less than `least` of the weight is
    noise: it is left out, unless there would be too few.

    Args:
        vectors: float32 `[n, dim]`, of length 1. n is at least 1.
        weights: float32 `[n]`, seconds of speech.
        windows: int64 `[n]`, the window of each vector, ascending.
        limits: fewest and most clusters; the fewest are at most n.
        least: share of the weight of all vectors.
    """
    clusters = _Clusters(vectors[:_MAX_NODES], weights[:_MAX_NODES], windows[:_MAX_NODES])
    for first in range(_MAX_NODES, len(vectors), _MAX_NODES // 2):
        clusters.merge(-np.inf, _MAX_NODES // 2)
        part = slice(first, first + _MAX_NODES // 2)
        clusters.append(vectors[part], weights[part], windows[part])
    fewest, most = limits
    smallest = least * float(weights.sum())
    clusters.merge(similarity, fewest, smallest, most)
    order = np.argsort(-clusters.sizes, kind="stable")
    large = max(min(fewest, len(order)), int((clusters.sizes >= smallest).sum()))
    return _unit(clusters.sums[np.sort(order[: min(large, most)])])


class _Clusters:
    """Clusters of vectors.

    Attributes:
        sums: float32 `[clusters, dim]`, of the vectors by their weights. sizes: `[clusters]`, the weights.
        beside: `[clusters, clusters]`, the weight that two clusters have in the same windows.
    """

    def __init__(self, vectors: Array, weights: Array, windows: Array) -> None:
        self.sums, self.sizes = vectors * weights[:, None], weights.copy()
        self.beside = _beside(weights, windows)

    def append(self, vectors: Array, weights: Array, windows: Array) -> None:
        """Add clusters of one vector each, from later windows."""
        count, more = len(self.sizes), len(weights)
        self.sums = np.concatenate([self.sums, vectors * weights[:, None]])
        self.sizes = np.concatenate([self.sizes, weights])
        beside = np.zeros((count + more, count + more), np.float32)
        beside[:count, :count], beside[count:, count:] = self.beside, _beside(weights, windows)
        self.beside = beside

    def merge(self, similarity: float, fewest: int, smallest: float = 0.0, most: int | None = None) -> None:
        """Merge clusters while two are as similar as `similarity`, or more than `most` have the weight `smallest`.

        At least `fewest` clusters of this weight are left, if there are so many.
        """
        alive = np.ones(len(self.sizes), dtype=bool)
        unit = _unit(self.sums)
        share = self.beside / np.minimum(self.sizes[:, None], self.sizes)
        table = unit @ unit.T - _APART * np.minimum(share, 1.0)
        np.fill_diagonal(table, -np.inf)
        best = table.max(1)
        num_large = int((self.sizes >= smallest).sum())
        while alive.sum() > 1:
            left = int(best.argmax())
            right = int(table[left].argmax())
            is_excess = most is not None and num_large > most
            if best[left] == -np.inf or (best[left] < similarity and not is_excess):
                break
            large = int(self.sizes[left] >= smallest) + int(self.sizes[right] >= smallest)
            if large == 2 and num_large <= fewest:  # these two stay apart
                if num_large == alive.sum():  # and so do all others
                    break
                table[left, right] = table[right, left] = -np.inf
                best[left], best[right] = table[left].max(), table[right].max()
                continue
            self._join(left, right)
            num_large += int(self.sizes[left] >= smallest) - large
            alive[right] = False
            unit[left] = self.sums[left] / max(float(np.linalg.norm(self.sums[left])), 1e-9)
            was_best = alive & (table[:, [left, right]].max(1) >= best)
            table[right], table[:, right], best[right] = -np.inf, -np.inf, -np.inf
            table[left] = table[:, left] = self._similarities(left, unit, alive)
            changed = alive & (was_best | (table[left] > best))
            changed[left] = True
            best[changed] = table[changed].max(1)
        self.sums, self.sizes, self.beside = self.sums[alive], self.sizes[alive], self.beside[alive][:, alive]

    def _join(self, left: int, right: int) -> None:
        self.sums[left] += self.sums[right]
        self.sizes[left] += self.sizes[right]
        self.beside[left] += self.beside[right]
        self.beside[:, left] += self.beside[:, right]

    def _similarities(self, row: int, unit: Array, alive: np.ndarray) -> Array:
        """Return the similarity of a cluster to each of the others; -inf for itself and for those that are merged."""
        share = self.beside[row] / np.minimum(self.sizes[row], self.sizes)
        similarities: Array = unit @ unit[row] - _APART * np.minimum(share, 1.0)
        similarities[~alive], similarities[row] = -np.inf, -np.inf
        return similarities


def _beside(weights: Array, windows: Array) -> Array:
    """Return the smaller weight of each two vectors of the same window, else 0."""
    beside: Array = np.where(windows[:, None] == windows, np.minimum(weights[:, None], weights), np.float32(0))
    np.fill_diagonal(beside, 0)
    return beside


def assign(similarities: Sequence[Array]) -> list[list[int]]:
    """Return the cluster of each speaker of a window; two speakers of a window have different clusters.

    Args:
        similarities: of each window, float32 `[speakers, clusters]`. A row of NaN has no cluster: -1, as do speakers for
            whom no cluster is left.
    """
    assigned = []
    for table in similarities:
        clusters = [-1] * len(table)
        left = np.where(np.isnan(table), -np.inf, table)
        while left.size and np.isfinite(left.max()):
            speaker, number = np.unravel_index(int(left.argmax()), left.shape)
            clusters[int(speaker)] = int(number)
            left[speaker], left[:, number] = -np.inf, -np.inf
        assigned.append(clusters)
    return assigned


def _unit(vectors: Array) -> Array:
    unit: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return unit
