"""Decisions of a person applied to the labels of a run: `likewise.apply_decisions`, `likewise apply`."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from likewise.checks import check_choice, check_type
from likewise.report.suggestions import JUDGES, suggestion_judge
from likewise.runs.corrected_data import Corrections
from likewise.runs.decisions import Decision, read_json
from likewise.runs.export import argilla, label_studio
from likewise.runs.result import Analysis

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
    """Return a data set as decisions leave it, and write it if asked; the original stays as it is.

    Args:
        run: The run that was decided on, or its folder.
        decisions: The file that the report's review downloads, or an export of Label Studio or Argilla; or a dict,
            sample number -> verdict ("right", "wrong", "unsure", "drop") or the class that it should have, by number
            or, if no verdict is called so, by name; or `decisions` of the widget that `Analysis.show` returns.
        to: In which form the data are written; nothing is if None. "labels.csv" (the samples that stay with their
            labels by name), "table" (the table that was analyzed, in its own format), "parquet" (that table, or the
            labels of other data), "folder" (copies of the images, one folder for each class), "hf-dataset" (a
            Hugging Face dataset on disk, images or rows with a ClassLabel). A path that ends in .csv or .parquet
            stands for the first and the third.
        out: Where to; by default beside the working directory's files, under a name that says what it is.
        wrong: What becomes of samples whose label is wrong without a better one: "drop" leaves them out,
            "suggested" gives them the label that the run suggests, and leaves out with a warning those for which it
            suggests no other one, "keep" leaves them as they are.
        data: The data set, if it is not where it was: a path, or a Hugging Face dataset.
        force: Replace what an earlier call wrote. Data and run are never replaced.

    Returns:
        The corrected labels, which samples stay, and the log; that is also written, as NAME-changes.csv.

    Raises:
        OtherRunError: The decisions are about another data set.
        FileExistsError: There is a file or folder of that name.
        ValueError: Decisions, form or data do not fit the run.

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
        raise ValueError(
            f"The run in {found.folder} has no labels that are classes: there is nothing to correct."
        )
    given = _given(found, decisions)
    corrections = _correct(found, given, wrong)
    if to is not None:
        corrections.write(to, out, data=data, force=force)
    return corrections


def _given(run: Analysis, decisions: Any) -> list[Decision]:
    """Return decisions, whatever form they were given in."""
    if isinstance(decisions, Mapping):
        return _from_mapping(run, decisions)
    if isinstance(decisions, str | Path):
        return read_decisions(run, decisions)
    return run.decision_reader.check(decisions, "decisions")


def read_decisions(run: Analysis, path: str | Path) -> list[Decision]:
    """Return the decisions in a file of the report's review, or in an export of Label Studio or Argilla."""
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
    unhelped = list[int]()
    for sample, verdict, label in decisions:
        if verdict == "relabel":
            if label is None:
                raise ValueError(
                    f'Sample {sample} is to be relabeled, and no "label" says as what: add it, or judge it wrong.'
                )
            labels[sample] = label
        elif verdict == "wrong" and wrong == "suggested":
            labels[sample] = suggested[sample]
            if labels[sample] == before[sample]:
                kept[sample] = False
                unhelped.append(sample)
        elif verdict == "drop" or (verdict == "wrong" and wrong == "drop"):
            kept[sample] = False
    if unhelped:
        some = ", ".join(map(str, unhelped[:5])) + (", …" if len(unhelped) > 5 else "")
        warnings.warn(
            f"{len(unhelped):,} of the labels that were judged wrong have no other one suggested, and their samples "
            f'are left out: {some}. Choose a class for each in the review, or give wrong="keep" (--wrong keep).',
            stacklevel=3,
        )
    if not kept.any():
        raise ValueError("Every sample would be dropped: there would be no data left.")
    return Corrections(run, labels, kept, _log(run, decisions, labels, kept))


def _log(
    run: Analysis, decisions: Sequence[Decision], labels: np.ndarray, kept: np.ndarray
) -> "pandas.DataFrame":
    """Return what became of each sample that was decided on, and why."""
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
