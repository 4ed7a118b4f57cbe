"""The results as tables, and their place on the page of docs."""

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- zoo: written by benchmarks/zoo.py --table -->", "<!-- zoo: end -->"
WRONG = 1e-8  # a float64 error beyond rounding
WRONG_INSIDE = 1e-6  # of a model that casts to float32 in its forward pass, also in float64
SMALL = 1e-5  # a float32 error that needs no explanation
Record = dict[str, Any]


def write_table(page: Path, records: list[Record]) -> None:
    """Write the tables between the page's markers."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{build_tables(records)}\n{END}{after}", encoding="utf-8")


def build_tables(records: list[Record]) -> str:
    """Return a summary by library, the exceptions with their reasons, and all models."""
    records = sorted(records, key=lambda record: record["key"].lower())
    libraries = list(dict.fromkeys(record["key"].split("/")[0] for record in records))
    parts = [
        _rows(
            ["", "models", "full speed", "slow", "refused", "wrong", "not run", "worst float64 error"],
            [_summary(name, [r for r in records if r["key"].startswith(f"{name}/")]) for name in libraries]
            + [_summary("**all**", records)],
        ),
        _float32_sentence(records),
        "### Not at full speed",
        _rows(["model", "", "reason"], [_exception(r) for r in records if status(r) != "full speed"]),
        "### All models",
        _rows(
            ["model", "parameters", "", "float64", "float32", "float32 loop", "CPU s"],
            [_line(r) for r in records],
        ),
    ]
    return "\n\n".join(parts)


def status(record: Record) -> str:
    """Return what a reader wants to know first."""
    if "failed" in record:
        return "not run"
    parts = record["float64"], record["float32"]
    if any(part["engine"] == "refused" for part in parts):
        return "refused"
    if not record["float64"]["error"] <= (WRONG_INSIDE if record["float32_inside"] else WRONG):
        return "wrong"
    return "full speed" if all(part["engine"] == "layers" for part in parts) else "slow"


def _summary(name: str, records: list[Record]) -> list[str]:
    kinds = [status(r) for r in records]
    counts = [str(kinds.count(k)) for k in ("full speed", "slow", "refused", "wrong", "not run")]
    return [name, str(len(records)), *counts, _number(max(_errors(records, "float64"), default=None))]


def _float32_sentence(records: list[Record]) -> str:
    measured = [r for r in records if "error" in r.get("float32", {})]
    large = [r for r in measured if not r["float32"]["error"] <= SMALL]
    beyond = [r for r in large if not r["float32"]["error"] <= 2 * r["loop32"]]
    names = ", ".join(f"{_name(r)} {r['float32']['error']:.0e} against {r['loop32']:.0e}" for r in beyond)
    return (
        f"In float32, {len(measured) - len(large)} of {len(measured)} are within {SMALL:.0e} of the float64 "
        f"loop. Of the other {len(large)}, {len(large) - len(beyond)} are no further from it than twice a "
        "plain float32 loop, where units near zero and cancellation decide what float32 can tell"
        + (f"; {len(beyond)} are further: {names}." if beyond else ".")
    )


def _exception(record: Record) -> list[str]:
    reasons = [record[p].get("reason") for p in ("float64", "float32") if p in record]
    reason = record.get("failed") or next((r for r in reasons if r), "")
    only = [p for p in ("float64", "float32") if p in record and record[p]["engine"] == "layers"]
    note = f" (at full speed in {only[0]})" if len(only) == 1 else ""
    return [_name(record), status(record) + note, _short(reason)]


def _short(reason: str) -> str:
    """Return a reason as one cell: of a warning what its parenthesis says."""
    inside = reason.partition("reference engine (")[2].partition("). Its numbers")[0] or reason
    text = inside.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= 200 else text[:197] + "..."


def _line(record: Record) -> list[str]:
    if "failed" in record:
        return [_name(record), "", "not run", "", "", "", ""]
    count = f"{record['parameters']:,}"
    if record["differentiated"] < record["parameters"]:
        count = f"{record['differentiated']:,} of {count}"
    errors = [_number(record[p].get("error")) for p in ("float64", "float32")]
    seconds = f"{record['seconds']:.1f}"
    return [_name(record), count, status(record), *errors, _number(record["loop32"]), seconds]


def _name(record: Record) -> str:
    library, family, name = record["key"].split("/", 2)
    return f"{library} {family}" if name == family else f"{library} {family}: {name}"


def _errors(records: list[Record], precision: str) -> list[float]:
    return [r[precision]["error"] for r in records if "error" in r.get(precision, {})]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}".replace("e-0", "e-").replace("0e+00", "0")


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
