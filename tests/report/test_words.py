"""Every word of the page is explained, and listed with the column it stands for."""

from pathlib import Path

from likewise.report.pages import NOT_COLUMNS
from likewise.report.words import STATUSES, WORDS, status_words
from likewise.runs.columns import COLUMNS
from likewise.runs.columns import STATUSES as KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "columns.md").read_text()


def test_every_column_has_a_word_and_a_line():
    assert set(WORDS) - NOT_COLUMNS == set(COLUMNS) - {"map_x", "map_y"} | {"sample", "name"}
    assert set(STATUSES) == set(KINDS)
    assert all(word.title and word.meaning.endswith(".") for word in WORDS.values())
    titles = [word.title for word in WORDS.values()]
    assert len(set(titles)) == len(titles)


def test_the_documentation_lists_the_words_of_the_page():
    for name, word in WORDS.items():
        if name not in NOT_COLUMNS and word.title != name:
            row = f"| {word.title} | `{name}` |"
            assert row in PAGE, f"add to 'Names on the page' of docs/columns.md: {row}"
    for name, word in STATUSES.items():
        assert f'| {word.title} | `status == "{name}"` |' in PAGE, name


def test_statuses_name_who_judges_labels():
    assert status_words("votes") == status_words("network") == STATUSES
    for judge, names in (("reheated", "reheated copies"), ("crossval", "networks that have not seen it")):
        words = status_words(judge)
        assert set(words) == set(STATUSES)
        assert all(names in words[status].meaning for status in ("ordinary", "contested"))
        assert "neighbors" not in words["contested"].title
