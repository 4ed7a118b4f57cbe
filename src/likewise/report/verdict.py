"""The text of the report's first screen: a verdict, the caveats of this run, and what to do next."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from likewise.report.payload import Run
from likewise.report.suggestions import suggestion_judge
from likewise.wording import agreeing, counted

SECONDS_PER_LABEL = 5
MANY_OF_A_GROUP = 0.3  # least share of the flagged labels, and twice the group's share of all samples
FEW_FLAGS = 5  # with fewer flags, no group is named
FEW_OF_A_CLASS = 20  # with fewer samples, a class is not judged
HARDLY = 0.005  # share of confused samples below which two classes are not named
MOST_SPLITS = 4  # with more splits, no accuracies are listed
MISSED = 0.5  # share of samples predicted as another class beyond which a class is named
WIDE = 0.5  # width of an interval beyond which its middle is not shown

CONTRADICTS = {  # by likewise.report.suggestions.suggestion_judge
    "crossval": "Networks that have not seen them",
    "reheated": "Reheated copies of the network",
    "network": "Similar samples or the network",
    "votes": "Similar samples",
}


class Caveat(NamedTuple):
    """A sentence that limits what the numbers say, and what to do about it."""

    first: str
    more: str


class Verdict(NamedTuple):
    """The first sentences of the page."""

    headline: str
    detail: str
    caveats: list[Caveat]
    worst: str  # title of the samples beside the map, if no labels are reviewed


class Step(NamedTuple):
    """One thing to do, with the number that supports it."""

    value: str
    title: str
    text: str
    action: str = ""
    opens: str = ""  # a selection on the page
    part: str = ""  # or a section of the page
    review: str = ""  # what the review shows then: "worst" or "spot"


def verdict(run: Run) -> Verdict:
    """Return the verdict of a run."""
    caveats = [_caveat(line) for line in run.manifest["caveats"]]
    if "label_issue" in run.columns:
        headline, detail, reasons = _label_verdict(run)
        return Verdict(headline, detail, [_caveat(line) for line in reasons] + caveats, "")
    if "error" in run.columns:
        error = run.columns["error"]
        headline = (
            f"Half of {run.n:,} predictions are within {np.median(error):.3g} of their label; the largest error is "
            f"{error.max():.3g}."
        )
        ranked = "target_suspicion" in run.columns
        worst = "Targets that look most wrong" if ranked else "Largest errors"
        detail = f"{worst} come first: wrong labels, or cases that the network has not learned."
        return Verdict(headline, detail, caveats, worst)
    if "target_suspicion" in run.columns:
        headline = f"Of {counted(run.n, 'sample')}, those with the most suspicious labels come first."
        return Verdict(headline, "A sample may have several labels.", caveats, "Labels that look most wrong")
    what = "texts" if "log_likelihood" in run.columns else "samples"
    detail = "The most novel come first: rare cases, broken inputs, or another data set."
    return Verdict(_headline_without_labels(run, what), detail, caveats, f"Most novel {what}")


def steps(run: Run) -> list[Step]:
    """Return what to do next, the most urgent first, without steps that concern no samples."""
    return list(_steps(run))


def percent(share: float) -> str:
    """Format a share as a percentage with a non-breaking space."""
    return f"{100 * share:.0f}\u00a0%"


def standing_group(run: Run) -> str:
    """Describe the group that stands out among the flagged labels; empty if they are spread out.

    A group is a label, a suggested label, a pair of both, or a value of a user column. It stands out if it has at least
    30 % of the flagged labels and at least twice its share of all samples.
    """
    flagged = run.columns["label_issue"]
    total = int(flagged.sum())
    if total < FEW_FLAGS:
        return ""
    best, text = 0.0, ""
    for values, words in _groupings(run):
        names, codes = np.unique(values, return_inverse=True)
        flags, sizes = np.bincount(codes[flagged], minlength=len(names)), np.bincount(codes)
        for group in np.flatnonzero(flags >= MANY_OF_A_GROUP * total):
            lift = flags[group] / total * run.n / sizes[group]
            gain = flags[group] * np.log(lift)
            if lift >= 2 and gain > best:
                best, text = gain, f"{flags[group]:,} of them {words(names[group])}."
    return text


def _headline_without_labels(run: Run, what: str) -> str:
    if "status" not in run.columns:
        pairs = 0 if run.duplicates is None else len(run.duplicates["first"])
        return f"{run.n:,} {what}, {pairs or 'no'} near-duplicate {agreeing(pairs, 'pair', 'pairs')}."
    alone = int((run.columns["status"] == "isolated").sum())
    if not alone:
        return f"None of {run.n:,} {what} stands alone."
    return f"{alone:,} of {run.n:,} {what} {agreeing(alone, 'is', 'are')} unlike all others."


def _label_verdict(run: Run) -> tuple[str, str, list[str]]:
    count, estimate = int(run.columns["label_issue"].sum()), run.manifest.get("wrong_labels") or {}
    labels = agreeing(run.n, "label", "labels")
    reason = estimate.get("reason", "")
    distinct = bool(estimate.get("distinct"))
    if count and distinct:
        headline = f"{count:,} of {run.n:,} {labels} {agreeing(count, 'looks', 'look')} wrong."
    elif count:
        headline = f"{count:,} of {run.n:,} {labels} {agreeing(count, 'is', 'are')} worth a look."
    elif reason:
        headline = f"One network cannot tell how many of {run.n:,} {labels} are wrong."
    else:
        headline = f"None of {run.n:,} {labels} stands out as wrong."
    if reason:
        start = "One network cannot tell how many are wrong. " if count else ""
        detail = (
            f"{start}Review the most suspicious labels: the number of flags is no estimate of wrong labels."
        )
        return headline, f"{detail} {standing_group(run)}".strip(), [reason]
    return headline, f"{_describe_estimate(run, estimate, count)} {standing_group(run)}".strip(), []


def _caveat(text: str) -> Caveat:
    first, point, more = text.partition(". ")
    return Caveat(first + point.rstrip(), more)


def _describe_estimate(run: Run, estimate: dict[str, Any], count: int) -> str:
    if not estimate.get("errors"):
        return ""
    low, likely, high = estimate["errors"]
    if not estimate["distinct"]:
        judge = CONTRADICTS[suggestion_judge(run.manifest, run.columns)]
        start = f"{judge} contradict them: some are wrong, others rare or ambiguous. " if count else ""
        return (
            f"{start}It is not clear how many of all labels are wrong, about {high:,} at most; a spot check estimates "
            "it better."
        )
    flags = f" {_precision(estimate['precision'], count)}" if count and estimate["precision"] else ""
    seem = agreeing(likely, "label seems", "labels seem")
    return f"In all, about {likely:,} {seem} to be wrong ({low:,} to {high:,}).{flags}"


def _precision(share: list[float], count: int) -> str:
    """Say how many of the flagged labels are wrong; without a point estimate if the interval is wide."""
    low, likely, high = share
    ends = f"{100 * low:.0f} to {percent(high)}"
    if high - low > WIDE:
        between = f"between {100 * low:.0f} and {percent(high)}"
        return (
            f"The label that looks wrong really is with a probability of {ends}."
            if count == 1
            else f"Of the {count:,} that look wrong, {between} really are."
        )
    if count == 1:
        return f"The label that looks wrong really is with a probability of about {percent(likely)} ({ends})."
    return f"Of the {count:,} that look wrong, about {percent(likely)} ({ends}) really are."


def _groupings(run: Run) -> Iterator[tuple[np.ndarray, Any]]:
    classes = run.manifest["classes"]
    label, look = run.columns["label"].astype(int), run.columns["suggested_label"].astype(int)
    pairs = label * len(classes) + look

    def named(pair: int) -> str:
        return f"are labeled {classes[pair // len(classes)]} and look like {classes[pair % len(classes)]}"

    yield pairs, named
    yield label, lambda value: f"are labeled {classes[value]}"
    yield look, lambda value: f"look like {classes[value]}"
    for name in run.own_columns:
        values = run.columns[name]
        if values.dtype == object:
            yield values.astype(str), lambda value, name=name: f"have {name} {value}"


def _steps(run: Run) -> Iterator[Step]:
    if "label_issue" in run.columns:
        yield from _label_steps(run)
    yield from _marked_steps(run)
    if "suggested_label" in run.columns:
        yield from _mixed_step(run)
    if "prediction" in run.columns and "label_issue" in run.columns:
        yield from _missed_class_step(run)
    if "shift" in run.columns and "prediction" in run.columns:
        yield from _shift_step(run)
    if "status" in run.columns:
        alone = int((run.columns["status"] == "isolated").sum())
        if alone:
            yield Step(
                f"{alone:,}",
                agreeing(alone, "sample to label or collect next", "samples to label or collect next"),
                "Hardly any sample is similar to them, so their predictions rest on little. Check that they belong to "
                "the data, then collect and label more of their kind.",
                "Show them",
                opens="status:isolated",
            )
    pairs = 0 if run.duplicates is None else len(run.duplicates["first"])
    if pairs:
        yield Step(
            f"{pairs:,}",
            agreeing(pairs, "near-duplicate pair", "near-duplicate pairs"),
            f"Far closer than usual{' in their class' if run.manifest['classes'] else ''}. Drop copies, or keep both "
            "on one side of a split.",
            "Compare them",
            part="duplicates-part",
        )
    fit = run.manifest.get("fit")
    if fit and fit["verdict"] != "fit":
        yield _fit_step(run, fit)


def _label_steps(run: Run) -> Iterator[Step]:
    count = int(run.columns["label_issue"].sum())
    if count:
        minutes = max(1, round(count * SECONDS_PER_LABEL / 60))
        yield Step(
            f"{count:,}",
            agreeing(count, "label to review", "labels to review"),
            f"Takes about {counted(minutes, 'minute')}, one key per label. Download the decisions, write "
            "corrected data with likewise apply, and train again.",
            "Start",
            part="review-part",
            review="worst",
        )
    if run.manifest.get("spot_check"):
        yield Step(
            "30",
            "labels to spot-check",
            "Drawn from the whole ranking: estimates how many labels are wrong, with an interval that does not rely on "
            "any network.",
            "Spot check",
            part="review-part",
            review="spot",
        )


def _marked_steps(run: Run) -> Iterator[Step]:
    """Yield how many samples marked in a user's boolean column look wrong."""
    for name in run.own_columns:
        mine = run.columns[name]
        count = int(mine.sum()) if mine.dtype == bool else 0
        if not count or "label_issue" not in run.columns:
            continue
        order = np.argsort(-run.columns["label_suspicion"], kind="stable")
        hit, top = int((mine & run.columns["label_issue"]).sum()), int(mine[order[:count]].sum())
        yield Step(
            f"{hit:,} of {count:,}",
            f"{name.replace('_', ' ')} found",
            f"Samples that you marked {name!r} and that look wrong. The {count:,} most suspicious samples contain "
            f"{top:,} of them.",
            "Show them",
            opens=name,
        )


