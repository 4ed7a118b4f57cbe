"""Passages from the command to the file and to an answer: against a backward pass for each token, in float64."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest
import torch

import likewise as lw
from likewise.cli.app import exit_code
from likewise.report.payload import pack_payload, read_run
from likewise.runs.neighbors import passage_count
from texts import (
    WrongSecondDerivative,
    byte_tokenizer,
    contributions_one_by_one,
    facts,
    gpt2_config,
    save_language_model,
)

transformers = pytest.importorskip("transformers")

N, LONGEST = 40, 48
QUESTION = "the capital of spain is Madrid."


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A model, texts, a run and an index of them, all by commands."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("passages")
    texts = facts(N)
    texts[3] = " ".join(texts[3:9])  # longer than the model reads
    texts[7] = f"the {texts[3]}"  # so that it is a neighbor
    texts[4] = "a\x07red\r\ncat " + texts[4]
    tokenizer = byte_tokenizer(texts, most=LONGEST)
    model = save_language_model(root / "model", texts, tokenizer)
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [str(root / "model"), str(root / "texts.jsonl"), "--text", "text", "--quiet"]
    assert exit_code(["analyze", *words, "--out", str(root / "run"), "--passages", str(N)]) == 0
    assert exit_code(["index", *words, "--out", str(root / "index")]) == 0
    return root, texts, model, tokenizer


def by_characters(text, tokenizer, contributions):
    """Return contributions by the characters that a tokenizer says they are of, summed over tokens that share them."""
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"][: len(contributions)]
    found = {}
    for (start, end), value in zip(spans, contributions, strict=True):
        if start < end and value:
            found[start, end] = found.get((start, end), 0) + value
    return found


def test_the_table_of_a_run_is_that_of_a_backward_pass_for_each_token(project):
    root, texts, model, tokenizer = project
    run = lw.Analysis(root / "run")
    table = run.passages
    assert len(table) == 3 * N and run.manifest["passages"] == {
        "samples": N,
        "neighbors": 3,
        "pairs": 3 * N,
        "problem": "",
    }
    assert (table["neighbor"].to_numpy().reshape(N, 3) == run.neighbor_matrix[table["sample"][::3], :3]).all()
    looked_at = 0
    for row in table.iloc[::5].itertuples():
        text = texts[row.neighbor]
        expected = contributions_one_by_one(model, tokenizer, text, texts[row.sample], LONGEST)
        assert abs(row.similarity - sum(expected)) < 1e-9
        assert abs(sum(row.contributions) + row.unshown - row.similarity) < 1e-9
        if len(text) > 200 or "\x07" in text:
            continue
        found = dict(zip(zip(row.starts, row.ends, strict=True), row.contributions, strict=True))
        named = by_characters(text, tokenizer, expected)
        assert row.text == text and found.keys() == named.keys()
        assert max(abs(found[span] - named[span]) for span in named) < 1e-9
        looked_at += 1
    assert looked_at > 5


def test_of_a_truncated_text_and_one_with_control_characters_marks_lie_where_they_are_shown(project):
    root, *_ = project
    table = lw.Analysis(root / "run").passages
    cut = table[table["neighbor"] == 3]
    odd = table[table["neighbor"] == 4]
    assert len(cut) and len(odd) and odd.iloc[0]["text"].startswith("a⟨U+0007⟩red\ncat ")
    row = odd.iloc[0]
    pieces = [row["text"][a:b] for a, b in zip(row["starts"], row["ends"], strict=True)]
    assert any("⟨U+0007⟩" in piece for piece in pieces) and not any("⟨U+00" == piece for piece in pieces)
    for row in cut.itertuples():
        assert max(row.ends) < len(row.text)  # what the model did not read is not marked


def test_most_novel_texts_come_first_and_a_few_of_many_are_enough(project, tmp_path):
    root, *_ = project
    words = [str(root / "model"), str(root / "texts.jsonl"), "--text", "text", "--quiet"]
    assert exit_code(["analyze", *words, "--out", str(tmp_path / "few"), "--neighbors", "2"]) == 0
    run = lw.Analysis(tmp_path / "few")
    order = run.table["novelty"].sort_values(ascending=False, kind="stable").index
    assert run.passages["sample"].tolist() == np.repeat(order[:8], 2).tolist()
    assert run.manifest["passages"]["neighbors"] == 2
    assert exit_code(["analyze", *words, "--out", str(tmp_path / "none"), "--passages", "0"]) == 0
    assert lw.Analysis(tmp_path / "none").passages is None
    assert [passage_count(n) for n in (5, 40, 3000, 10**6)] == [5, 8, 15, 32]


def test_a_table_that_was_lost_is_computed_again_and_the_report_needs_no_model(project, tmp_path):
    root, *_ = project
    words = [str(root / "model"), str(root / "texts.jsonl"), "--text", "text", "--quiet"]
    out = tmp_path / "run"
    assert exit_code(["analyze", *words, "--out", str(out), "--passages", "2"]) == 0
    before = pd.read_parquet(out / "passages.parquet")
    (out / "passages.parquet").unlink()
    assert exit_code(["verify", str(out)]) == 1
    assert exit_code(["analyze", *words, "--out", str(out), "--passages", "2"]) == 0
    pd.testing.assert_frame_equal(pd.read_parquet(out / "passages.parquet"), before)
    assert exit_code(["report", str(out)]) == 0
    assert "2 most novel texts" in (out / "report.html").read_text(encoding="utf-8")


def test_an_answer_shows_the_passage_that_it_rests_on(project, capsys, tmp_path, monkeypatch):
    root, texts, model, tokenizer = project
    capsys.readouterr()
    assert exit_code(["ask", str(root / "index"), QUESTION, "-k", "4", "--json", "--quiet"]) == 0
    neighbors = json.loads(capsys.readouterr().out)["answers"][0]["neighbors"]
    assert ["passage" in near for near in neighbors] == [True, True, True, False]
    for near in neighbors[:3]:
        expected = contributions_one_by_one(model, tokenizer, texts[near["row"]], QUESTION, LONGEST)
        told = near["passage"]
        assert abs(told["similarity"] - sum(expected)) < 1e-9
        inside = [m["contribution"] for m in told["marks"] if told["start"] <= m["start"] < told["end"]]
        assert told["share"] == pytest.approx(sum(inside) / told["similarity"])
        assert told["text"][told["start"] : told["end"]] == told["passage"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    assert exit_code(["ask", str(root / "index"), QUESTION, "--open", "--passages", "1"]) == 0
    shown = capsys.readouterr().out
    passage = neighbors[0]["passage"]["passage"]
    assert "rests on" in shown and " ".join(passage.split())[:20] in " ".join(shown.split())
    page = (tmp_path / "answers.html").read_text(encoding="utf-8")
    assert page.count('<figure class="passages">') == 1 and "Underlined" in page
    assert "<b>ran</b>" not in page  # text stays text


def test_passages_that_cannot_be_had_are_a_note_or_an_error_if_they_were_asked_for(project, capsys, tmp_path):
    root, *_ = project
    texts = root / "texts.jsonl"
    moved = texts.rename(tmp_path / "moved.jsonl")
    try:
        assert exit_code(["ask", str(root / "index"), QUESTION]) == 0
        told = capsys.readouterr()
        assert "passages are not shown" in told.err and "--data" in told.err and "rests on" not in told.out
        assert exit_code(["ask", str(root / "index"), QUESTION, "--passages", "2"]) == 2
        assert exit_code(["ask", str(root / "index"), QUESTION, "--data", str(moved)]) == 0
        assert "rests on" in capsys.readouterr().out
        other = tmp_path / "other.jsonl"
        other.write_text("\n".join([*moved.read_text().splitlines()[1:], '{"text": "a cat"}']) + "\n")
        capsys.readouterr()
        assert exit_code(["ask", str(root / "index"), QUESTION, "--passages", "2", "--data", str(other)]) == 2
        assert "is not the one that the index was built from" in capsys.readouterr().err
    finally:
        moved.rename(texts)


def test_passages_of_an_index_in_python_equal_those_of_pairs_alone(project, tmp_path):
    _, texts, model, tokenizer = project
    rows = [{"input_ids": torch.tensor(tokenizer(text)["input_ids"][:LONGEST])} for text in texts]
    data = lw.batches(rows, pad_id=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    readout = lw.sequence_log_likelihood()
    first, second = data.take(range(25)), data.take(range(25, N))
    index = lw.build_index(model, first, tmp_path / "index", readout=readout)
    index.add(second)
    index = lw.Index(tmp_path / "index", model=model, readout=readout)  # as another process opens it
    with pytest.raises(ValueError, match=r"attach\(data\)"):
        index.passages(data.take([0]), [[1]])
    index.attach([first, second])
    found = index.passages(data.take([0, 1]), [[30, 2, 39], [24, 25, 1]])
    for i, chosen in ((0, (30, 2, 39)), (1, (24, 25, 1))):
        for j, row in enumerate(chosen):
            expected = contributions_one_by_one(model, tokenizer, texts[row], texts[i], LONGEST)
            values = found.contributions[i, j].tolist()
            assert max(abs(a - b) for a, b in zip(values, expected, strict=False)) < 1e-9
            assert not any(values[len(expected) :])
            assert abs(found.similarities[i, j] - sum(expected)) < 1e-9
    with pytest.raises(ValueError, match="shape"):
        index.passages(data.take([0, 1]), [[1, 2]])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_classifier_of_texts_has_no_passages(project, tmp_path, capsys):
    root, texts, _, tokenizer = project
    folder = tmp_path / "classifier"
    transformers.GPT2ForSequenceClassification(gpt2_config(tokenizer, num_labels=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = [str(folder), str(root / "texts.jsonl"), "--text", "text", "--quiet"]
    assert exit_code(["analyze", *words, "--out", str(tmp_path / "run")]) == 0
    assert lw.Analysis(tmp_path / "run").passages is None
    assert "passages" not in lw.Analysis(tmp_path / "run").manifest["options"]
    assert exit_code(["index", *words, "--out", str(tmp_path / "index")]) == 0
    capsys.readouterr()
    assert exit_code(["ask", str(tmp_path / "index"), texts[0]]) == 0
    assert "passages" not in capsys.readouterr().err
    assert exit_code(["ask", str(tmp_path / "index"), texts[0], "--passages", "1"]) == 2
    assert "no sum over tokens" in capsys.readouterr().err


class Missing(torch.autograd.Function):
    """The identity, which torch is told not to differentiate twice."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient.clone()


