"""Small networks of every kind, in float64, with random running statistics."""

from types import SimpleNamespace

import torch
from torch import nn


class Tied(nn.Module):
    """One weight used twice, once transposed, and a module called twice."""

    def __init__(self, d):
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.twice = nn.Linear(4, 4)
        self.out = nn.Linear(4, d)

    def forward(self, x):
        x = torch.tanh(self.decode(torch.tanh(self.encode(x))) + x @ self.encode.weight)
        return self.out(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class SmallTransformer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 3, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(4, d)

    def forward(self, x):
        return self.out(self.encoder(x + self.position).mean(1))


class Recurrent(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, d)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Added(nn.Module):
    """Layers that get the same output gradient, and an output that is read twice."""

    def __init__(self, d):
        super().__init__()
        self.one, self.other, self.skip = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(3, d)
        self.out = nn.Linear(5, d)

    def forward(self, x):
        return self.out(torch.tanh(self.one(x) + self.other(x * x))) + self.skip(x)


def mlp(d):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, d))


def conv(d):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.PReLU(3),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, d),
    )


SHAPES = {
    mlp: (3,),
    conv: (1, 5, 5),
    Tied: (4,),
    SmallTransformer: (3, 4),
    Recurrent: (4, 3),
    Added: (3,),
}


def case(make, d, n, seed=0):
    """A net in training mode with lived-in buffers, and n inputs."""
    torch.manual_seed(seed)
    model = make(d).double()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + (0.5 if "var" in name else 0))
    return model.train(), torch.randn(n, *SHAPES[make], dtype=torch.float64)


class Settings(nn.Module):
    """A forward that reads numbers, functions, containers and objects from its attributes."""

    def __init__(self, scale=1.0, activation=torch.tanh):
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(3, 4), nn.Linear(4, 2), nn.Identity()
        self.scale, self.activation = scale, activation
        self.options, self.config, self.calls = {"power": 1}, SimpleNamespace(shift=0.0), 0

    def forward(self, x):
        self.calls += 1
        hidden = self.activation(self.scale * self.first(x) + self.config.shift)
        return self.last(self.gate(hidden) ** self.options["power"])


class Words(nn.Module):
    """Scores of texts of any number of tokens: of one, a linear layer has one position."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(20, 16), nn.Linear(16, 24), nn.Linear(24, 3)

    def forward(self, tokens):
        return self.last(torch.tanh(self.first(self.table(tokens))).mean(1))


class Cubed(Settings):
    """Another forward with the same attributes."""

    def forward(self, x):
        return self.last(self.first(x) ** 3)


CHANGES = {
    "number": lambda model: setattr(model, "scale", 3.0),
    "function": lambda model: setattr(model, "activation", torch.sin),
    "module": lambda model: setattr(model, "gate", nn.Softplus()),
    "container": lambda model: model.options.update(power=2),
    "object": lambda model: setattr(model.config, "shift", 1.0),
    "hook": lambda model: model.first.register_forward_hook(lambda *given: 3 * given[2]),
    "class": lambda model: setattr(model, "__class__", Cubed),
    "forward": lambda model: setattr(model, "forward", lambda x: model.last(model.first(x) ** 2)),
}
