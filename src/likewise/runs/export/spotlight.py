"""Renumics Spotlight: a table with embeddings and pictures, and a list of issues.

from renumics import spotlight
from renumics.spotlight.analysis import DataIssue
issues = [DataIssue(**issue) for issue in json.load(open("spotlight/issues.json"))]
spotlight.show("spotlight/samples.parquet", issues=issues)
"""

import json
from pathlib import Path
from typing import Any, BinaryIO

from likewise import files
from likewise.runs.export.tables import CLASS_COLUMNS, named_table
from likewise.runs.result import Analysis


def write_spotlight(folder: Path, found: Analysis) -> None:
    """Write samples.parquet and issues.json into a folder; classes are categories by name."""
    files.make_folder(folder)
    table = named_table(found)
    for column in CLASS_COLUMNS:
        if f"{column}_name" in table:
            table[column] = table.pop(f"{column}_name").astype("category")
    table["embedding"] = [row.tolist() for row in found.coordinates]
    images = {i: picture.content for i, picture in found.pictures.items() if picture.kind == "image"}
    texts = {i: p.content.decode("utf-8", "replace") for i, p in found.pictures.items() if p.kind == "text"}
    for name, shown in (("image", images), ("text", texts)):
        if shown:
            table[name] = [shown.get(i) for i in range(len(table))]

    def write(file: BinaryIO) -> None:
        table.to_parquet(file)

    files.write_atomically(folder / "samples.parquet", write, int(table.memory_usage(deep=True).sum()))
    files.write_text(folder / "issues.json", json.dumps(_issues(found), indent=1))


def _issues(found: Analysis) -> list[dict[str, Any]]:
    table = found.table
    issues = []
    if "label_issue" in table:
        ranked = table[table["label_issue"]].sort_values("label_suspicion", ascending=False)
        issues.append(
            {
                "title": "Labels that look wrong",
                "rows": ranked.index.tolist(),
                "severity": "high",
                "columns": ["label", "suggested_label", "label_suspicion"],
                "description": "The samples that the network treats alike carry another label.",
            }
        )
    if "status" in table:
        issues.append(
            {
                "title": "Isolated samples",
                "rows": table.index[table["status"] == "isolated"].tolist(),
                "severity": "low",
                "columns": ["local_density"],
                "description": "Too few similar samples to judge by.",
            }
        )
    return [issue for issue in issues if issue["rows"]]