class Once(torch.nn.Module):
    def __init__(self, identity):
        super().__init__()
        self.embed, self.out, self.identity = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7), identity

    def forward(self, input_ids):
        return self.identity.apply(self.out(self.embed(input_ids)))


@pytest.mark.parametrize(
    ("identity", "problem"),
    [(WrongSecondDerivative, "sum to something else"), (Missing, "cannot be differentiated twice")],
)
def test_a_run_of_a_model_that_cannot_be_differentiated_twice_is_finished_and_says_so(
    identity, problem, tmp_path
):
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (20, 5))
    texts = ["".join(map(str, row)) for row in tokens.tolist()]
    run = lw.analyze(
        Once(identity).double(),
        tokens,
        out=tmp_path / "run",
        readout=lw.sequence_log_likelihood(),
        show=texts,
        token_text=lambda i: (texts[i], [(j, j + 1) for j in range(5)]),
    )
    assert len(run.passages) == 0 and run.manifest["passages"]["pairs"] == 0
    assert problem in run.manifest["passages"]["problem"]
    assert "Not marked" in (run.folder / "report.html").read_text(encoding="utf-8")
    whole = gzip.decompress(pack_payload(read_run(run.folder)))
    header = json.loads(whole[4 : 4 + int.from_bytes(whole[:4], "little")])
    assert header["passages"] is None  # no legend of marks on 0 texts


