"""Models, tokenizers and adapters from folders that save_pretrained wrote, by words and by Python."""

import dataclasses
import json
import socket

import pandas as pd
import pytest
import torch

import likewise as lw
from likewise import loading
from likewise.cli.app import exit_code
from texts import gpt2_config, sentences, word_tokenizer

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A classifier, a causal model, an adapter of it, and texts with labels."""
    from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("pretrained")
    tokenizer = word_tokenizer()
    names = {0: "red", 1: "animal", 2: "other"}
    config = gpt2_config(
        tokenizer, num_labels=3, id2label=names, label2id={name: i for i, name in names.items()}
    )
    GPT2ForSequenceClassification(config).save_pretrained(root / "classifier")
    tokenizer.save_pretrained(root / "classifier")
    model = GPT2LMHeadModel(gpt2_config(tokenizer))
    model.save_pretrained(root / "causal")
    tokenizer.save_pretrained(root / "causal")
    adapted = peft.get_peft_model(
        GPT2LMHeadModel.from_pretrained(root / "causal"),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2, init_lora_weights=False),
    )
    adapted.save_pretrained(root / "adapter")
    texts = sentences(24)
    labels = [("red", "animal", "other")[i % 3] for i in range(24)]
    rows = [{"text": a, "second": b, "label": c} for a, b, c in zip(texts, texts[::-1], labels, strict=True)]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return root


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def single_rows(folder, tokenizer_of, columns):
    """Return one-text batches by the tokenizer alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / tokenizer_of)
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    return [tokenizer(*[[row[c]] for c in columns], return_tensors="pt") for row in rows]