def _mixed_step(run: Run) -> Iterator[Step]:
    """Yield the two classes that are confused most, as in the section on classes.

    They are predicted as each other; if no prediction is wrong, their samples are neighbors of each other.
    """
    label, classes = run.columns["label"].astype(int), run.manifest["classes"]
    kept = ~run.columns["label_issue"] if "label_issue" in run.columns else np.ones(run.n, dtype=bool)
    predicted = run.columns["prediction"].astype(int) if "prediction" in run.columns else label
    if (kept & (predicted != label)).any():
        yield from _confused_step(label[kept], predicted[kept], classes, "samples are predicted as")
        return
    both = np.repeat(kept, run.indices.shape[1]) & kept[run.indices.ravel()]  # wrong labels are not a mixture
    mine, others = np.repeat(label, run.indices.shape[1])[both], label[run.indices.ravel()][both]
    if (mine != others).any():
        yield from _confused_step(mine, others, classes, "neighbors belong to")


def _confused_step(mine: np.ndarray, others: np.ndarray, classes: list[str], words: str) -> Iterator[Step]:
    """Yield the two classes that occur together most often in pairs of classes, unless that is rare."""
    differ = mine != others
    low, high = np.minimum(mine, others)[differ], np.maximum(mine, others)[differ]
    pairs, counts = np.unique(low * len(classes) + high, return_counts=True)
    a, b = divmod(int(pairs[counts.argmax()]), len(classes))
    share = counts.max() / ((mine == a) | (mine == b)).sum()
    if share < HARDLY:
        return
    yield Step(
        f"{classes[a]} · {classes[b]}",
        "are confused most",
        f"{percent(share)} of their {words} the other class. Add detail or context to the inputs, define the classes "
        "more clearly, or merge them.",
        "See pairs",
        part="classes-part",
    )


