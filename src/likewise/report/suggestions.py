"""Suggested labels: who suggests them, and which are too doubtful to accept without a look."""

from collections.abc import Mapping
from typing import Any

import numpy as np

JUDGES = {
    "crossval": "networks that have not seen it predict",
    "reheated": "reheated copies of the network, which have forgotten part of the labels, predict",
    "network": "all samples, weighted by similarity, and the network together support",
    "votes": "all samples, weighted by similarity, vote for",
}

SUPPORTED = 0.5  # least support by reheated copies, or by networks that have not seen a sample


def suggestion_judge(manifest: Mapping[str, Any], columns: Mapping[str, Any]) -> str:
    """Return who suggests the labels of a run, a key of JUDGES.

    The best judge that the run had: networks that have not seen the sample, then reheated copies, then votes together
    with the network's own probabilities, or votes alone if its outputs are not classes.

    Args:
        manifest: The run's manifest.
        columns: The columns of its table.

    """
    if manifest.get("crossval"):
        return "crossval"
    if (manifest.get("reheated") or "").startswith("Reheated"):  # else skipped, and the text says why
        return "reheated"
    predicts = "prediction" in columns and np.asarray(columns["prediction"]).dtype.kind in "iu"
    return "network" if predicts else "votes"


def doubtful_suggestions(columns: Mapping[str, Any], neighbors: np.ndarray) -> np.ndarray:
    """Return which suggestions to change a label have little support, (n,).

    A suggestion of reheated copies, or of networks that have not seen the sample, has enough support if
    suggestion_support is at least one half. Any other suggestion has enough if at least half of the nearest neighbors
    have that label, or if the network predicts it and more neighbors have it than the sample's own label.

    Args:
        columns: Columns of a run's table: label and suggested_label, numbers of classes; suggestion_support if
            others than the network judge; prediction if there is one.
        neighbors: (n, k) numbers of samples.

    Returns:
        (n,) boolean; all False if there are no labels or no suggestions.

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
