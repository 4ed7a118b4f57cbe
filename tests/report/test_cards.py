"""What the report says of labels where one network cannot tell."""

import numpy as np

from likewise.report.cards import _label_issues

UNKNOWN = {
    "errors": None,
    "precision": None,
    "distinct": False,
    "reason": "Wrong ones may be memorized. Reheat it.",
}


def test_where_one_network_cannot_tell_the_report_does_not_say_that_nothing_is_to_be_done():
    for flagged in (np.zeros(5, bool), np.ones(5, bool)):
        text = " ".join(map(str, _label_issues(flagged, UNKNOWN)))
        assert "cannot be told from one network" in text
        assert "Reheat it" in text
        assert "Nothing to do" not in text


def test_where_it_can_tell_the_numbers_are_there():
    told = {"errors": [3, 5, 9], "precision": [0.5, 0.8, 0.9], "distinct": True, "reason": ""}
    text = " ".join(map(str, _label_issues(np.ones(5, bool), told)))
    assert "about 5 labels seem to be wrong (3 to 9)" in text