def _missed_class_step(run: Run) -> Iterator[Step]:
    """Yield the class that is most often predicted as another one, if that happens to most of its samples."""
    label, predicted = run.columns["label"].astype(int), run.columns["prediction"].astype(int)
    classes, kept = run.manifest["classes"], ~run.columns["label_issue"]
    counts = np.bincount(label[kept], minlength=len(classes))
    missed = np.bincount(label[kept & (predicted != label)], minlength=len(classes))
    shares = np.where(counts >= FEW_OF_A_CLASS, missed / np.maximum(counts, 1), 0)
    worst = int(shares.argmax())
    if shares[worst] <= MISSED:
        return
    wrong = kept & (label == worst) & (predicted != worst)
    mostly = classes[int(np.bincount(predicted[wrong]).argmax())]
    yield Step(
        classes[worst],
        "is the class to collect more of",
        f"{percent(shares[worst])} of its samples are predicted as another class, most often {mostly}. Collect more of "
        "it, or define it more clearly.",
        "See classes",
        part="classes-part",
    )


def _shift_step(run: Run) -> Iterator[Step]:
    limit = 0.5 if run.manifest["classes"] else 1.0
    beyond = run.columns["shift"] > limit
    flagged = run.columns.get("label_issue", np.zeros(run.n, dtype=bool))
    far = int((beyond & ~flagged).sum())
    exception = " Labels that look wrong are not counted." if (beyond & flagged).any() else ""
    if far:
        yield Step(
            f"{far:,}",
            agreeing(far, "prediction to check", "predictions to check"),
            f"Similar samples are predicted differently. Do not act on these without a second look.{exception}",
            "Show them",
            opens=f"shift:{limit}",
        )


