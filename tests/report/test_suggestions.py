import numpy as np
import pytest

from likewise.report.suggestions import doubtful_suggestions

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