def test_a_run_whose_passages_take_too_much_memory_is_finished_and_says_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("likewise.gram.passages._derivatives", refuse)
    torch.manual_seed(0)
    run = lw.analyze(
        torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)),
        torch.randint(0, 7, (20, 5)),
        out=tmp_path / "run",
        readout=lw.sequence_log_likelihood(),
        token_text=lambda i: ("abcde", [(j, j + 1) for j in range(5)]),
    )
    problem = run.manifest["passages"]["problem"]
    assert "memory ran out" in problem and "twice" not in problem


def test_an_answer_by_a_model_that_cannot_be_differentiated_twice_comes_without_passages(
    project, capsys, monkeypatch
):
    root, *_ = project

    def refuse(*_):
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable"
        )

    monkeypatch.setattr("likewise.gram.passages._derivatives", refuse)
    capsys.readouterr()
    assert exit_code(["ask", str(root / "index"), QUESTION]) == 0
    told = capsys.readouterr()
    assert "passages are not shown: The model cannot be differentiated twice" in told.err
    assert "similarity" in told.out and "rests on" not in told.out
    assert exit_code(["ask", str(root / "index"), QUESTION, "--passages", "2"]) != 0


@pytest.mark.filterwarnings("ignore::likewise.ReadoutNotice")
def test_texts_without_known_places_are_left_out_and_counted(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)).double()
    tokens = torch.randint(0, 7, (20, 5))
    run = lw.analyze(
        model,
        tokens,
        out=tmp_path / "run",
        readout=lw.sequence_log_likelihood(),
        token_text=lambda i: ("abcde", [(j, j + 1) for j in range(5)] if i % 2 else None),
        passages=20,
    )
    assert (run.passages["neighbor"] % 2 == 1).all() and 0 < len(run.passages) < 60
    assert f"of {60 - len(run.passages)} neighbors" in run.manifest["passages"]["problem"]
    with pytest.raises(ValueError, match="token_text"):
        lw.analyze(model, tokens, out=tmp_path / "other", passages=3)


