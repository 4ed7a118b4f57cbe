"""Both engines on models of every kind, against plain autograd in float64."""

import warnings
from pathlib import Path

import pytest
import torch

import likewise as lw
import models
import oracle
from likewise.engines import traced

TABLE = Path(__file__).parents[2] / "docs" / "correctness.md"
BEGIN, END = "<!-- layers: written by tests/engines/test_traced.py -->", "<!-- layers: end -->"
# Where operations cannot be traced the reference takes over, with a warning: these and no others.
BY_REFERENCE: set[str] = set()


def errors(name, engine):
    """The largest error of rows, own kernels, sums and readings, relative to what they should be."""
    model, x = models.of(name)
    expected = oracle.jacobians(model, x)
    n, d, p = expected.shape
    gram = lw.GramMatrix(lw.Network(model), lw.batches(x, 3), engine=engine)
    samples, generator = gram.data.samples(range(n)), torch.Generator().manual_seed(0)
    weights = torch.randn(n, d, 3, dtype=torch.float64, generator=generator)
    directions = torch.randn(2, p, dtype=torch.float64, generator=generator)
    sums = torch.einsum("ndc,ndp->cp", weights, expected)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients = gram.engine
        with gram.net.evaluation_mode():
            pairs = gradients.features(samples, 0)
            found = {
                "rows": (gradients.rows(samples, 0).rows, expected),
                "own": (gradients.self_kernel(samples).matrix, expected @ expected.mT),
                "pull": (gradients.vjp(samples, weights, 0).total, sums),
                "push": (gradients.jvp(samples, directions, 0).outputs, expected @ directions.T),
                "pairs": (pairs.blocks(pairs), torch.einsum("ndp,mep->nmde", expected, expected)),
            }
    fell_back = any("reference engine" in str(w.message) or "some batches" in str(w.message) for w in caught)
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in found.values())
    return worst, fell_back


@pytest.mark.parametrize("name", models.CASES)
def test_layers_are_exact(name):
    worst, fell_back = errors(name, "layers")
    assert worst < 1e-9
    assert fell_back == (name in BY_REFERENCE)


@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot")
def test_the_reference_is_exact(name):
    assert errors(name, "autograd")[0] < 1e-9


@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.filterwarnings("ignore:.* reference engine", "ignore:torch.func.vmap cannot")
def test_similarities_of_one_output_are_exact(name):
    def summed(outputs, labels):  # its gradient is one number for all: a tensor that lies in one place
        return outputs.flatten(1).sum(1, keepdim=True)

    model, x = models.of(name)
    rows = oracle.jacobians(model, x, summed)[:, 0]
    rows = rows / rows.norm(dim=1, keepdim=True)
    gram = lw.GramMatrix(lw.Network(model, summed), lw.batches(x, 3))
    torch.testing.assert_close(gram.dense(), rows @ rows.T, rtol=0, atol=1e-9)
    torch.testing.assert_close(lw.soft_neighbors(gram), (rows @ rows.T).sum(1), rtol=0, atol=1e-9)


def test_a_single_sample_is_traced_too(recwarn):
    model, x = models.of("Linear on tokens")
    assert lw.similarity(model, x[:1]).shape == (1, 1)
    assert not [str(w.message) for w in recwarn]


def test_the_public_table_names_every_model():
    assert len(models.CASES) >= 45
    assert TABLE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0] == table()


def table():
    rows = [
        f"| {name} | {'exact' if name not in BY_REFERENCE else 'by the reference, with a warning'} | exact |"
        for name in models.CASES
    ]
    return "\n".join(
        [
            "",
            f"{len(models.CASES)} small models in float64: rows, K(x, x), sums and readings of both",
            "engines against one plain backward per sample and output, to a relative error under 1e-9",
            "(`tests/engines/test_traced.py`, part of `make test`). This table is compared with that test",
            "and written by `PYTHONPATH=tests python tests/engines/test_traced.py`.",
            "",
            "| model | engine `layers` (the default) | engine `autograd` |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    before, rest = TABLE.read_text(encoding="utf-8").split(BEGIN)
    TABLE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")


def test_ranks_that_share_a_pass_leave_no_checks_to_the_next(monkeypatch):
    engine = lw.GramMatrix(torch.nn.Linear(3, 1), torch.randn(4, 3)).engine
    monkeypatch.setattr(engine, "_device", torch.device("cuda"))
    engine._finite_checks._pending.append((torch.tensor([7]), torch.tensor([False]), torch.float32))
    with engine._net.evaluation_mode():
        engine.defer_checks()
        monkeypatch.setattr(traced, "world_size", lambda: 2)
        with pytest.raises(ValueError, match=r"not finite, the first with ids \[7\]"):
            engine.defer_checks()
