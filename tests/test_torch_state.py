"""What a model keeps, overrides or fills is as before after a call."""

import pytest
import torch
from torch import nn

import likewise as lw

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


class Caching(nn.Module):
    """Keeps a tensor computed from its weights in the first call."""

    def __init__(self):
        super().__init__()
        self.v, self.w = nn.Parameter(torch.randn(2, 3)), None

    def forward(self, x):
        if self.w is None:
            self.w = self.v / self.v.norm(dim=1, keepdim=True)
        return x @ self.w.T


@pytest.mark.parametrize("engine", ["autograd", "layers"])
def test_tensors_kept_between_calls_carry_no_old_gradients(engine):
    model = Caching()
    gram = lw.GramMatrix(model, lw.batches(X, 2), kernel=lw.INNER_PRODUCT, engine=engine)
    once = lw.GramMatrix(model, lw.batches(X, 12), kernel=lw.INNER_PRODUCT, engine="autograd")
    assert torch.allclose(gram.diagonal(), once.diagonal(), rtol=1e-4)
    assert (gram.diagonal() > 0).all() and model.w is None


def test_what_overrides_train_is_not_set_off():
    class Merging(nn.Linear):
        merged = 0

        def train(self, mode=True):
            if not mode:
                self.merged += 1
                self.weight.data += 1
            return super().train(mode)

    model = Merging(3, 2)
    before = model.weight.clone()
    lw.similarity(model, X)
    assert torch.equal(model.weight, before) and model.merged == 0 and model.training


def test_neither_parameters_nor_data_are_written_to():
    embedding = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 1))
    for frozen in (False, True):
        embedding[0].weight.requires_grad_(not frozen)
        before, ids = embedding[0].weight.detach().clone(), torch.randint(0, 9, (5, 2))
        lw.soft_neighbors(lw.GramMatrix(embedding, ids))
        assert torch.equal(embedding[0].weight, before)
    data = X.clone()
    lw.similarity(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), data)
    assert torch.equal(data, X)


def test_containers_and_buffers_that_forward_fills_are_emptied_again():
    class Logging(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.log, self.memory = [], {}

        def forward(self, x):
            self.log.append(x)
            self.memory["x"] = x
            self.register_buffer("cache", torch.zeros(2))
            return super().forward(x)

    model = Logging()
    lw.similarity(model, X)
    assert model.log == [] and model.memory == {} and "cache" not in dict(model.named_buffers())


def test_a_tensor_that_the_users_call_left_behind_is_an_error_where_forward_reads_it():
    model = Caching()
    model(X)
    with pytest.raises(ValueError, match=r"keeps w, .*Clear it first \(model\.w = None"):
        lw.GramMatrix(model, X).dense()
    model.w = None
    lw.GramMatrix(model, X).dense()


class Looks(nn.Linear):
    """Keeps its last outputs for others to look at."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_a_tensor_that_forward_only_leaves_behind_is_none():
    model = Looks(3, 2)
    kept = model(X)
    torch.testing.assert_close(lw.GramMatrix(model, X).dense(), lw.GramMatrix(Looks(3, 2), X).dense())
    assert model.last is kept
    kept.sum().backward()


@pytest.mark.parametrize("warm", [False, True])
def test_cached_parametrizations_do_not_hide_gradients_and_keep_none_of_ours(warm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    expected = lw.GramMatrix(model, X).dense()
    with nn.utils.parametrize.cached():
        if warm:
            model(X)
        weight = model[0].weight if warm else None
        torch.testing.assert_close(lw.GramMatrix(model, X).dense(), expected)
        assert weight is None or model[0].weight is weight
        model(X).sum().backward()
    assert all(value.grad is not None for value in model.parameters())