def test_a_run_with_another_number_of_passages_is_refused_by_that_name(tmp_path):
    """An option that only one of the two runs has was left out of the message."""
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)).double()
    given = {"out": tmp_path / "run", "readout": lw.sequence_log_likelihood()}
    given["token_text"] = lambda i: ("abcde", [(j, j + 1) for j in range(5)])
    tokens = torch.arange(100).view(20, 5) % 7
    lw.analyze(model, tokens, passages=2, **given)
    with pytest.raises(ValueError, match=r"other options \(passages: there 2, here None\)"):
        lw.analyze(model, tokens, passages=0, **given)
    with pytest.raises(ValueError, match=r"other options \(passages: there 2, here 3\)"):
        lw.analyze(model, tokens, passages=3, **given)


@pytest.mark.parametrize(
    "rows", [[[0, 1], [2]], [[0.5], [1.0]], torch.zeros(2, 0).long(), [[0]], [0, 1]], ids=str
)
def test_rows_that_are_not_numbers_of_each_input_are_refused(rows, tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
    tokens = torch.arange(100).view(20, 5) % 7
    index = lw.build_index(model, tokens, tmp_path / "index", readout=lw.sequence_log_likelihood())
    index.attach(tokens)
    with pytest.raises(ValueError, match=r"rows must be whole numbers of shape \(2, k\), .* found"):
        index.passages(tokens[:2], rows)


def test_places_of_other_tokens_than_the_model_reads_are_refused_with_the_text(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)).double()
    with pytest.raises(ValueError, match=r"token_text\(\d+\) does not fit: 6 tokens .* contributions of 5"):
        lw.analyze(
            model,
            torch.arange(100).view(20, 5) % 7,
            out=tmp_path / "run",
            readout=lw.sequence_log_likelihood(),
            token_text=lambda i: ("abcdef", [(j, j + 1) for j in range(6)]),
        )


@pytest.mark.parametrize("n", [120, 400])  # up to 128 texts the mean gradient is of all
def test_neighbors_of_texts_with_passages_are_exact_though_the_run_compares_sketches(n, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(30, 6), torch.nn.Linear(6, 30)).double()
    tokens = torch.randint(0, 30, (n, 9))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = lw.analyze(
        model,
        tokens,
        out=tmp_path / "run",
        readout=lw.sequence_log_likelihood(),
        sketch=160,
        token_text=lambda i: ("abcdefghi", [(j, j + 1) for j in range(9)]),
        passages=20,
    )
    gram = lw.GramMatrix(lw.Network(model, lw.sequence_log_likelihood()), tokens, centered=True)
    exact = gram.dense().numpy()
    np.fill_diagonal(exact, -np.inf)
    table = pd.read_parquet(tmp_path / "run" / "neighbors.parquet")
    texts = run.passages["sample"].unique()
    assert len(texts) == 20 and set(table.loc[table["exact"], "sample"]) == set(texts)
    tolerance = 1e-5 if n <= 128 else 0.03
    of_sketches, again = [], []
    for i in range(n):
        rows = table[table["sample"] == i]
        truth = set(np.argsort(-exact[i])[:3])
        mine = again if i in texts else of_sketches
        mine.append(len(truth & set(rows["neighbor"][:3])) / 3)
        if i in texts:
            assert abs(rows["similarity"] - exact[i, rows["neighbor"]]).max() < tolerance
            assert rows["similarity"].is_monotonic_decreasing and i not in set(rows["neighbor"])
            marked = run.passages[run.passages["sample"] == i]["neighbor"]
            assert marked.tolist() == rows["neighbor"][:3].tolist()
    assert np.mean(of_sketches) < 0.6 and np.mean(again) > (0.9 if n <= 128 else 0.8)
    told = " ".join(run.manifest["approximations"])
    assert "Neighbors of the 20 texts with marked passages are by exact gradients" in told
    assert ("leaves similarities off by" in told) == (n > 128)
    assert "20 texts with marked passages are by exact gradients" in (
        tmp_path / "run" / "report.html"
    ).read_text(encoding="utf-8")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
