"""Numbers with their nouns, as messages, reports and verdicts write them."""


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 label", "1,200 labels", "2 boxes".

    Args:
        n: How many.
        noun: Of one of them.
        plural: Of several, where it is not the noun with an s.

    """
    return f"{n:,} {agreeing(n, noun, plural)}"


def agreeing(n: int, one: str, several: str | None = None) -> str:
    """Return the word that goes with a number: a noun, or a verb such as is and are."""
    if n == 1:
        return one
    return f"{one}s" if several is None else several
