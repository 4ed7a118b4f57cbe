"""Suggested labels: who suggests them, and which are too doubtful for report, live page and notebook to take unseen."""

from collections.abc import Mapping
from typing import Any

import numpy as np

JUDGES = {
    "crossval": "networks that have not seen it say",
    "reheated": "reheated copies of the network, which have forgotten part of the labels, say",
    "network": "all samples, weighted by similarity, and the network together say",
    "votes": "all samples, weighted by similarity, vote for",
}

SUPPORTED = 0.5  # of the opinion of reheated copies, or of networks that have not seen a sample


def suggestion_judge(manifest: Mapping[str, Any], columns: Mapping[str, Any]) -> str:
    """Return who suggests the labels of a run, a key of JUDGES.

    The best judge that the run had: networks that have not seen the sample, else reheated copies, else votes and
    probabilities of the network itself, or votes alone where its outputs are not those of the classes.

    Args:
        manifest: Of the run.
        columns: Of its table.

    """
    if manifest.get("crossval"):
        return "crossval"
    if (manifest.get("reheated") or "").startswith("Reheated"):  # else skipped, and the text says why
        return "reheated"
    predicts = "prediction" in columns and np.asarray(columns["prediction"]).dtype.kind in "iu"
    return "network" if predicts else "votes"


def doubtful_suggestions(columns: Mapping[str, Any], neighbors: np.ndarray) -> np.ndarray:
    """Return where another label is suggested that those who suggest it hardly support, (n,).

    A suggestion of reheated copies, or of networks that have not seen the sample, stands where half of their opinion is
    for it. Else it stands where half of the nearest neighbors are labeled so, or where the network predicts it and
    more of them carry it than the sample's own label.

    Args:
        columns: Of a run's table: label and suggested_label, numbers of classes; suggestion_support where others than
            the network judge; prediction where there is one.
        neighbors: (n, k) numbers of samples.

    Returns:
        (n,) truth values; none is true where there is no label or no suggestion.

    """
    if "label" not in columns or "suggested_label" not in columns:
        return np.zeros(len(neighbors), dtype=bool)
    label, suggested = (np.asarray(columns[name]) for name in ("label", "suggested_label"))
    if "suggestion_support" in columns:
        return (suggested != label) & (np.asarray(columns["suggestion_support"]) < SUPPORTED)
    labels = label[neighbors]
    votes = (labels == suggested[:, None]).sum(1)
    same = (labels == label[:, None]).sum(1)
    prediction = np.asarray(columns["prediction"]) if "prediction" in columns else None
    is_class = prediction is not None and prediction.dtype.kind in "iu"
    predicted = prediction == suggested if is_class else np.zeros(len(label), dtype=bool)
    supported = (2 * votes >= neighbors.shape[1]) | (predicted & (votes > same))
    return (suggested != label) & ~supported
