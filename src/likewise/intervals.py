"""How sure is a share that was counted?"""


def wilson(hits: int, misses: int, z: float = 1.96) -> tuple[float, float, float]:
    """Return the share of hits and its 95 % interval, by Wilson; NaN, 0 and 1 where none was seen."""
    n = hits + misses
    if n == 0:
        return float("nan"), 0.0, 1.0
    share = hits / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
