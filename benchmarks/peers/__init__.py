"""One module per peer of benchmarks/peers.py.

`ready(work)` of each sets up and returns a function of no arguments, the one that is timed: it returns the
matrix. `CannotDo` says that a peer has no way to it.
"""
