"""The same numbers on a GPU, with data on the host."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from torch import nn

import likewise as lw
import nets
from likewise import losses
from likewise.engines import retained
from likewise.gram import sketches
from likewise.torch_state import send

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent"),
]


def numbers(model, x, y):
    gram = lw.GramMatrix(model, lw.batches((x, y), size=4))
    centered = lw.GramMatrix(model, lw.batches((x, y), size=4), centered=True)
    denoised = lw.denoising(gram, draws=16)
    return [
        gram.dense(),
        lw.soft_neighbors(gram),
        lw.soft_neighbors(centered),
        lw.hard_neighbors(gram, 0.5).double(),
        lw.nearest(gram, 3).similarities,
        lw.uncertainty(gram),
        lw.disturbance(gram),
        denoised.factor,
        denoised.shift,
        denoised.smoothed_label,
        denoised.negative_share,
        lw.denoising(gram, exact=True).bound,
        lw.label_suspicion(gram).suspicion,
        lw.class_similarity(gram).mean,
        lw.fit_quality(gram).label_variance,
        lw.similarity_histogram(gram, 10).counts.double(),
        lw.predicted_move(lw.Network(model), x[:1], torch.ones(2), x),
        lw.lipschitz_bound(gram).square(),  # its root magnifies rounding where x' = x
        lw.GramMatrix(model, x[:3], x).dense(),
        lw.GramMatrix(lw.Network(model, lw.label_against_random(1)), (x, y)).dense(),
        lw.GramMatrix(model, x) @ torch.ones(len(x), 2, 1),
    ]


@pytest.mark.parametrize("make", list(nets.SHAPES), ids=lambda m: m.__name__)
def test_a_gpu_gives_the_numbers_of_the_host(make):
    model, x = nets.case(make, 2, 9)
    y = torch.arange(9) % 2
    expected = numbers(model, x, y)
    state = torch.cuda.get_rng_state()
    model.cuda()
    for found, value in zip(numbers(model, x, y), expected, strict=True):
        assert (found.cpu() - value).abs().nan_to_num().max() < 1e-6 * (1 + value.nan_to_num().abs().max())
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize("make", list(nets.SHAPES), ids=lambda m: m.__name__)
def test_retained_gradients_give_the_numbers_of_the_host(make, monkeypatch):
    monkeypatch.setattr(retained, "LEAST_BYTES", 0)
    model, x = nets.case(make, 2, 41)
    weights = torch.linspace(-1, 1, 41, dtype=torch.float64)

    def sums():
        gram = lw.GramMatrix(
            model, lw.batches(x, size=4), max_memory=2**28
        )  # eleven chunks, the last of one sample
        return [lw.soft_neighbors(gram), lw.uncertainty(gram), (gram @ weights.to(gram.device)).cpu()]

    expected = sums()
    model.cuda()
    for found, value in zip(sums(), expected, strict=True):
        assert (found.cpu() - value).abs().max() < 1e-6 * (1 + value.abs().max())


def tensors_of(result):
    """Every tensor of a result, by name."""
    if isinstance(result, torch.Tensor):
        return {"": result}
    return {name: value for name, value in result._asdict().items() if isinstance(value, torch.Tensor)}


def results_of_statistics(model):
    """What every statistic returns for a small data set on the host."""
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    gram = lw.GramMatrix(model, (x, y))
    suspicion, reliability = lw.label_suspicion(gram, reheat=None), lw.reliability(gram)
    return {
        "dense": gram.dense(),
        "diagonal": gram.diagonal(),
        "product": gram @ torch.ones(60),
        "outputs": gram.outputs(),
        "soft_neighbors": lw.soft_neighbors(gram),
        "hard_neighbors": lw.hard_neighbors(gram, 0.5),
        "positive_neighbors": lw.positive_neighbors(gram),
        "similarity_histogram": lw.similarity_histogram(gram, 10),
        "nearest": lw.nearest(gram, 3),
        "class_similarity": lw.class_similarity(gram),
        "uncertainty": lw.uncertainty(gram),
        "disturbance": lw.disturbance(gram),
        "denoising": lw.denoising(gram, draws=16),
        "fit_quality": lw.fit_quality(gram),
        "label_suspicion": suspicion,
        "label_evidence": lw.label_evidence(gram, suspicion),
        "novelty": lw.novelty(gram),
        "reliability": reliability,
        "calibrate": lw.calibrate(reliability, y)(reliability),
        "lipschitz_bound": lw.lipschitz_bound(gram),
        "similarity": lw.similarity(model, x[:2], x),
        "few queries": lw.nearest(lw.GramMatrix(model, x[:1], columns=x[1:]), 3),
    }


@pytest.mark.filterwarnings("ignore:Only .* of the predictions")
def test_results_are_on_the_device_of_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    for name, result in results_of_statistics(model).items():
        for field, tensor in tensors_of(result).items():
            assert tensor.device.type == "cuda", f"{name} {field}"


@pytest.mark.parametrize("name", ["group", "pair", "two_batches", "orbit", "along"])
def test_a_recorded_term_is_the_term(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Conv2d(4, 8, 3), nn.Softplus()]
    model = nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)).cuda()
    options = {
        "group": lambda x, y: ((x, y), {"labels": y}),
        "pair": lambda x, y: (x.chunk(2), {"labels": y.chunk(2)[0], "other_labels": y.chunk(2)[1]}),
        "two_batches": lambda x, y: (x.chunk(2), {"labels_a": y.chunk(2)[0], "labels_b": y.chunk(2)[1]}),
        "orbit": lambda x, y: ((x, [torch.neg]), {"labels": y}),
        "along": lambda x, y: ((x, torch.sin), {"labels": y}),
    }[name]
    term = getattr(losses, name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def batch(seed, n=12):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 1, 8, 8, generator=generator).cuda()
        return options(x, torch.randint(3, (n,), generator=generator).cuda())

    plays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (plays.append(1), replay(graph)))
    given, named = batch(0)
    recorded = losses.captured(term, model, *given, readout=lw.label_against_rest, **named)
    state = torch.cuda.get_rng_state()
    for step in range(4):
        if step == 3:
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given, named = batch(step, 10 if step == 2 else 12)
        expected = term(model, *given, readout=lw.label_against_rest, **named)
        every = list(model.parameters())
        wanted = torch.autograd.grad(expected, every, materialize_grads=True, allow_unused=True)
        optimizer.zero_grad()
        found, again = recorded(*given, **named), recorded(*given, **named)
        (2 * found - again).backward()
        assert (found - expected).abs() < 1e-4 * (1 + expected.abs())
        for p, gradient in zip(model.parameters(), wanted, strict=True):
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            assert (mine - gradient).abs().max() < 1e-3 * (1e-3 + gradient.abs().max())
        optimizer.step()
        model.train()(batch(9)[0][0])  # statistics of the norm move
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert len(plays) == 8  # twice at each step but that of another shape, and once after each recording


def test_a_loss_and_its_term_are_recorded_as_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)).cuda()

    def loss(model, x, y):
        term, outputs = losses.group_with_outputs(model, x, y, y, readout=lw.label_against_rest)
        return nn.functional.cross_entropy(outputs, y) + 0.1 * term

    x, y = torch.randn(6, 1, 4, 4).cuda(), torch.tensor([0, 1, 0, 1, 2, 2]).cuda()
    recorded = losses.captured(loss, model, x, y)
    assert "not recorded" not in repr(recorded)
    for batch in ((x, y), (x.flip(0), y.flip(0)), (x + 1, y.roll(1))):
        mine, theirs = recorded(*batch), loss(model, *batch)
        found, wanted = (torch.autograd.grad(one, list(model.parameters())) for one in (mine, theirs))
        assert (mine - theirs).abs() < 1e-4
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() < 1e-3 * (1e-3 + other.abs().max())


def test_a_recorded_term_of_several_outputs_is_refused():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).cuda(), torch.randn(4, 3).cuda()
    with pytest.raises(ValueError, match="readout of one output"):
        losses.captured(losses.group, model, x, readout=lw.all_outputs)
    for term, batch in ((losses.along, (x, torch.sin)), (losses.two_batches, (x[:2], x[2:]))):
        found = losses.captured(term, model, *batch)(*batch)
        assert (found - term(model, *batch)).abs() < 1e-5


@pytest.mark.parametrize("explicit", [False, True])
def test_a_recorded_term_reads_a_new_combination_of_outputs_at_each_play(explicit):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).cuda()
    x, y = torch.randn(8, 3).cuda(), torch.arange(8).cuda() % 2
    mine, theirs = (torch.Generator() if explicit else None for _ in range(2))
    recorded = losses.captured(losses.group, model, x, y, generator=mine)
    assert "not recorded" not in repr(recorded)

    def values(term, generator):
        torch.manual_seed(3) if generator is None else generator.manual_seed(3)
        return torch.stack([term().detach() for _ in range(4)])

    found = values(lambda: recorded(x, y), mine)
    wanted = values(lambda: losses.group(model, x, y, generator=theirs), theirs)
    assert found.unique().numel() == 4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def played(recorded, *batch):
    """Return the term and gradients by name, of a batch on the host."""
    recorded._module.zero_grad()
    value = recorded(*batch)
    value.backward()
    return value, {name: p.grad for name, p in recorded._module.named_parameters()}


def test_a_recorded_term_follows_what_moves():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1)
    ).cuda()
    model[0].bias.requires_grad_(False)
    used = model[:4]
    x = torch.randn(6, 3)
    recorded = losses.captured(losses.group, used, x)
    model[0].bias.data = torch.randn(4).cuda()  # frozen
    assert (played(recorded, x)[0] - losses.group(used, x)).abs() < 1e-5
    model[1].running_mean = torch.randn(4).cuda()
    value, gradients = played(recorded, x)
    assert (value - losses.group(used, x)).abs() < 1e-5
    assert gradients["0.bias"] is None and gradients["0.weight"].any()
    two = losses.captured(losses.group, model, x, parameters="3.*")  # a second one beside it
    assert (played(two, x)[0] - losses.group(model, x, parameters="3.*")).abs() < 1e-5
    assert (played(recorded, x)[0] - value).abs() < 1e-6
    with pytest.warns(UserWarning, match="lie elsewhere at each step"):
        for _ in range(4):
            model[1].running_mean = torch.randn(4).cuda()
            played(recorded, x)


def test_a_term_that_cannot_be_recorded_says_so():
    model, x = nn.Linear(3, 1).cuda(), torch.randn(4, 3).cuda()
    weight = model.weight
    with pytest.raises(RuntimeError, match="reaches parameters other than through the model"):
        losses.captured(lambda model, x: model(x).sum() + weight.square().sum(), model, x)


def test_a_record_of_training_is_the_same_and_no_update_waits_for_the_gpu(monkeypatch):
    labels, rng = torch.arange(50) % 4, torch.Generator().manual_seed(0)
    on_gpu, on_host = lw.Watch(50), lw.Watch(50)
    for k in range(40):
        monkeypatch.setattr("likewise.watch.PENDING_LOGITS", 1 << 16 if k % 2 else 0)
        ids = torch.randint(0, 50, (16,), generator=rng)
        logits = torch.randn(16, 4, generator=rng).bfloat16()
        given = logits.cuda(), labels[ids].cuda(), ids.cuda() if k % 3 else ids
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_gpu.update(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        on_host.update(logits, labels[ids], ids)
    for name in ("margins", "losses", "confidence", "variability", "correctness", "forgetting"):
        torch.testing.assert_close(
            getattr(on_gpu, name), getattr(on_host, name), rtol=0, atol=1e-6, equal_nan=True
        )
    on_gpu.update(torch.zeros(1, 3).cuda(), torch.tensor([7]).cuda(), torch.tensor([0]).cuda())
    with pytest.raises(ValueError, match="labels must be from 0 to 2"):
        _ = on_gpu.margins


class Reading(nn.Module):
    """A network that reads a value off the GPU in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x) * (1.0 if x.abs().max().item() > 0 else 2.0)


