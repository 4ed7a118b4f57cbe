"""Checks of arguments accept what is meant and name what is not."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from likewise import checks

NO_INTEGERS = [None, True, 2.0, float("nan"), "3", b"3", [3], 3j, torch.tensor(3.0), torch.tensor([3, 4])]
NO_NUMBERS = [None, True, "0.5", [0.5], 1j, torch.ones(2), torch.ones((), device="meta"), object()]


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_integers_of_every_kind_are_accepted(value):
    found = checks.check_integer("k", value, 1)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_named(value):
    with pytest.raises(TypeError, match=r"^k must be an integer at least 1, found .*: ask for more\.$"):
        checks.check_integer("k", value, 1, advice="ask for more")


@pytest.mark.parametrize("value", [0, -1, 11, 10**30])
def test_integers_out_of_range_are_named(value):
    with pytest.raises(ValueError, match=f"k must be an integer from 1 to 10, found {value}"):
        checks.check_integer("k", value, 1, 10)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), Fraction(1, 2), torch.tensor(0.5)], ids=repr)
def test_numbers_of_every_kind_are_accepted(value):
    found = checks.check_number("q", value, above=0, most=1)
    assert found == 0.5 and type(found) is float


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: type(v).__name__)
def test_what_is_no_number_is_named(value):
    with pytest.raises(TypeError, match="q must be a finite number"):
        checks.check_number("q", value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, 0, 1, -3.5])
def test_numbers_out_of_range_are_named(value):
    with pytest.raises(ValueError, match="q must be a finite number above 0 and below 1, found"):
        checks.check_number("q", value, above=0, below=1)


def test_flags_and_choices_are_taken_at_their_word():
    assert checks.check_flag("exact", np.True_) is True
    assert checks.check_choice("form", "ratio", ("ratio", "cosine")) == "ratio"
    for value in (1, 0, "yes", None, torch.tensor(True)):
        with pytest.raises(TypeError, match="exact must be True or False"):
            checks.check_flag("exact", value)
    with pytest.raises(ValueError, match="form must be 'ratio' or 'cosine', found 'sine'"):
        checks.check_choice("form", "sine", ("ratio", "cosine"))
    with pytest.raises(TypeError, match="form must be 'ratio' or 'cosine', found an array"):
        checks.check_choice("form", np.zeros(3), ("ratio", "cosine"))


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), np.array([1, 2]), np.array([2, 1])[::-1], torch.tensor([1, 2])]
)
def test_numbers_in_any_container_become_a_tensor(value):
    assert checks.check_tensor("weights", value).tolist() == [1, 2]


@pytest.mark.parametrize(
    "value, found",
    [
        (None, "None"),
        ("text", "'text'"),
        ([[1], [1, 2]], "a list of 2 items"),
        (np.array([None]), "an array of object"),
        (np.ma.array([1, 2], mask=[True, False]), "without a mask"),
        (torch.ones(2, dtype=torch.complex64), "a tensor of torch.complex64"),
        (torch.ones(2, 2).to_sparse(), "sparse.*to_dense"),
        (torch.ones(2, device="meta"), "meta device"),
        (torch.tensor([1.0, float("nan")]), "1 of 2 numbers are NaN or infinite, the first at place 1"),
    ],
    ids=str,
)
def test_tensors_without_usable_numbers_are_named(value, found):
    with pytest.raises((TypeError, ValueError), match=f"^weights must .*{found}"):
        checks.check_tensor("weights", value)