def _fit_step(run: Run, fit: dict[str, Any]) -> Step:
    text = {
        "underfit": "The labels of neighbors predict as well as the network, or nearly. Correct the labels, then train "
        "longer, or a larger network. With many wrong labels, stopping early was right.",
        "overfit": "The network reproduces labels that similar samples contradict: expect a drop on new data. "
        "Review labels first, then stop earlier, augment, or collect more.",
    }[fit["verdict"]]
    return Step(
        f"{percent(fit['learned'])} · {percent(fit['supported'])}",
        "accuracy · leave-one-out accuracy",
        f"{text} {_accuracy_by_split(run) or 'This holds if the network was trained on these samples.'}",
        "What it means",
        part="word-supported",
    )


def _accuracy_by_split(run: Run) -> str:
    """Return the accuracy in each split as text, if there is a column of splits."""
    if not {"label", "prediction", "split"} <= run.columns.keys():
        return ""
    right = run.columns["label"].astype(int) == run.columns["prediction"].astype(int)
    split = run.columns["split"].astype(str)
    names = np.unique(split).tolist()
    accuracies = ", ".join(f"{name} {percent(right[split == name].mean())}" for name in names)
    return f"Accuracy by split: {accuracies}." if 1 < len(names) <= MOST_SPLITS else ""
