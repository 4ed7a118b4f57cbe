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
