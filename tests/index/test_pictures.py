"""What an index keeps to show of its samples, and how a page shows it."""

import pandas as pd
import torch

import likewise as lw
from likewise.index.explanation import Answer, Explanation, Neighbor, Sample, write_page
from likewise.index.pictures import PictureMaker
from likewise.marked_text import MarkedText


def test_columns_of_a_table_are_read_by_position_whatever_their_index(tmp_path):
    texts = pd.Series(["first", "second", "third"], index=[2, 0, 1])
    net, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    index = lw.build_index(net, x, tmp_path / "index", show=texts)
    assert index.sample(0).picture.content == b"first"
    lw.analyze(net, x, out=tmp_path / "run", sketch=64, show=texts, names=texts)
    sample = lw.Index(tmp_path / "run" / "index").sample(0)
    assert (sample.name, sample.picture.content) == ("first", b"first")


def test_tables_can_be_shown():
    """A DataFrame has a shape and no type of its own: to look for the range of images ended in an AttributeError."""
    tables = [pd.DataFrame(torch.rand(8, 8).numpy()) for _ in range(3)]
    maker = PictureMaker(lw.batches(torch.randn(3, 2)), tables, None)
    assert maker.available and all(maker.picture(i) is not None for i in range(3))


def test_a_page_says_no_share_of_a_similarity_that_is_zero_or_negative(tmp_path):
    for contributions in ((0.5, -0.5), (0.25, -0.5)):
        passage = MarkedText("a b", (0, 2), (1, 3), contributions, (0, 1), 0.0)
        near = Neighbor(Sample(4, "", None, "", None), 0.1, 0.0, passage)
        told = Explanation.without_labels((near,), 0.5, 50.0, 0.01, exact=False)
        write_page(tmp_path / "page.html", "index", [Answer("new", None, told)])
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "% of the similarity" not in page and page.count("--strength: 1.000") == 1
