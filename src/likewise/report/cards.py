"""The first screen: a few numbers, each with what it means and what to do."""

from typing import Any, NamedTuple

import numpy as np

from likewise.report.payload import Run


class Card(NamedTuple):
    """One number."""

    title: str
    value: str
    meaning: str
    advice: str
    opens: str  # a selection of the page, or nothing
    alarming: bool = False


def cards(run: Run) -> list[Card]:
    """Return the cards of a run, the most urgent first; one that counts nothing opens nothing."""
    return [card._replace(opens="") if card.value.startswith("0 ") else card for card in _cards(run)]


def _cards(run: Run) -> list[Card]:
    columns = run.columns
    found = []
    if "label_issue" in columns:
        found.append(
            _label_issues(
                columns["label_issue"], run.manifest.get("wrong_labels"), run.manifest.get("reheated", "")
            )
        )
    found += [_own(run, name) for name in run.own_columns if columns[name].dtype == bool]
    if "status" in columns:
        found += [_contested(run), _isolated(run)]
    if "shift" in columns and "prediction" in columns:
        found.append(_shifted(columns["shift"], "status" in columns))
    if "error" in columns:
        found.append(_error(columns["error"]))
    fit = run.manifest.get("fit")
    found.append(_fit(fit) if fit else _density(columns["density"]))
    return found


def _label_issues(flagged: np.ndarray, told: dict[str, Any] | None, reheated: str = "") -> Card:
    return Card(
        "Labels that look wrong",
        _share(flagged),
        "The samples that the network treats like it carry another label. That holds also where the "
        "network has memorized the wrong label. "
        + _expected(told, bool(flagged.any()))
        + (f" {reheated}" if reheated else ""),
        _label_advice(bool(flagged.any()), told),
        "label_issue",
        bool(flagged.any()),
    )


def _label_advice(any_flag: bool, told: dict[str, Any] | None) -> str:
    if any_flag:
        return "Review them below, the most suspicious first, then fix the labels and train again."
    if told is not None and told.get("reason"):
        return "Review the most suspicious below: that none is flagged does not mean that none is wrong."
    return "Nothing to do."


def _expected(told: dict[str, Any] | None, any_flag: bool) -> str:
    if told is None:
        return ""
    if told.get("reason"):
        return f"How many are wrong cannot be told from one network. {told['reason']}"
    low, likely, high = told["errors"]
    if not told["distinct"]:
        return (
            "Here wrong labels do not stand out as a group of their own: what is flagged may as well be rare "
            f"or ambiguous. At most about {high:,} labels are wrong."
        )
    precision = told["precision"]
    flags = f"Of those flagged about {precision[1]:.0%} should be wrong." if any_flag and precision else ""
    return f"In all about {likely:,} labels seem to be wrong ({low:,} to {high:,}). {flags}".strip()


def _fit(told: dict[str, Any]) -> Card:
    meaning = {
        "underfit": "The neighbors' labels tell nearly as much as the network: it has not made use of "
        "what it can tell apart.",
        "fit": "The network tells more than the neighbors' labels do, and not much more than they support.",
        "overfit": "The network reproduces labels that no neighbor supports: expect at least such a drop on "
        "new data.",
    }[told["verdict"]]
    advice = {
        "underfit": "Train longer, or a larger network.",
        "fit": "Nothing to do.",
        "overfit": "Check the labels that look wrong first; then stop earlier, augment, or collect more "
        "data.",
    }[told["verdict"]]
    return Card(
        "Learned / supported",
        f"{told['learned']:.0%} / {told['supported']:.0%}",
        "Labels that the network predicts, and those that the samples treated alike predict without it. "
        f"{meaning}",
        f"{advice} (If these are the samples it was trained on.)",
        "",
    )


def _own(run: Run, name: str) -> Card:
    """Return how a column of the user's own, true or false, meets the labels that look wrong."""
    mine, count = run.columns[name], int(run.columns[name].sum())
    meaning = f"{count:,} samples are marked {name!r} in the data given."
    value = f"{count:,}"
    if "label_suspicion" in run.columns and count:
        order = np.argsort(-run.columns["label_suspicion"], kind="stable")
        hit = int((mine & run.columns["label_issue"]).sum())
        top = int(mine[order[:count]].sum())
        value = f"{hit:,} of {count:,}"
        meaning += (
            f" {hit:,} of them are among the labels that look wrong; of the {count:,} most suspicious "
            f"samples {top:,} are marked so."
        )
    return Card(name.replace("_", " "), value, meaning, "Compare with what was flagged.", name)


def _contested(run: Run) -> Card:
    known = "label" in run.columns
    return Card(
        "Contested",
        _share(run.columns["status"] == "contested"),
        "Most votes of similar samples are for another class than its label: the label is wrong, or the network "
        "does not tell the classes apart there."
        if known
        else "Most votes of similar samples are for another class than the predicted one.",
        "Look at which classes mix, then at inputs: more pixels, more context, or one class.",
        "status:contested",
    )


def _isolated(run: Run) -> Card:
    return Card(
        "Isolated",
        _share(run.columns["status"] == "isolated"),
        "Hardly any sample is similar to it: it gets less than a twentieth of the usual votes.",
        "Predictions there rest on few samples: collect more like them, or check that they belong.",
        "status:isolated",
    )


def _shifted(shift: np.ndarray, classes: bool) -> Card:
    limit = 0.5 if classes else 1.0
    unit = (
        "half of its probability is on other classes"
        if classes
        else "more than the spread of all predictions"
    )
    return Card(
        "Predictions to distrust",
        _share(shift > limit),
        f"The prediction is far from that of the samples the network treats alike ({unit}).",
        "Do not act on these without a second look; if they matter, label more samples around them.",
        f"shift:{limit}",
    )


def _error(error: np.ndarray) -> Card:
    return Card(
        "Typical error",
        f"{np.median(error):.3g}",
        f"The median distance of a prediction from its label; the largest is {error.max():.3g}.",
        "The samples below are listed by it: look at the first, for a wrong label or a case that is not "
        "learned.",
        "",
    )


def _density(density: np.ndarray) -> Card:
    return Card(
        "Typical density",
        f"{np.median(density):.2f}",
        "The mean similarity of the median sample to all: 1 if the network treats all inputs alike, near "
        "0 if it sees each on its own.",
        "Compare checkpoints or models by it (likewise compare); a low one means little is shared "
        "between samples.",
        "",
    )


def _share(flags: np.ndarray) -> str:
    percent = 100 * flags.mean()
    return f"{int(flags.sum()):,} ({percent:.1f} %)"
