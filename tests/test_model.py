import pytest
import torch
from torch import nn

import likewise as lw
import oracle
from likewise.model import Network


def mlp():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    return model, torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0])


def test_readouts_are_their_formulas():
    model, x, y = mlp()
    z = model(x).detach()
    assert torch.equal(Network(model).outputs(x), z)
    assert torch.equal(Network(model, lw.one_output(2)).outputs(x), z[:, 2:3])
    assert torch.allclose(Network(model, lw.log_probabilities).outputs(x), z.log_softmax(1))
    found = Network(model, lw.label_against_rest).outputs(x, y)
    for i in range(6):
        rest = torch.stack([z[i, c] for c in range(5) if c != y[i]])
        assert torch.allclose(found[i, 0], z[i, y[i]] - rest.exp().sum().log())
    p = z.softmax(1)[range(6), y]
    assert torch.allclose(found[:, 0], (p / (1 - p)).log())


def test_label_against_random_is_another_class_by_id_alone():
    model, x, y = mlp()
    x, y = x.repeat(50, 1), y.repeat(50)
    ids, z = torch.arange(300), model(x).detach()
    net = Network(model, lw.label_against_random(seed=3))
    found = net.outputs(x, y, ids)[:, 0]
    differences = z.gather(1, y[:, None]) - z
    differences.scatter_(1, y[:, None], torch.inf)
    rival = (differences - found[:, None]).abs().argmin(1)
    assert torch.allclose(differences.gather(1, rival[:, None])[:, 0], found)
    assert torch.equal(net.outputs(x[7:9], y[7:9], ids[7:9])[:, 0], found[7:9])
    drawn = torch.bincount((rival - y) % 5, minlength=5)
    assert drawn[0] == 0 and (drawn[1:] > 40).all()  # 75 each on average
    other = Network(model, lw.label_against_random(seed=4)).outputs(x, y, ids)[:, 0]
    assert (other != found).sum() > 100


def test_label_readouts_through_the_kernel():
    model, x, y = mlp()
    for readout in (lw.label_against_rest, lw.label_against_random(0)):
        k = lw.similarity(model, (x, y), readout=readout)
        assert k.shape == (6, 6) and torch.allclose(k.diagonal(), torch.ones(6).double())


def test_binary_labels_of_one_output():
    model, x = nn.Linear(3, 1).double(), torch.randn(4, 3).double()
    y = torch.tensor([0, 1, 1, 0])
    found = Network(model, lw.label_against_rest).outputs(x, y)
    assert torch.allclose(found[:, 0], model(x)[:, 0] * torch.tensor([-1.0, 1, 1, -1]))


@pytest.mark.parametrize(
    ("readout", "labels", "text"),
    [
        (lw.label_against_rest, None, r"needs labels.*\(X, y\)"),
        (lw.label_against_rest, torch.randn(6), "one class number per sample"),
        (lw.label_against_rest, torch.full((6,), 9), r"among the \d+ classes"),
        (lw.one_output(7), None, "5 outputs, numbered from 0"),
        (lambda outputs, labels: outputs.argmax(1), None, "floating"),
        (lambda outputs, labels: outputs.sum(), None, r"expected \(6, d\)"),
    ],
)
def test_wrong_readouts_are_said(readout, labels, text):
    model, x, _ = mlp()
    with pytest.raises((ValueError, TypeError), match=text):
        Network(model, readout).outputs(x, labels)


def test_parameters_by_name_and_pattern():
    model, _, _ = mlp()
    assert Network(model).names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert Network(model, parameters=["2.*"]).names == ("2.weight", "2.bias")
    assert Network(model, parameters=["*.bias", "0.weight"]).names == ("0.weight", "0.bias", "2.bias")
    with pytest.raises(ValueError, match=r"of the 4 matches 'fc.*did you mean one of 0.weight"):
        Network(model, parameters=["fc.*"])


def test_a_tied_parameter_is_taken_once_by_either_name():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    assert Network(model).names == ("a.weight", "a.bias", "b.bias")
    assert Network(model, parameters=["b.weight"]).names == ("a.weight",)


