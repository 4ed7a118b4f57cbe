"""Apply review decisions to the labels of a run: `likewise.apply_decisions`, `likewise apply`."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from likewise.checks import check_choice, check_type
from likewise.report.suggestions import JUDGES, suggestion_judge
from likewise.runs.corrected_data import Corrections
from likewise.runs.export import argilla, label_studio
from likewise.runs.result import Analysis
from likewise.runs.review import Decision, read_json

if TYPE_CHECKING:
    import pandas

WHY = {
    "right": "judged right",
    "unsure": "judged unsure",
    "drop": "dropped by the reviewer",
    "wrong": "judged wrong",
    "relabel": "relabeled by the reviewer",
}
Wrong = Literal["drop", "suggested", "keep"]


def apply_decisions(
    run: Analysis | str | Path,
    decisions: str | Path | Mapping[int, Any] | Sequence[Decision],
    to: str | Path | None = None,
    out: str | Path | None = None,
    *,
    wrong: Wrong = "drop",
    data: Any = None,
    force: bool = False,
) -> Corrections:
    """Apply review decisions to a data set; return the corrections, and write them if `to` is given.

    The original data are never changed.

    Args:
        run: The reviewed run, or its folder.
        decisions: The file downloaded from the report's review, or an export of Label Studio or Argilla; or a dict
            from sample number to verdict ("right", "wrong", "unsure", "drop") or to the right class, by number or, if
            it is not called like a verdict, by name; or `decisions` of the widget that `Analysis.show` returns.
        to: The output format; None writes nothing. "labels.csv" (the remaining samples with label names), "table"
            (the analyzed table, in its own format), "parquet" (that table, or the labels of other data), "folder"
            (copies of the images, one folder per class), "hf-dataset" (a Hugging Face dataset on disk, images or rows
            with a ClassLabel). A path that ends in .csv or .parquet means the first or the third.
        out: The output path; by default a descriptive name in the working directory.
        wrong: What to do with samples whose label was marked wrong without a correct one: "drop" leaves them out;
            "suggested" gives them the label that the run suggests, and leaves out, with a warning, those without
            another suggestion; "keep" keeps them unchanged.
        data: The data set, if it has moved: a path, or a Hugging Face dataset.
        force: Overwrite the output of an earlier call. Data and run are never overwritten.

    Returns:
        The corrected labels, which samples remain, and the log, which is also written as NAME-changes.csv.

    Raises:
        OtherRunError: The decisions are about another data set.
        FileExistsError: The output file or folder exists.
        ValueError: Decisions, format or data do not fit the run.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> x, y = torch.randn(60, 8), torch.arange(60) % 3
        >>> run = lw.analyze(torch.nn.Linear(8, 3), (x, y), out=tempfile.mkdtemp(), classes=["ant", "bee", "cow"])
        >>> lw.apply_decisions(run, {0: "bee", 4: "wrong", 5: "right"})
        Corrections(1 relabeled, 1 dropped, 59 of 60 samples stay)

    """
    found = run if isinstance(run, Analysis) else Analysis(check_type("run", run, (str, Path), "a run"))
    check_choice("wrong", wrong, ("drop", "suggested", "keep"))
    if found.manifest.get("classes") is None or found.table.get("label") is None:
        raise ValueError(f"The run in {found.folder} has no class labels, so there is nothing to correct.")
    corrections = _correct(found, _load_decisions(found, decisions), wrong)
    if to is not None:
        corrections.write(to, out, data=data, force=force)
    return corrections


def _load_decisions(run: Analysis, decisions: Any) -> list[Decision]:
    """Return decisions given as a dict, a file or a sequence."""
    if isinstance(decisions, Mapping):
        return _from_mapping(run, decisions)
    if isinstance(decisions, str | Path):
        return read_decisions(run, decisions)
    return run.decision_reader.check(decisions, "decisions")


def read_decisions(run: Analysis, path: str | Path) -> list[Decision]:
    """Read decisions from a file of the report's review, or from an export of Label Studio or Argilla."""
    found, source = read_json(Path(path)), str(path)
    if label_studio.is_export(found) and found:
        return label_studio.read_annotations(run, found, source)
    if argilla.is_export(found) and found:
        return argilla.read_responses(run, found, source)
    return run.decision_reader.parse(found, source)


