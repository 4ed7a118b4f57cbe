"""The record of training by the Trainer of Hugging Face."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

import likewise as lw
from likewise.integrations.transformers import watch_trainer


class Sequences(torch.utils.data.Dataset):
    """Tokens, a label, and a column that the model does not take."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(i)
        return {"input_ids": torch.randint(5, 30, (4,), generator=rng), "label": i % 3, "note": 7}


def rows():
    import datasets

    return datasets.Dataset.from_list(
        [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in Sequences()[i].items()} for i in range(48)]
    )


class Own(Trainer):
    """A loss of one's own, as people write it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def make_trainer(folder, data=None, kind=Trainer, **options):
    set_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    given = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 10,
        "learning_rate": 3e-3,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_strategy": "epoch",
        **options,
    }
    model = BertForSequenceClassification(config)
    data = Sequences() if data is None else data
    evaluated = Sequences() if "eval_strategy" in given else None
    return kind(model, TrainingArguments(folder, **given), train_dataset=data, eval_dataset=evaluated)


@pytest.mark.parametrize("kind", [Trainer, Own])
@pytest.mark.parametrize("data", [Sequences, rows], ids=["torch", "datasets"])
def test_weights_are_bit_identical_with_and_without_the_record(tmp_path, data, kind):
    plain, watched = (make_trainer(tmp_path, data(), kind) for _ in range(2))
    watch = watch_trainer(watched, tmp_path / "watch.parquet")
    set_seed(0)
    plain.train()
    set_seed(0)
    watched.train()
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (watch.updates == 2).all() and watch.labels.tolist() == [i % 3 for i in range(48)]
    assert lw.Watch.load(tmp_path / "watch.parquet").table().equals(watch.table())
    losses = [row["loss"] for row in watched.state.log_history if "loss" in row]
    assert losses == [row["loss"] for row in plain.state.log_history if "loss" in row] and len(losses) == 2
    logged = [row["watch/margin"] for row in watched.state.log_history if "watch/margin" in row]
    assert len(logged) == 2 and logged[-1] == pytest.approx(watch.scalars()["watch/margin"])


def test_evaluation_and_checkpoints_go_on_as_usual(tmp_path):
    trainer = make_trainer(
        tmp_path,
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=3,
        num_train_epochs=1,
        label_smoothing_factor=0.1,
    )
    watch = watch_trainer(trainer, tmp_path / "watch.parquet")
    trainer.train()
    assert int(watch.updates.sum()) == 48  # evaluation is not recorded
    assert any("eval_loss" in row for row in trainer.state.log_history)
    assert (tmp_path / "checkpoint-3").exists()
    trainer.evaluate(trainer.train_dataset)  # positions are taken out here, too
    assert int(watch.updates.sum()) == 48


class Deaf(Trainer):
    def compute_loss(self, model, inputs, **options):
        return model(**inputs).loss


def test_what_is_missing_is_named(tmp_path):
    trainer = make_trainer(tmp_path, kind=Deaf)
    watch_trainer(trainer)
    with pytest.raises(TypeError, match="return_outputs=True"):
        trainer.train()
    with pytest.raises(ValueError, match="recorded already"):
        watch_trainer(trainer)
    with pytest.raises(TypeError, match=r"a transformers\.Trainer"):
        watch_trainer(None)
    stream = make_trainer(tmp_path, torch.utils.data.ChainDataset([]), max_steps=2)
    with pytest.raises(TypeError, match="read by position"):
        watch_trainer(stream)