def test_gradients_in_a_subset_of_the_parameters():
    model, x, _ = mlp()
    activity = torch.tanh(model[0](x)).detach()
    k = lw.GramMatrix(
        lw.Network(model, lw.one_output(1), parameters=["2.*"]), x, kernel=lw.INNER_PRODUCT
    ).dense()
    assert torch.allclose(k, activity @ activity.T + 1)


def test_a_network_follows_its_model():
    model, x, _ = mlp()
    net = Network(model)
    before = lw.GramMatrix(net, x).dense()
    with torch.no_grad():
        model[0].weight.mul_(3)
    assert not torch.allclose(lw.GramMatrix(net, x).dense(), before)


def test_wrappers_are_seen_through():
    model, x, _ = mlp()
    expected = lw.similarity(model, x)
    assert torch.equal(lw.similarity(torch.compile(model), x), expected)
    assert torch.equal(lw.similarity(nn.DataParallel(model), x), expected)


def test_inputs_are_brought_to_the_models_precision():
    model, x, _ = mlp()
    assert torch.allclose(lw.similarity(model, x.float()), lw.similarity(model, x.float().double()))
    assert lw.similarity(model.float(), x.numpy()).dtype == torch.float32


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4).double(), nn.Linear(2, 4).double()

    def forward(self, first, second):
        return torch.tanh(self.a(first)) * self.b(second)


def test_tuple_and_dict_inputs():
    model, first, second = Pair(), torch.randn(5, 3).double(), torch.randn(5, 2).double()
    as_tuple = lw.similarity(model, lw.batches((first, second), labels=False))
    as_dict = lw.similarity(model, {"second": second, "first": first})
    assert torch.equal(as_tuple, as_dict) and as_tuple.shape == (5, 5)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda x: x, "model must be a torch.nn.Module, found a function"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
        (nn.ReLU(), "ReLU has no parameters"),
    ],
)
def test_models_without_usable_parameters_are_refused(model, text):
    with pytest.raises((ValueError, TypeError), match=text):
        Network(model)


def tiny_hugging_face():
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=20, max_position_embeddings=16)
    bert = transformers.BertConfig(
        **small, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    gpt = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return {
        "bert": transformers.BertForSequenceClassification(bert).double(),
        "gpt2": transformers.GPT2LMHeadModel(gpt).double(),
    }


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate")
def test_hugging_face_models_run_as_they_are(name):
    model = tiny_hugging_face()[name].train()
    ids = torch.randint(1, 20, (4, 5))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(4).long()}
    readout = lw.all_outputs if name == "bert" else lambda outputs, labels: outputs.logits[:, -1, :3]
    gram = lw.GramMatrix(lw.Network(model, readout), data)
    wanted = [p for p in model.parameters()]
    model.eval()
    rows = []
    for i in range(4):
        logits = model(input_ids=ids[i : i + 1], attention_mask=torch.ones(1, 5).long()).logits
        logits = logits[0, -1, :3] if name == "gpt2" else logits[0]
        grads = [torch.autograd.grad(z, wanted, retain_graph=True, materialize_grads=True) for z in logits]
        rows.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in grads]))
    expected = torch.einsum("ndp,mdp->nm", torch.stack(rows), torch.stack(rows)) / 3
    found = gram.with_kernel(lw.INNER_PRODUCT).dense()
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()
    assert torch.allclose(lw.soft_neighbors(gram), gram.dense().sum(1))


def test_a_second_argument_called_ids_gets_the_labels():
    def two(outputs, ids):
        return outputs.gather(1, ids[:, None])

    def keyword(outputs, labels, *, ids):
        return outputs + ids[:, None]

    def fourth(outputs, labels, scale=2.0, ids=None):
        return outputs * scale + ids[:, None]

    model, x, y = mlp()
    z = model(x)
    assert torch.allclose(Network(model, two).outputs(x, y), z.gather(1, y[:, None]))
    ids = torch.arange(6)
    assert torch.allclose(Network(model, keyword).outputs(x, y, ids), z + ids[:, None])
    assert torch.allclose(Network(model, fourth).outputs(x, y, ids), 2 * z + ids[:, None])


