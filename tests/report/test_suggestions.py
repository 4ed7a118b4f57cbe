import numpy as np
import pytest

from likewise.report.suggestions import JUDGES, doubtful_suggestions, suggestion_judge

LABELS = np.array([0, 1, 1, 2, 2, 0, 3, 3, 3, 0])


@pytest.mark.parametrize(
    ("neighbors", "suggested", "predicted", "doubtful"),
    [
        pytest.param([1, 2, 3, 4], 1, 0, False, id="half of them"),
        pytest.param([1, 3, 6, 7], 1, 0, True, id="one of four, and the network says otherwise"),
        pytest.param([1, 3, 6, 7], 1, 1, False, id="more than its own label, and the network says so"),
        pytest.param([1, 5, 6, 7], 1, 1, True, id="as many have its own"),
        pytest.param([6, 7, 8, 5], 0, 0, False, id="nothing else is suggested"),
    ],
)
def test_a_suggestion_stands_by_neighbors_or_by_the_network_and_more_neighbors_than_its_own_label(
    neighbors, suggested, predicted, doubtful
):
    columns = {
        "label": LABELS,
        "suggested_label": np.full(10, suggested),
        "prediction": np.full(10, predicted),
    }
    found = doubtful_suggestions(columns, np.tile(neighbors, (10, 1)))
    assert bool(found[0]) is doubtful


def test_without_predictions_of_classes_neighbors_decide_and_without_suggestions_nothing_is_doubtful():
    neighbors = np.tile([1, 3, 6, 7], (10, 1))
    columns = {"label": LABELS, "suggested_label": np.full(10, 1)}
    assert doubtful_suggestions(columns, neighbors)[0]
    assert doubtful_suggestions({**columns, "prediction": np.full(10, 1.0)}, neighbors)[0]
    assert not doubtful_suggestions({"label": LABELS}, neighbors).any()


def test_the_judge_of_a_run_is_the_best_that_it_had():
    classes, values = {"prediction": np.zeros(3, dtype=int)}, {"prediction": np.zeros(3)}
    hot, cold = "Reheated 4 times at a learning rate of 1.0e-02.", "Not reheated: too little is memorized."
    assert suggestion_judge({"crossval": "0f", "reheated": hot}, classes) == "crossval"
    assert suggestion_judge({"crossval": None, "reheated": hot}, classes) == "reheated"
    assert suggestion_judge({"crossval": None, "reheated": cold}, classes) == "network"
    assert suggestion_judge({}, values) == suggestion_judge({}, {}) == "votes"
    assert [name for name, says in JUDGES.items() if "vote" in says] == ["votes"]


def test_where_copies_or_other_networks_suggest_their_own_support_decides_and_not_the_neighbors():
    """Neighbors of a memorized network all carry the given label, whatever the reheated copies say."""
    support = np.array([0.9, 0.5, 0.4, *[0.9] * 7])
    columns = {
        "label": np.zeros(10, dtype=int),
        "suggested_label": np.array([1, 1, 1, *[0] * 7]),
        "prediction": np.zeros(10, dtype=int),
        "suggestion_support": support,
    }
    neighbors = np.tile([3, 4, 5, 6], (10, 1))  # all of label 0
    assert doubtful_suggestions(columns, neighbors).nonzero()[0].tolist() == [2]
    del columns["suggestion_support"]
    assert doubtful_suggestions(columns, neighbors)[:3].all()
