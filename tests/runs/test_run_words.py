"""Runs of texts rank labels also by shared words, and say so; runs of other inputs are as before."""

import pandas as pd
import pytest
import torch
from torch import nn

import likewise as lw
from likewise.runs import stages

WORDS, CLASSES = 40, 3


class Reader(nn.Module):
    """The mean of the words of a text, a linear layer."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, tokens):
        return self.last(self.words(tokens).mean(1))


def texts(wrong=(7,)):
    """Texts whose class is told by some of their words, with a few wrong labels."""
    chance = torch.Generator().manual_seed(0)
    y = torch.arange(60) % CLASSES
    x = torch.randint(15, WORDS, (60, 12), generator=chance)
    x[:, :3] = 5 * y[:, None] + torch.randint(0, 5, (60, 3), generator=chance)
    y[list(wrong)] = (y[list(wrong)] + 1) % CLASSES
    return x, y


def analyze(model, data, out, **options):
    return lw.analyze(lw.Network(model, lw.all_outputs), data, out=out, **options)


def test_words_enter_the_ranking_and_manifest_and_report_say_so(tmp_path):
    model, (x, y) = Reader(), texts()
    run, plain = analyze(model, (x, y), tmp_path / "a"), analyze(model, (x, y), tmp_path / "b", words=False)
    found = lw.label_suspicion(lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, y), centered=True))
    assert run.manifest["wrong_labels"]["words_weight"] == round(found.words_weight, 3) > 0
    assert "words_weight" not in plain.manifest["wrong_labels"]
    assert int(run.table["label_suspicion"].argmax()) == 7
    torch.testing.assert_close(
        torch.tensor(run.table["label_suspicion"].to_numpy()), found.suspicion, check_dtype=False
    )
    others = ["chance_wrong", "suggested_label", "status"]
    pd.testing.assert_frame_equal(run.table[others], plain.table[others])
    for key in ("errors", "precision", "distinct", "reason"):
        assert run.manifest["wrong_labels"][key] == plain.manifest["wrong_labels"][key]
    said = "ranked also by the words that texts share"
    pages = [(folder / "report.html").read_text() for folder in (tmp_path / "a", tmp_path / "b")]
    assert [said in page for page in pages] == [True, False]


def test_a_run_with_words_is_another_run(tmp_path):
    model, data = Reader(), texts()
    analyze(model, data, tmp_path / "a", words=False)
    with pytest.raises(ValueError, match="words"):
        analyze(model, data, tmp_path / "a")


def test_a_run_that_died_after_the_words_goes_on_with_them(tmp_path, monkeypatch):
    model, data = Reader(), texts()
    whole = analyze(model, data, tmp_path / "whole")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stages, "write_tables", die)
        analyze(model, data, tmp_path / "died")
    monkeypatch.setattr(stages, "resemblance_of_texts", die)
    resumed = analyze(model, data, tmp_path / "died")
    pd.testing.assert_frame_equal(resumed.table, whole.table)
    assert resumed.manifest["wrong_labels"] == whole.manifest["wrong_labels"]


@pytest.mark.parametrize("kind", ["images", "table", "values of texts"])
def test_other_inputs_and_targets_have_no_words(tmp_path, monkeypatch, kind):
    def refuse(*_):
        raise AssertionError("Words were read.")

    monkeypatch.setattr(stages, "resemblance_of_texts", refuse)
    x, y = texts()
    if kind == "images":
        x, model = torch.rand(60, 1, 4, 4), nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))
    elif kind == "table":
        x, model = x.float(), nn.Linear(12, CLASSES)
    else:
        y, model = torch.rand(60, 1), nn.Sequential(Reader(), nn.Linear(CLASSES, 1))
    with_words, without = (
        analyze(model, (x, y), tmp_path / str(words), words=words) for words in (True, False)
    )
    pd.testing.assert_frame_equal(with_words.table, without.table)
    assert "words" not in with_words.manifest["stages"]
    assert with_words.manifest.get("wrong_labels") == without.manifest.get("wrong_labels")
    assert "words_weight" not in (with_words.manifest.get("wrong_labels") or {})