def _from_mapping(run: Analysis, given: Mapping[int, Any]) -> list[Decision]:
    reader, source = run.decision_reader, "decisions"
    entries = []
    for sample, value in given.items():
        number = int(sample) if isinstance(sample, np.integer) else sample
        value = int(value) if isinstance(value, np.integer) else value
        entry: dict[str, Any] = {"sample": number, "verdict": value}
        if value not in ("right", "wrong", "unsure", "drop"):
            entry = {"sample": number, "verdict": "relabel", "label": value}
        entries.append(entry)
    return reader.parse({"run": run.manifest["data"], "decisions": entries}, source)


def _correct(run: Analysis, decisions: Sequence[Decision], wrong: Wrong) -> Corrections:
    table = run.table
    before = table["label"].to_numpy().astype(np.int64)
    labels, kept = before.copy(), np.ones(len(before), dtype=bool)
    suggested = table["suggested_label"].to_numpy() if "suggested_label" in table else before
    without_suggestion = list[int]()
    for sample, verdict, label in decisions:
        if verdict == "relabel":
            if label is None:
                raise ValueError(
                    f'Sample {sample} has the verdict "relabel" but no "label": add the label, or use "wrong".'
                )
            labels[sample] = label
        elif verdict == "wrong" and wrong == "suggested":
            labels[sample] = suggested[sample]
            if labels[sample] == before[sample]:
                kept[sample] = False
                without_suggestion.append(sample)
        elif verdict == "drop" or (verdict == "wrong" and wrong == "drop"):
            kept[sample] = False
    if without_suggestion:
        some = ", ".join(map(str, without_suggestion[:5])) + (", …" if len(without_suggestion) > 5 else "")
        warnings.warn(
            f"{len(without_suggestion):,} of the labels judged wrong have no other label suggested, so their samples "
            f'are left out: {some}. Choose a class for each in the review, or pass wrong="keep" (--wrong keep).',
            stacklevel=3,
        )
    if not kept.any():
        raise ValueError("The decisions would drop every sample; no data would remain.")
    return Corrections(run, labels, kept, _log(run, decisions, labels, kept))


def _log(
    run: Analysis, decisions: Sequence[Decision], labels: np.ndarray, kept: np.ndarray
) -> "pandas.DataFrame":
    """Return what was done with each decided sample, and why."""
    import pandas

    table, classes = run.table, run.manifest["classes"]
    judge = JUDGES[suggestion_judge(run.manifest, table)]
    rows = []
    for sample, verdict, _ in decisions:
        old, new = int(table["label"].iloc[sample]), int(labels[sample])
        row: dict[str, Any] = {"sample": sample}
        if "name" in table:
            row["name"] = table["name"].iloc[sample]
        row |= {
            "action": "dropped" if not kept[sample] else "kept" if old == new else "relabeled",
            "label_before": classes[old],
            "label_after": classes[new] if kept[sample] else "",
            "verdict": verdict,
            "suggested_label": "",
            "label_suspicion": float("nan"),
        }
        evidence = ""
        if "suggested_label" in table:
            row["suggested_label"] = classes[int(table["suggested_label"].iloc[sample])]
            row["label_suspicion"] = float(table["label_suspicion"].iloc[sample])
            other = int(table["suggested_label"].iloc[sample]) != old
            says = f"{judge} {row['suggested_label']}" if other else "no other label is suggested"
            evidence = f"; {says}, suspicion {row['label_suspicion']:.3f}"
        row["reason"] = WHY[verdict] + evidence
        rows.append(row)
    names = [
        *(
            "sample",
            *(["name"] if "name" in table else []),
            "action",
            "label_before",
            "label_after",
            "verdict",
        ),
        *("suggested_label", "label_suspicion", "reason"),
    ]
    return pandas.DataFrame(rows, columns=names)
