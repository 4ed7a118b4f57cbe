"""After any call the model and the generators are what they were, byte for byte; also among threads."""

import random
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import likewise as lw
import nets


def state(model):
    return {
        "parameters": {k: v.clone() for k, v in model.named_parameters()},
        "buffers": {k: v.clone() for k, v in model.named_buffers()},
        "grads": {k: v.grad.clone() for k, v in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "requires": [p.requires_grad for p in model.parameters()],
        "identity": [id(v) for v in [*model.parameters(), *model.buffers()]],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [
            [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks")] for m in model.modules()
        ],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "kernels": [torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled],
        "attention kernels": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


CALLS = {
    "similarity": lambda model, x, y: lw.similarity(model, x),
    "soft_neighbors": lambda model, x, y: lw.soft_neighbors(lw.GramMatrix(model, x)),
    "denoising": lambda model, x, y: lw.denoising(lw.GramMatrix(model, x), draws=8),
    "exact denoising": lambda model, x, y: lw.denoising(lw.GramMatrix(model, x), exact=True),
    "label_suspicion": lambda model, x, y: lw.label_suspicion(lw.GramMatrix(model, (x, y), centered=True)),
    "uncertainty": lambda model, x, y: lw.uncertainty(lw.GramMatrix(model, x)),
    "fit_quality": lambda model, x, y: lw.fit_quality(lw.GramMatrix(model, x), y),
    "perceptual": lambda model, x, y: lw.nearest(lw.perceptual(model, "*", x), 2),
    "predicted_move": lambda model, x, y: lw.predicted_move(lw.Network(model), x[:1], torch.ones(2), x),
    "outputs": lambda model, x, y: lw.Network(model).outputs(x),
}


@pytest.mark.parametrize("make", [nets.conv, nets.SmallTransformer, nets.Recurrent], ids=lambda m: m.__name__)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_nothing_is_left_behind(make, call):
    model, x = nets.case(make, 2, 5)
    next(model.children()).eval()  # mixed modes must come back too
    model.register_forward_hook(lambda *_: None)
    model(x).sum().backward()
    before = state(model)
    CALLS[call](model, x, torch.tensor([0, 1, 0, 1, 1]))
    after = state(model)
    for part in before:
        assert same(before[part], after[part]), part


def test_an_error_inside_leaves_nothing_behind():
    model, x = nets.case(nets.conv, 2, 5)
    model(x).sum().backward()
    before = state(model)
    x[2] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        lw.similarity(model, x)
    assert all(same(before[part], state(model)[part]) for part in before)


@pytest.fixture
def switch_often():
    """Let threads take turns every 10 µs, so that what can interleave does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_in_threads(functions, timeout=60):
    """Start all functions together; return what each returned or raised."""
    results, start = [None] * len(functions), threading.Barrier(len(functions))

    def work(i, function):
        start.wait()
        try:
            results[i] = function()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=job, daemon=True) for job in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return results


def prepared(make, seed=0):
    model, x = nets.case(make, 2, 5, seed)
    model(x).sum().backward()
    return model, x


def assert_unchanged(before, models):
    for old, model in zip(before, models, strict=True):
        new = state(model)
        for part in old:
            assert same(old[part], new[part]), part


@pytest.mark.parametrize("make", [nets.conv, nets.SmallTransformer, nets.Recurrent], ids=lambda m: m.__name__)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_two_threads_on_one_model_leave_it_as_it_was_and_get_the_numbers_of_one(make, switch_often):
    cases = [prepared(make, seed) for seed in range(2)]
    models = [model for model, _ in cases]
    before, filters = [state(model) for model in models], list(warnings.filters)
    for model, x in cases:
        expected = lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=2)))

        def call(model=model, x=x):
            return lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=2)))

        for found in run_in_threads([call] * 2):
            assert isinstance(found, torch.Tensor), found
            assert torch.equal(found, expected)
    assert_unchanged(before, models)
    assert warnings.filters == filters


def test_threads_on_different_models_and_on_shared_modules_leave_every_switch_as_it_was(switch_often):
    cases = [prepared(make) for make in (nets.SmallTransformer, nets.Recurrent, nets.conv, nets.mlp)]
    body = cases[3][0]
    shared = torch.nn.Sequential(body, torch.nn.Linear(2, 2, dtype=torch.float64))
    shared(cases[3][1]).sum().backward()
    cases.append((shared, cases[3][1]))
    models = [model for model, _ in cases]

    def calls(model, x):
        y = torch.tensor([0, 1, 0, 1, 1])
        return (
            lw.similarity(model, x),
            lw.label_suspicion(lw.GramMatrix(model, (x, y))).suspicion,
            lw.novelty(lw.GramMatrix(model, x), sketch=64),
            float(lw.losses.group(model, x, y, readout=lw.all_outputs)),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [calls(*case) for case in cases]
        before = [state(model) for model in models]
        found = run_in_threads([lambda case=case: calls(*case) for case in cases])
        assert_unchanged(before, models)
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, tuple), ours
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(torch.as_tensor(a), torch.as_tensor(b), atol=1e-12)


def test_threads_may_share_one_gram_matrix(switch_often):
    """Engines and caches are set up once; no thread waits for another for ever."""
    model, x = prepared(nets.conv)
    y = torch.tensor([0, 1, 0, 1, 1])
    expected = lw.GramMatrix(model, (x, y), centered=True)
    uses = [lambda g: g.diagonal(), lambda g: g.row_sums(), lambda g: g.dense(), lambda g: g.outputs()]
    for _ in range(5):
        gram = lw.GramMatrix(model, (x, y), centered=True)
        found = run_in_threads([lambda use=use, gram=gram: use(gram) for use in uses])
        for use, value in zip(uses, found, strict=True):
            assert isinstance(value, torch.Tensor), value
            assert torch.allclose(value, use(expected))


class Stop(BaseException):
    """Like KeyboardInterrupt, which no `except Exception` catches."""


def test_interrupts_inside_a_pass_leave_models_and_switches_as_they_were(switch_often):
    model, x = prepared(nets.SmallTransformer)
    before = state(model)
    calls = iter(range(10**6))

    class Interrupted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            torch.rand(1), np.random.rand(), random.random()
            if next(calls) % 7 == 6:
                raise Stop
            return self.inner(x)

    def call():
        return lw.soft_neighbors(lw.GramMatrix(Interrupted(), lw.batches(x, size=2)))

    found = run_in_threads([call] * 4)
    assert any(isinstance(result, Stop) for result in found)
    assert_unchanged([before], [model])
    lw.soft_neighbors(lw.GramMatrix(model, x))  # nobody holds the lock


def test_calls_inside_a_call_of_the_same_thread_are_answered():
    model, x = prepared(nets.conv)
    before = state(model)
    net = lw.Network(model)
    with net.evaluation_mode():
        inner = run_in_threads([lambda: threading.current_thread().name])  # others go on
        lw.soft_neighbors(lw.GramMatrix(net, x))
        assert lw.Network(model).outputs(x).shape == (5, 2)
        assert not model.training
    assert inner[0] is not None
    assert_unchanged([before], [model])


def test_label_suspicion_leaves_generators_as_they_were_where_it_fits_a_mixture():
    model, x = nets.case(nets.mlp, 2, 120)
    y = torch.arange(120) % 2
    before = random.getstate(), np.random.get_state()[1:3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lw.label_suspicion(lw.GramMatrix(model, (x, y)))
    after = random.getstate(), np.random.get_state()[1:3]
    assert before[0] == after[0]
    assert before[1][0].tolist() == after[1][0].tolist() and before[1][1] == after[1][1]