def cosines_of(model, batches, outputs):
    """Return the mean cosine of whitened gradients by a loop: for one output, cosines."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for batch in batches:
        value = outputs(model, batch)
        parts = torch.autograd.grad(value, parameters, allow_unused=True)
        rows.append(torch.cat([p.flatten() for p in parts if p is not None]).double())
    unit = torch.nn.functional.normalize(torch.stack(rows), dim=1)
    return unit @ unit.T


def likelihood(model, batch):
    logits, tokens = model(**batch).logits.log_softmax(-1), batch["input_ids"]
    return logits[0, :-1].gather(1, tokens[0, 1:, None]).mean()


@pytest.mark.parametrize("kind", ["causal", "adapter"])
def test_texts_by_a_causal_model_of_a_folder_equal_a_loop_over_single_texts(folders, offline, kind):
    folder = loading.PretrainedFolder(str(folders / kind))
    model = folder.load_model()
    read = loading.data(
        str(folders / "data.jsonl"), text_column="text", tokenization=folder.tokenization(), label=None
    )
    net = lw.Network(model, lw.sequence_log_likelihood())
    assert all("lora_" in name for name in net.names) == (kind == "adapter")
    found = lw.similarity(net, lw.batches(read.dataset, 5))
    batches = single_rows(folders, "causal", ["text"])
    keep = [{k: b[k] for k in ("input_ids", "attention_mask")} for b in batches]
    assert (found - cosines_of(model, keep, likelihood)).abs().max() < 1e-5


def test_only_the_completion_of_a_prompt_counts(folders, offline):
    folder = loading.PretrainedFolder(str(folders / "causal"))
    model, tokenization = folder.load_model(), folder.tokenization()
    read = loading.data(
        str(folders / "data.jsonl"), text_column="text,second", tokenization=tokenization, limit=6
    )

    def completion(model, pair):
        first, second = pair
        tokens = torch.cat([first["input_ids"], second["input_ids"]], 1)
        logits = model(tokens).logits.log_softmax(-1)
        start = first["input_ids"].shape[1]
        return logits[0, start - 1 : -1].gather(1, tokens[0, start:, None]).mean()

    pairs = list(zip(*(single_rows(folders, "causal", [c]) for c in ("text", "second")), strict=True))[:6]
    found = lw.similarity(lw.Network(model, lw.sequence_log_likelihood()), lw.batches(read.dataset))
    assert (found - cosines_of(model, pairs, completion)).abs().max() < 1e-5


@pytest.mark.parametrize("max_length", [None, 5])
@pytest.mark.parametrize("column", ["text", "text,second"])
def test_tokens_lie_in_the_text_that_counts_and_those_of_a_prompt_nowhere(
    folders, offline, column, max_length
):
    folder = loading.PretrainedFolder(str(folders / "causal"))
    tokenization = folder.tokenization(max_length)
    options = {"text_column": column, "limit": 8}
    read = loading.data(str(folders / "data.jsonl"), tokenization=tokenization, **options)
    rows = [json.loads(line) for line in (folders / "data.jsonl").read_text().splitlines()][:8]
    for i, row in enumerate(rows):
        text, spans = read.token_text(i)
        tokens = read.dataset[i]["input_ids"].tolist()
        assert text == row["second" if "," in column else "text"] and len(spans) == len(tokens)
        counted = [token for token, (start, end) in zip(tokens, spans, strict=True) if start < end]
        words = text.split()[:max_length]
        assert [text[a:b] for a, b in spans if a < b] == words
        assert tokenization.tokenizer.convert_ids_to_tokens(counted) == words
        assert counted == tokens[len(tokens) - len(counted) :]  # the prompt comes first, and has no place
    late = loading.data(
        str(folders / "data.jsonl"), tokenization=dataclasses.replace(tokenization, on_demand=True), **options
    )
    for i in (5, 0, 5):
        one, other = late.dataset[i], read.dataset[i]
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert late.token_text(i) == read.token_text(i)
    assert len(late.dataset) == 8
    with pytest.raises(IndexError):
        late.dataset[8]


def test_commands_read_a_folder_its_tokenizer_and_its_order_of_classes(folders, offline, tmp_path, capsys):
    words = [str(folders / "classifier"), str(folders / "data.jsonl"), "--text", "text", "--label", "label"]
    assert exit_code(["analyze", *words, "--out", str(tmp_path / "run"), "--neighbors", "3"]) == 0
    table = pd.read_parquet(tmp_path / "run" / "samples.parquet")
    assert len(table) == 24 and table["label"].tolist()[:3] == [0, 1, 2]  # of the model, not of the alphabet
    assert exit_code(["index", *words, "--out", str(tmp_path / "index"), "--width", "64"]) == 0
    capsys.readouterr()
    text = json.loads((folders / "data.jsonl").read_text().splitlines()[4])["text"]
    assert exit_code(["ask", str(tmp_path / "index"), text, "--json", "--quiet"]) == 0
    answer = json.loads(capsys.readouterr().out)["answers"][0]
    assert answer["neighbors"][0]["row"] == 4 and answer["neighbors"][0]["label_name"] == "animal"


def test_loading_a_folder_draws_no_bars_and_leaves_the_setting_as_it_was(folders, offline, capfd):
    from transformers.utils import logging

    for enabled in (True, False):
        (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()
        loading.model(str(folders / "classifier"))
        assert logging.is_progress_bar_enabled() == enabled
    logging.enable_progress_bar()
    assert "%" not in capfd.readouterr().err


def test_long_texts_are_cut_and_counted(folders, offline, tmp_path, capsys):
    words = [str(folders / "causal"), str(folders / "data.jsonl"), "--text", "text", "--max-length", "5"]
    lengths = [b["input_ids"].shape[1] for b in single_rows(folders, "causal", ["text"])]
    long = sum(length > 5 for length in lengths)
    assert exit_code(["index", *words, "--out", str(tmp_path / "index"), "--width", "64"]) == 0
    said = capsys.readouterr().err
    assert f"{long} of 24 texts are longer than 5 tokens" in said and 0 < long < 24
    folder = loading.PretrainedFolder(str(folders / "causal"))
    tokens = folder.tokenization(5).tokenize([sentences(24)])
    assert max(len(tokens[i]["input_ids"]) for i in range(24)) == 5 and tokens.truncated == long
    prompted = folder.tokenization(5).tokenize([["the cat sat on"], ["red mat and tree"]])[0]
    assert (
        prompted["labels"].tolist()[1:] == prompted["input_ids"].tolist()[1:]
        and prompted["labels"][0] == -100
    )
    with pytest.raises(ValueError, match="reads 64 tokens"):
        folder.tokenization(65)


@pytest.mark.parametrize("kind, options", [("causal", []), ("classifier", ["--label", "label"])])
@pytest.mark.parametrize("text", ["", "  "])
def test_a_text_without_tokens_is_named(folders, tmp_path, capsys, kind, options, text):
    rows = [json.loads(line) for line in (folders / "data.jsonl").read_text().splitlines()]
    rows[5]["text"] = text
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    given = [
        "analyze",
        str(folders / kind),
        str(path),
        "--text",
        "text",
        *options,
        "--out",
        str(tmp_path / "run"),
    ]
    assert exit_code(given) == 2
    assert f"Text 5 (from 0) is {text!r}, and the tokenizer returns no tokens" in " ".join(
        capsys.readouterr().err.split("\n")
    )


def test_pairs_of_sentences_are_tokenized_together(folders, offline):
    folder = loading.PretrainedFolder(str(folders / "classifier"))
    read = loading.data(
        str(folders / "data.jsonl"),
        text_column="text, second",
        label="label",
        tokenization=folder.tokenization(),
    )
    expected = single_rows(folders, "classifier", ["text", "second"])
    batch = lw.batches(read.dataset, labels=read.labels)[0]
    for i, row in enumerate(expected):
        n = row["input_ids"].shape[1]
        assert torch.equal(batch.inputs["input_ids"][i, :n], row["input_ids"][0])
        assert batch.inputs["attention_mask"][i].sum() == n
    assert set(read.show(0)) == {"label", "text", "second"}


def test_what_is_missing_is_named(folders, offline, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders / "causal")
    bare = tmp_path / "bare"
    model.save_pretrained(bare)
    with pytest.raises(ValueError, match="no tokenizer"):
        loading.PretrainedFolder(str(bare)).tokenization()
    torch.save(model.state_dict(), bare / "pytorch_model.bin")
    (bare / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--allow-pickle"):
        loading.PretrainedFolder(str(bare)).load_model()
    again = loading.PretrainedFolder(str(bare), allow_pickle=True).load_model()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2Model"]}))
    with pytest.raises(ValueError, match="--task causal-lm or --task sequence-classification"):
        loading.PretrainedFolder(str(bare))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in (folders / "adapter").iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    said = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**said, "base_model_name_or_path": "a/hub"}))
    with pytest.raises(ValueError, match="--base-model FOLDER"):
        loading.PretrainedFolder(str(adapter))
    base = str(folders / "causal")
    assert loading.PretrainedFolder(str(adapter), base_model=base).task == "causal-lm"
    with pytest.raises(ValueError, match="leave --label out"):
        loading.data(
            str(folders / "data.jsonl"),
            text_column="text",
            label="label",
            tokenization=loading.PretrainedFolder(base).tokenization(),
        )
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n[1]\n')
    with pytest.raises(ValueError, match="line 2 is no JSON object"):
        loading.data(str(tmp_path / "bad.jsonl"), text_column="text")


def test_labels_that_the_model_does_not_know_are_refused(folders, offline, tmp_path, capsys):
    rows = [{"text": "the cat", "label": "blue"}, {"text": "a dog", "label": "red"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [str(folders / "classifier"), str(tmp_path / "data.jsonl"), "--text", "text", "--label", "label"]
    assert exit_code(["plan", *words]) != 0
    assert "blue are not among the model's classes" in capsys.readouterr().err


def test_texts_are_selected_by_several_checkpoints(folders, offline, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = tmp_path / "later"
    model = AutoModelForCausalLM.from_pretrained(folders / "causal")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(folders / "causal").save_pretrained(other)
    indexes = []
    for name, folder, rate in (("a", folders / "causal", "0.001"), ("b", other, "0.003")):
        words = ["index", str(folder), str(folders / "data.jsonl"), "--text", "text", "--width", "512"]
        words += ["--projection", "two-sided", "--learning-rate", rate, "--out", str(tmp_path / name)]
        assert exit_code(words) == 0
        indexes.append(str(tmp_path / name))
    line = (folders / "data.jsonl").read_text().splitlines()[7]
    (tmp_path / "target.jsonl").write_text(line + "\n")
    chosen = tmp_path / "chosen.jsonl"
    words = ["select", *indexes, "--target", str(tmp_path / "target.jsonl"), "--count", "3"]
    assert exit_code([*words, "--out", str(chosen), "--baseline", "rds"]) == 0
    beside = [json.loads(line) for line in (tmp_path / "chosen.rds.jsonl").read_text().splitlines()]
    assert beside[0]["row"] == 7 and len(beside) == 3
    rows = [json.loads(line) for line in chosen.read_text().splitlines()]
    assert rows[0]["row"] == 7 and rows[0]["score"] == pytest.approx(1, abs=1e-3)
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (folders / "causal", other)]
    opened = [lw.Index(path, model=model) for path, model in zip(indexes, models, strict=True)]
    target = {k: v for k, v in single_rows(folders, "causal", ["text"])[7].items() if k != "token_type_ids"}
    scores = [lw.score_targets(one, target).scores.double() for one in opened]
    expected = 0.25 * scores[0] + 0.75 * scores[1]
    assert [row["row"] for row in rows] == expected.argsort(descending=True)[:3].tolist()
    assert rows[1]["score"] == pytest.approx(float(expected[rows[1]["row"]]), abs=1e-5)


def test_selected_texts_are_written_where_asked_for_and_centering_can_be_left_out(
    folders, offline, tmp_path, capsys
):
    data = tmp_path / "data.jsonl"
    data.write_text((folders / "data.jsonl").read_text())
    lines = data.read_text().splitlines()
    words = ["index", str(folders / "causal"), str(data), "--text", "text", "--width", "256"]
    assert exit_code([*words, "--out", str(tmp_path / "index")]) == 0
    (tmp_path / "target.jsonl").write_text("\n".join(lines[3:9]) + "\n")

    def select(*more, code=0):
        words = [
            "select",
            str(tmp_path / "index"),
            "--target",
            str(tmp_path / "target.jsonl"),
            "--by",
            "mean",
        ]
        out = tmp_path / "chosen.jsonl"
        assert exit_code([*words, "--count", "10", "--out", str(out), "--force", *more]) == code
        return [json.loads(line) for line in out.read_text().splitlines()]

    without = select()
    assert not any("text" in row for row in without)
    for row in select("--texts", "--baseline", "rds"):
        assert row["text"] == json.loads(lines[row["row"]])["text"]
    beside = [json.loads(line) for line in (tmp_path / "chosen.rds.jsonl").read_text().splitlines()]
    assert all(row["text"] == json.loads(lines[row["row"]])["text"] for row in beside)
    from transformers import AutoModelForCausalLM

    index = lw.Index(
        tmp_path / "index", model=AutoModelForCausalLM.from_pretrained(folders / "causal").eval()
    )
    rows = single_rows(folders, "causal", ["text"])[3:9]
    targets = [{name: value[0] for name, value in row.items() if name != "token_type_ids"} for row in rows]
    scores = lw.score_targets(index, lw.batches(targets, pad_id=0), by="mean", centered=False).scores
    plain = select("--plain")
    assert [row["row"] for row in plain] == scores.argsort(descending=True, stable=True)[:10].tolist()
    assert plain[0]["score"] == pytest.approx(float(scores.max()), abs=1e-5)
    assert [row["score"] for row in plain] != [row["score"] for row in without]
    pairs = tmp_path / "pairs.jsonl"
    halves = [json.loads(line)["text"] for line in lines]
    pairs.write_text("".join(json.dumps({"asked": text, "said": f"the {text}"}) + "\n" for text in halves))
    words = ["index", str(folders / "causal"), str(pairs), "--text", "asked,said", "--width", "64"]
    assert exit_code([*words, "--out", str(tmp_path / "pairs")]) == 0
    words = ["select", str(tmp_path / "pairs"), "--target", str(pairs), "--count", "2", "--texts"]
    assert exit_code([*words, "--out", str(tmp_path / "some.jsonl")]) == 0
    for row in map(json.loads, (tmp_path / "some.jsonl").read_text().splitlines()):
        assert row["texts"] == {"asked": halves[row["row"]], "said": f"the {halves[row['row']]}"}
    moved = data.rename(tmp_path / "moved.jsonl")
    select("--texts", code=2)
    assert select("--texts", "--data", str(moved))[0]["text"]
    moved.write_text("\n".join(reversed(lines)) + "\n")
    select("--texts", "--data", str(moved), code=2)
    assert "is not the one that the index was built from" in capsys.readouterr().err


def test_selection_by_plain_gradients_of_texts_names_the_better_index(folders, offline, tmp_path, capsys):
    words = ["index", str(folders / "causal"), str(folders / "data.jsonl"), "--text", "text", "--width", "64"]
    line = (folders / "data.jsonl").read_text().splitlines()[7]
    (tmp_path / "target.jsonl").write_text(line + "\n")

    def stderr(*given):
        assert exit_code(list(given)) == 0
        return capsys.readouterr().err

    def select(name):
        target = ["--target", str(tmp_path / "target.jsonl"), "--out", str(tmp_path / f"{name}.jsonl")]
        return stderr("select", str(tmp_path / name), *target)

    stderr(*words, "--out", str(tmp_path / "matrix"), "--unit", "matrix")
    assert "--unit matrix" not in select("matrix")
    stderr(*words, "--out", str(tmp_path / "plain"))
    assert "plain gradients of a language model" in select("plain")
    assert exit_code(["ask", str(tmp_path / "matrix"), "the cat", "--exact"]) != 0
    assert "--unit sample" in capsys.readouterr().err


def test_a_column_of_text_that_is_not_named_is_asked_for(folders, tmp_path, capsys, monkeypatch):
    (tmp_path / "data.jsonl").write_text('{"words": "a text", "origin": "here"}\n')
    monkeypatch.setattr("likewise.cli.options._load_model", None)  # before the model is loaded
    given = ["analyze", str(folders / "classifier"), str(tmp_path / "data.jsonl"), "--label", "origin"]
    assert exit_code([*given, "--out", str(tmp_path / "run")]) == 2
    assert "Pass --text COLUMN, one of words." in " ".join(capsys.readouterr().err.split())
