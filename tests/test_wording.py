"""One of a kind is written in the singular, by one helper: messages of commands, reports and reprs."""

import ast
import re
from pathlib import Path

import pytest
import torch

import likewise as lw
from likewise.wording import agreeing, counted

SOURCE = Path(__file__).parent.parent / "src" / "likewise"
NOUNS = "sample|label|decision|row|text|neighbor|pair|parameter|input|image|update|file|prediction|suspect|minute|time"
SHOWN = sorted(path for folder in ("cli", "report", "runs") for path in (SOURCE / folder).rglob("*.py"))


def test_a_number_agrees_with_its_noun_and_verb():
    assert [counted(n, "label") for n in (0, 1, 2, 1200)] == [
        "0 labels",
        "1 label",
        "2 labels",
        "1,200 labels",
    ]
    assert counted(2, "batch", "batches") == "2 batches" and counted(1, "batch", "batches") == "1 batch"
    assert [agreeing(n, "is", "are") for n in (1, 2)] == ["is", "are"]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(SOURCE)))
def test_counts_that_begin_a_message_have_no_fixed_plural(path):
    """As in f"{n} labels are wrong"; in "3 of {n} labels", n is that of a whole data set."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value, after in zip([None, *node.values], node.values, node.values[1:], strict=False):
            text = after.value if isinstance(after, ast.Constant) else ""
            start = before.value if isinstance(before, ast.Constant) else ""
            plural = re.match(rf" ({NOUNS})s\b", text)
            whole = start.rstrip().lower().endswith(("of", "for", "×", "and"))
            assert not (isinstance(value, ast.FormattedValue) and plural and not whole), ast.unparse(node)


def test_results_of_one_sample_say_so():
    x, y = torch.randn(1, 3), torch.zeros(1, dtype=torch.long)
    assert repr(lw.batches(x)).startswith("Batches(1 sample in 1 batch of")
    watch = lw.Watch(1)
    watch.update(torch.randn(1, 2), y, torch.arange(1))
    assert repr(watch) == "Watch(1 sample; 1 update)"
    with pytest.raises(ValueError, match="1 label is NaN"):
        lw.label_suspicion(
            lw.GramMatrix(torch.nn.Linear(3, 2), torch.randn(4, 3)), torch.tensor([0, 1, 0, torch.nan])
        )
