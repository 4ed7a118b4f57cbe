"""Tokens as marks on an excerpt: sums stay, places are those of the text, whatever characters it has."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from likewise.marked_text import MarkedText, mark_text, token_spans
from likewise.thumbnails import escape_controls
from texts import byte_tokenizer, word_tokenizer

LETTERS = st.text(st.sampled_from("ab \r\n\x07é😀\u202e⟨"), min_size=1, max_size=60)


@st.composite
def tokens_of_texts(draw):
    """A text, spans of its tokens (some empty, some sharing characters) and what they contribute."""
    text = draw(LETTERS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), min_size=1)))
    spans = [(0, 0), *pairwise(cuts)]
    repeated = draw(st.integers(0, len(spans) - 1))
    spans.insert(repeated, spans[repeated])
    contributions = draw(st.lists(st.floats(-1, 1), min_size=len(spans), max_size=len(spans)))
    first = draw(st.integers(0, len(spans)))
    return text, spans, contributions, (first, draw(st.integers(first, len(spans))))


@given(tokens_of_texts(), st.integers(1, 90))
def test_nothing_of_a_similarity_is_lost_or_counted_twice(tokens, length):
    text, spans, contributions, strongest = tokens
    found = mark_text(text, spans, contributions, strongest, length)
    assert found.total == pytest.approx(sum(contributions), abs=1e-12)
    assert len(found.text) <= length
    places = [place for pair in zip(found.starts, found.ends, strict=True) for place in pair]
    assert places == sorted(places) and all(a < b for a, b in zip(found.starts, found.ends, strict=True))
    assert "".join(segment.text for segment in found.segments) == found.text


@given(tokens_of_texts())
def test_a_mark_covers_the_characters_of_its_tokens_as_they_are_written(tokens):
    text, spans, _, strongest = tokens
    contributions = [2.0**-i for i in range(len(spans))]  # each sum tells which tokens it is of
    found = mark_text(text, spans, contributions, strongest, 10**6)
    assert found.text == escape_controls(text)
    expected = {}
    for span, value in zip(spans, contributions, strict=True):
        if span[0] < span[1]:
            expected[span] = expected.get(span, 0) + value
    for (start, end), value in expected.items():
        after, before = text[end:], text[:start]
        if text[start - 1 : start + 1] == "\r\n" or text[end - 1 : end + 1] == "\r\n":
            continue  # a line end that tokens share is one character as it is written
        at = found.contributions.index(pytest.approx(value, rel=0, abs=1e-15))
        assert found.text[: found.starts[at]] == escape_controls(before)
        assert found.text[found.ends[at] :] == escape_controls(after)


def test_the_excerpt_of_a_long_text_holds_the_strongest_passage():
    words = [f"word{i}" for i in range(200)]
    text, spans, at = " ".join(words), [], 0
    for word in words:
        spans.append((at, at + len(word)))
        at += len(word) + 1
    contributions = [0.001] * 200
    contributions[150:153] = [0.2, 0.3, 0.1]
    found = mark_text(text, spans, contributions, (150, 153), 80)
    first, end = found.passage
    assert found.text[first:end] == "word150 word151 word152"
    assert found.text[0] == found.text[-1] == "…" and found.text[1:5] == "word" and len(found.text) <= 80
    assert found.share == pytest.approx(0.6 / sum(contributions))
    early = mark_text(text, spans, contributions, (2, 5), 80)
    assert early.text.startswith("word0 word1") and early.text.endswith("…")


def test_contributions_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="2 tokens have a place"):
        mark_text("a b", [(0, 1), (2, 3)], [0.1], (0, 1))
    with pytest.raises(ValueError, match="2 tokens have a place"):
        mark_text("a b", [(0, 1), (2, 3)], [0.1, 0.2, 0.3], (0, 1))
    assert mark_text("a b", [(0, 1), (2, 3)], [0.1, 0.2, 0.0], (0, 1)).contributions == (0.1, 0.2)


def test_a_text_that_nothing_speaks_for_has_no_passage():
    found = mark_text("a b", [(0, 1), (2, 3)], [-0.1, -0.2], (1, 1))
    assert found.passage == (0, 0) and found.share != found.share
    assert found.as_dict()["share"] is None and found.as_dict()["passage"] == ""


def test_an_empty_text_is_an_empty_excerpt():
    found = mark_text("", [(0, 0)], [0.25], (0, 1))
    assert found.text == "" and found.segments == [] and found.total == found.unshown == 0.25


def test_the_passage_is_in_the_excerpt_also_beside_characters_that_are_written_out():
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("ab \0\t") for _ in range(draw.randint(1, 60)))
        low = draw.randrange(len(text))
        high = min(len(text), low + draw.randint(1, 8))
        passage = escape_controls(text[low:high])
        length = len(passage) + draw.randint(2, 30)  # room for what shows that the text goes on
        found = mark_text(text, [(0, low), (low, high), (high, len(text))], [0.1, 1.0, 0.1], (1, 2), length)
        first, end = found.passage
        assert found.text[first:end] == passage and len(found.text) <= length


def test_marks_as_plain_values():
    found = MarkedText("a b", (0, 2), (1, 3), (0.1, 0.3), (2, 3), 0.1)
    told = found.as_dict()
    assert told["passage"] == "b" and told["share"] == pytest.approx(0.6)
    assert told["marks"][1] == {"start": 2, "end": 3, "contribution": 0.3}


def test_places_of_a_fast_tokenizer_are_those_of_the_characters():
    pytest.importorskip("transformers")
    text = "the café 😀 sat"
    ids, spans = token_spans(byte_tokenizer(), text)
    assert len(ids) == len(spans) and spans[0] == (0, 0)  # the token that begins every text
    pieces = [text[a:b] for a, b in spans[1:]]
    assert pieces.count("😀") > 1  # several tokens share the bytes of one character
    covered = {i for a, b in spans for i in range(a, b)}
    assert {i for i, letter in enumerate(text) if letter != " "} <= covered
    assert token_spans(word_tokenizer(), "cat  dog\ncat")[1] == [(0, 3), (5, 8), (9, 12)]


def test_a_tokenizer_that_tells_no_places_is_decoded_token_by_token():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.ByT5Tokenizer()
    assert not tokenizer.is_fast
    draw = random.Random(0)
    for _ in range(20):
        text = "".join(draw.choice("ab é😀,\n") for _ in range(draw.randint(1, 12)))
        ids, spans = token_spans(tokenizer, text)
        letters = [i for i, letter in enumerate(text) for _ in letter.encode()]
        assert spans == [
            *((i, i + 1) for i in letters),
            (0, 0),
        ]  # one token a byte, and the one that ends a text
        assert ids == tokenizer(text)["input_ids"]
    _, cut = token_spans(tokenizer, "a😀", truncation=True, max_length=4)  # in the middle of a character
    assert cut[0] == (0, 1) and all(a == b for a, b in cut[1:])


class Lowercase:
    """A tokenizer that forgets case: its tokens do not give the text back."""

    is_fast, all_special_ids = False, []

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text.lower()]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def test_places_are_not_guessed_where_tokens_do_not_give_the_text_back():
    assert token_spans(Lowercase(), "abc")[1] == [(0, 1), (1, 2), (2, 3)]
    assert token_spans(Lowercase(), "aBc")[1] is None
