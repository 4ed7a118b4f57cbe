"""The Gram matrix of a kernel between two data sets: lazy, exact or from random projections.

matrix      GramMatrix: rows, columns, kernel, plain or centered; what every statistic works on
products    G @ w in two passes over the data, linear in N
tiles       all pairs, one strip of whole rows in memory at a time
strips      a strip as reducers see it, plain and centered; many reducers in one visit
centering   double centering of a kernel, then normalization
projection  random projections of gradients that keep inner products
sketches    the same strips from projected gradients
cost        what a statistic will take, from a dry run
"""

from likewise.gram.cost import Plan
from likewise.gram.matrix import GramMatrix
from likewise.gram.similarity import similarity
from likewise.gram.strips import PairSource, Reducer, Strip

__all__ = ["GramMatrix", "PairSource", "Plan", "Reducer", "Strip", "similarity"]