def convolutional():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 4))


def attention():
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(block, nn.Flatten(), nn.Linear(40, 4))


RECORDED = {
    "convolutional": (convolutional, (3, 8, 8)),
    "attention": (attention, (5, 8)),
    "reading": (Reading, (6,)),
}


@pytest.fixture
def replays(monkeypatch):
    """The replays of CUDA graphs."""
    plays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (plays.append(1), replay(graph)))
    return plays


def passes(model, x, y, readout):
    """Statistics by every operation of the engine, in chunks of 8 of which the last is smaller."""
    gram = lw.GramMatrix(lw.Network(model, readout), lw.batches((x, y), size=8))
    return {
        "sums": lw.soft_neighbors(gram),
        "uncertainty": lw.uncertainty(gram),
        "product": gram @ torch.linspace(-1, 1, len(x), dtype=torch.float64),
        "pairs": gram.dense(),
        "self kernels": gram.self_kernel(),
        "sketched": lw.nearest(gram, 3, sketch=64).similarities,
        "projected from two sides": lw.nearest(gram, 3, sketch=16).similarities,
        "few queries": lw.GramMatrix(gram.net, (x[:1], y[:1]), columns=(x, y)).dense(),
    }


@pytest.mark.parametrize("readout", [lw.label_against_rest, lw.projected_outputs(3)], ids=["one", "three"])
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_chunks_have_the_numbers_of_the_host(name, readout, replays, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(sketches, "FEWEST_ENTRIES", 0)
    torch.manual_seed(0)
    make, shape = RECORDED[name]
    model, x, y = make().eval(), torch.randn(37, *shape), torch.arange(37) % 4
    for _ in range(2):  # the second time with other weights in the same place
        expected = passes(model.double().cpu(), x.double(), y, readout)
        found = passes(model.float().cuda(), x, y, readout)
        for key, value in expected.items():
            apart = (found[key].cpu().double() - value.double()).abs().max()
            assert apart < 2e-5 * (1 + value.abs().max()), key
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert bool(replays) == (name != "reading")


@pytest.mark.parametrize(
    "statistic", [lw.soft_neighbors, lw.uncertainty, lambda g: lw.nearest(g, 3, sketch=64)]
)
def test_a_sample_that_is_not_finite_is_named_although_checks_wait_for_the_last_pass(statistic, replays):
    torch.manual_seed(0)
    model, x, y = convolutional().eval().cuda(), torch.randn(64, 3, 8, 8), torch.arange(64) % 4
    statistic(lw.GramMatrix(model, lw.batches((x, y), size=8)))
    x[37] = torch.nan
    with pytest.raises(ValueError, match=r"1 sample is not finite, the first with ids \[37\]"):
        statistic(lw.GramMatrix(model, lw.batches((x, y), size=8)))
    assert replays


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("size", [2**10, 2**24])
def test_a_tensor_of_the_host_may_be_written_to_once_it_was_sent(size, pinned):
    """Although what a GPU still has to do is not waited for."""
    busy, values = torch.randn(4096, 4096, device="cuda"), torch.randn(size, pin_memory=pinned)
    expected = values.clone()
    for _ in range(50):
        busy = busy @ busy / 4096
    sent = send(values, busy.device)
    values.zero_()
    assert torch.equal(sent.cpu(), expected)


def test_weights_may_change_between_passes_of_recorded_chunks(replays):
    torch.manual_seed(0)
    model, x, y = convolutional().eval().cuda(), torch.randn(32, 3, 8, 8), torch.arange(32) % 4
    gram = lw.GramMatrix(model, lw.batches((x, y), size=8))
    before = lw.soft_neighbors(gram)
    model[0].weight.data = torch.randn_like(model[0].weight)  # elsewhere in memory
    after = lw.soft_neighbors(gram)
    assert replays and (before - after).abs().max() > 1e-3
    assert torch.allclose(
        after, lw.soft_neighbors(lw.GramMatrix(model, lw.batches((x, y), size=8))), atol=1e-4
    )


def test_samples_of_other_shapes_interrupt_recorded_chunks(replays):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    sizes = [8, 8, 8, 12, 12, 8, 8, 12, 8, 12, 12, 12]
    images = [torch.randn(6, 1, side, side) for side in sizes]
    rows = torch.cat([lw.GramMatrix(model, x).self_kernel().flatten(1) for x in images])
    net = lw.Network(model.cuda(), lw.all_outputs)
    gram = lw.GramMatrix(net, images[0])
    with net.evaluation_mode():
        found = [gram.engine.self_kernel(lw.batches(x, size=6)[0]).matrix.flatten(1) for x in images]
    assert replays
    assert (torch.cat(found).cpu() - rows).abs().max() < 1e-4 * rows.abs().max()


@pytest.mark.filterwarnings("ignore:Only .* of the predictions")
def test_a_run_on_a_gpu_has_the_columns_of_the_host(tmp_path):
    pytest.importorskip("pydantic")  # a run needs all that the package depends on
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    data = torch.randn(60, 5), torch.arange(60) % 3
    here = lw.analyze(model, data, out=tmp_path / "host", exact=True).table
    there = lw.analyze(model.cuda(), data, out=tmp_path / "device", exact=True).table
    for name in ("density", "novelty", "label_suspicion"):
        torch.testing.assert_close(
            torch.tensor(there[name].to_numpy()), torch.tensor(here[name].to_numpy()), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_an_index_is_built_and_asked_on_a_gpu(tmp_path, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
    x, y, new = torch.randn(600, 1, 6, 6), torch.arange(600) % 4, torch.randn(5, 1, 6, 6)
    found = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        index = lw.build_index(model.to(device), (x, y), folder, dtype=dtype, width=256, pictures=False)
        found.append((index.nearest(new).similarities, index.outputs, index.novelty(new).feature_novelty))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.double(), other.double(), atol=5e-3)


def test_an_index_on_a_gpu_answers_as_one_on_the_host(tmp_path):
    try:
        version("likewise")
    except PackageNotFoundError:
        pytest.skip("an index names the version of the installed package")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    data, new = (torch.randn(60, 1, 6, 6), torch.arange(60) % 3), torch.randn(7, 1, 6, 6)
    found = []
    for device in ("cpu", "cuda"):
        index = lw.build_index(model.to(device), data, tmp_path / device, dtype="float32")
        novelty = index.novelty(new)
        ingredients = novelty.gradient_novelty, novelty.feature_novelty, novelty.feature_length
        found.append([*ingredients, *index.reliability(new), index.nearest(new, 5).errors])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3, check_dtype=False)