def test_hooks_that_change_gradients_are_refused_by_name():
    model, x, _ = mlp()
    expected = lw.similarity(model, x)
    name, parameter = list(model.named_parameters())[2]
    handle = parameter.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(ValueError, match=rf"gradient hooks .* the first {name}: .*handle.remove"):
        lw.similarity(model, x)
    with pytest.raises(ValueError, match="gradient hooks"):
        lw.losses.pair(model, x[:2], x[2:4])
    others = [other for other, _ in model.named_parameters() if other != name]
    assert lw.similarity(lw.Network(model, parameters=others), x).isfinite().all()
    handle.remove()
    parameter.register_post_accumulate_grad_hook(lambda p: None)  # acts on .grad, never on gradients
    assert torch.equal(lw.similarity(model, x), expected)


class LowPrecisionBody(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(20, 8)).bfloat16()
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, d)

    def forward(self, x):
        return self.head(self.body(x.bfloat16()).relu().float() * self.scale)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.filterwarnings("error:.*reference engine")
def test_a_bfloat16_body_with_a_float32_head(d):
    torch.manual_seed(0)
    model, x = LowPrecisionBody(d), torch.randn(8, 1, 6)
    gram = lw.GramMatrix(model, x)
    k = gram.dense()
    jacobian = oracle.jacobians(model, x).double()
    assert torch.allclose(k.double(), oracle.trace(oracle.correlation(jacobian, jacobian)), atol=0.02)
    assert torch.allclose(lw.soft_neighbors(gram), k.sum(1), rtol=1e-5)
    assert torch.allclose(k.diagonal(), torch.ones(8), atol=1e-5)
    assert lw.denoising(gram, draws=8).factor.isfinite().all()
    assert lw.novelty(gram, 2, sketch=64).isfinite().all()
    centered = lw.GramMatrix(model, x, centered=True)
    assert torch.allclose(lw.soft_neighbors(centered), centered.dense().sum(1), atol=1e-4)
    assert lw.losses.pair(model, x[:4], x[4:]).isfinite()


def test_a_readout_beside_a_network_is_refused(tmp_path):
    net, x = lw.Network(nn.Linear(3, 2)), torch.randn(6, 3)
    with pytest.raises(ValueError, match="has its own readout"):
        lw.similarity(net, x, readout=lw.predicted_class)
    with pytest.raises(ValueError, match="has its own readout"):
        lw.analyze(net, x, out=tmp_path / "run", readout=lw.predicted_class)
    with pytest.raises(ValueError, match="found parameters"):
        lw.analyze(net, x, out=tmp_path / "run", parameters="weight")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["lora", "dora", "saved head", "ia3", "prompt"])
def test_adapters_are_those_of_peft(kind):
    peft = pytest.importorskip("peft")
    configuration = {
        "lora": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"]),
        "dora": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], use_dora=True),
        "saved head": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"]),
        "ia3": lambda: peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[]),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    }[kind]()
    model = peft.get_peft_model(tiny_hugging_face()["gpt2"], configuration)
    trainable = tuple(name for name, value in model.named_parameters() if value.requires_grad)
    model.requires_grad_(False)  # as it is loaded for inference
    assert lw.Network(model, parameters="adapters").names == trainable
    assert lw.Network(model, parameters=["adapters"]).names == trainable
    if kind != "prompt":
        model.add_adapter("other", configuration)
        assert lw.Network(model, parameters="adapters").names == trainable


def test_adapters_of_a_plain_model_are_refused():
    with pytest.raises(ValueError, match="Linear has no adapters"):
        lw.Network(nn.Linear(3, 2), parameters="adapters")


def test_last_layers_are_the_last_three_weights_with_what_follows_them():
    def names(model):
        return lw.Network(model, parameters="last 3 layers").names

    convolutions = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 2, 3),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    assert names(nn.Sequential(nn.Conv2d(1, 1, 1), *convolutions)) == tuple(
        f"{i}.{kind}" for i in (1, 2, 3, 4, 6) for kind in ("weight", "bias")
    )
    assert names(nn.Linear(2, 2)) == ("weight", "bias")
    assert lw.Network(convolutions, parameters="last layer").names == ("5.weight", "5.bias")
    parametrized = nn.Sequential(*[nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)) for _ in range(4)])
    assert {name[0] for name in names(parametrized)} == {"1", "2", "3"} and len(names(parametrized)) == 9
    frozen = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    frozen[3].requires_grad_(False)
    assert {name[0] for name in names(frozen)} == {"1", "2", "4"}
