"""Small models of every kind of layer and of every way to use a parameter, with inputs, in float64."""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

CASES = {}


def case(name, shape=(6,), integers=None):
    """Register a model; inputs are (n, *shape), normal, or integers below a bound."""

    def register(make):
        CASES[name] = (make, shape, integers)
        return make

    return register


def head(i, d=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(i, d))


def of(name, n=5):
    """The model, with lived-in buffers, and n inputs."""
    make, shape, integers = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    for key, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + ("var" in key))
    if integers:
        return model, torch.randint(0, integers, (n, *shape))
    return model, torch.randn(n, *shape, dtype=torch.float64)


class Lambda(nn.Module):
    """A forward function with some modules and parameters."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


# Layers
case("Linear")(lambda: nn.Linear(6, 2))
case("Linear on tokens", (3, 6))(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), head(12)))
case("Linear on a grid", (2, 3, 6))(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), head(24)))
case("Linear without bias")(lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), head(4)))
for dims, size in ((1, (8,)), (2, (7, 6)), (3, (5, 4, 5))):
    conv, transposed = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
    for label, options in {
        "": {},
        ", stride and padding": dict(stride=2, padding=1),
        ", same padding": dict(padding="same"),
        ", dilation": dict(dilation=2, padding=2),
        ", groups": dict(groups=2, bias=False),
        ", circular padding": dict(padding=1, padding_mode="circular"),
    }.items():
        case(f"Conv{dims}d{label}", (2, *size))(
            lambda conv=conv, o=options: nn.Sequential(
                conv(2, 4, 3, **o), nn.Tanh(), nn.Flatten(), LazyHead()
            )
        )
    case(f"ConvTranspose{dims}d", (2, *size))(
        lambda t=transposed: nn.Sequential(
            t(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh(), nn.Flatten(), LazyHead()
        )
    )


class LazyHead(nn.Module):
    """The mean of thirds of the features, mixed: no need to know how many there are."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 2)

    def forward(self, x):
        return self.mix(torch.stack([part.mean(1) for part in x.tensor_split(3, 1)], 1))


norm = lambda layer: nn.Sequential(nn.Conv2d(2, 4, 3), layer, nn.Tanh(), nn.Flatten(), LazyHead())
case("BatchNorm2d", (2, 5, 5))(lambda: norm(nn.BatchNorm2d(4)))
case("BatchNorm1d")(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), head(4)))
case("GroupNorm", (2, 5, 5))(lambda: norm(nn.GroupNorm(2, 4)))
case("InstanceNorm2d", (2, 5, 5))(lambda: norm(nn.InstanceNorm2d(4, affine=True)))
case("LayerNorm", (3, 6))(lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), head(12)))
case("LayerNorm over two dimensions", (3, 6))(
    lambda: nn.Sequential(nn.LayerNorm((3, 6)), nn.Tanh(), head(18))
)
case("RMSNorm", (3, 6))(lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 4), nn.Tanh(), head(12)))
case("Embedding", (4,), 7)(lambda: nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), head(12)))
case("Embedding with padding index", (4,), 7)(
    lambda: nn.Sequential(nn.Embedding(7, 3, 0), nn.Tanh(), head(12))
)
case("EmbeddingBag", (4,), 7)(lambda: nn.Sequential(nn.EmbeddingBag(7, 3), nn.Tanh(), head(3)))
case("PReLU, one slope")(lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(), head(4)))
case("PReLU, a slope a channel", (2, 5, 5))(lambda: norm(nn.PReLU(4)))
case("Bilinear")(lambda: Lambda(lambda m, x: m.b(x[:, :3], x[:, 3:]), b=nn.Bilinear(3, 3, 2)))
case("MultiheadAttention", (3, 4))(
    lambda: Lambda(
        lambda m, x: m.h(m.a(x, x, x)[0]), a=nn.MultiheadAttention(4, 2, batch_first=True), h=head(12)
    )
)
case("MultiheadAttention, sequence first", (3, 4))(
    lambda: Lambda(
        lambda m, x: m.h(m.a(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)),
        a=nn.MultiheadAttention(4, 2),
        h=head(12),
    )
)
case("TransformerEncoderLayer", (3, 4))(
    lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), head(12))
)
case("TransformerDecoderLayer", (3, 4))(
    lambda: Lambda(
        lambda m, x: m.h(m.t(x, x)), t=nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), h=head(12)
    )
)
for name in ("RNN", "LSTM", "GRU"):
    case(name, (4, 3))(
        lambda n=name: Lambda(
            lambda m, x: m.h(m.r(x)[0][:, -1]), r=getattr(nn, n)(3, 4, batch_first=True), h=head(4)
        )
    )
case("LSTM, two layers, both directions", (4, 3))(
    lambda: Lambda(
        lambda m, x: m.h(m.r(x)[0][:, -1]),
        r=nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
        h=head(8),
    )
)

# Ways to use a parameter
case("tied weights")(
    lambda: Lambda(
        lambda m, x: m.h(torch.tanh(F.linear(torch.tanh(m.a(x)), m.a.weight.T))), a=nn.Linear(6, 4), h=head(6)
    )
)
case("two layers added")(
    lambda: Lambda(
        lambda m, x: m.head(torch.tanh(m.one(x) + m.other(x * x))),
        one=nn.Linear(6, 4),
        other=nn.Linear(6, 4),
        head=nn.Linear(4, 2),
    )
)
case("a module called twice")(
    lambda: Lambda(lambda m, x: m.h(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(6, 6), h=head(6))
)
case("a convolution called twice", (2, 5, 5))(
    lambda: nn.Sequential(*[nn.Conv2d(2, 2, 3, padding=1)] * 2, nn.Tanh(), nn.Flatten(), LazyHead())
)
case("embedding tied to the output", (4,), 7)(
    lambda: Lambda(lambda m, x: F.linear(torch.tanh(m.e(x).mean(1)), m.e.weight), e=nn.Embedding(7, 3))
)
case("F.linear on raw parameters")(
    lambda: Lambda(
        lambda m, x: m.h(torch.tanh(F.linear(x, m.w, m.b))), w=parameter(4, 6), b=parameter(4), h=head(4)
    )
)
case("matmul with a raw parameter")(
    lambda: Lambda(lambda m, x: m.h(torch.tanh(x @ m.w + m.b)), w=parameter(6, 4), b=parameter(4), h=head(4))
)
case("addmm, as Hugging Face's Conv1D", (3, 6))(
    lambda: Lambda(
        lambda m, x: m.h(torch.addmm(m.b, x.view(-1, 6), m.w).view(-1, 3, 4).tanh()),
        w=parameter(6, 4),
        b=parameter(4),
        h=head(12),
    )
)
case("einsum with a raw parameter", (3, 6))(
    lambda: Lambda(
        lambda m, x: m.h(torch.einsum("nti,io->nto", x, m.w).tanh()), w=parameter(6, 4), h=head(12)
    )
)
case("scale and shift")(
    lambda: Lambda(lambda m, x: m.h(torch.tanh(x * m.s + m.t)), s=parameter(6), t=parameter(1, 6), h=head(6))
)
case("class token and positions", (3, 4))(
    lambda: Lambda(
        lambda m, x: m.h(m.e(torch.cat([m.c.expand(len(x), -1, -1), x], 1) + m.p[:, :4])),
        c=parameter(1, 1, 4),
        p=parameter(1, 6, 4),
        e=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        h=head(16),
    )
)
case("positions by an embedding", (4,), 7)(
    lambda: Lambda(
        lambda m, x: m.h(torch.tanh(m.e(x) + m.p(torch.arange(x.shape[1], device=x.device)))),
        e=nn.Embedding(7, 3),
        p=nn.Embedding(9, 3),
        h=head(12),
    )
)
case("weight_norm")(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh(), head(4)))
case("spectral_norm", (2, 5, 5))(
    lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(2, 4, 3)), nn.Tanh(), nn.Flatten(), LazyHead()
    )
)
case("orthogonal")(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), head(6)))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


def symmetric():
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), head(6))


case("a parametrization of one's own")(symmetric)


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(6, 4), parameter(2, 6), parameter(4, 2)
        self.base.requires_grad_(False)
        self.out = head(4)

    def forward(self, x):
        return self.out(torch.tanh(self.base(x) + x @ self.a.T @ self.b.T))


case("LoRA adapter")(LoRA)


def frozen():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), head(4))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


case("frozen parts")(frozen)
case("unused parameter")(lambda: Lambda(lambda m, x: m.a(x), a=nn.Linear(6, 2), unused=parameter(3)))
case("parameter behind no_grad")(
    lambda: Lambda(lambda m, x: m.a(x) + m.b(x).detach(), a=nn.Linear(6, 2), b=nn.Linear(6, 2))
)


def added_in_place(m, x):
    h = m.a(x)
    h += m.b
    h *= m.s
    return m.h(h.tanh())


def written_into_views(m, x):
    h = torch.zeros(len(x), 2, 6, dtype=x.dtype)
    h[:, 0] = x
    h[:, 1] = m.row
    h[:, 1, :3] -= m.part
    first = h[:, 0]
    first.mul_(m.s)  # not used again, but its base is
    return m.h(h.tanh())


def bias_with_a_fixed_part(m, x):
    bias = m.b.clone()
    bias[2:4].zero_()
    bias[:2] *= 3
    return m.h(F.linear(x, m.w, bias).tanh())


def data_added_to_a_parameter(m, x):
    h = m.p.expand(len(x), -1).clone()
    h += x
    h[:, 2] = x[:, 0] * m.s
    return m.h((h * m.p).tanh())


case("h += parameter")(
    lambda: Lambda(added_in_place, a=nn.Linear(6, 4), b=parameter(4), s=parameter(1, 4), h=head(4))
)
case("parameters written into views")(
    lambda: Lambda(written_into_views, row=parameter(6), part=parameter(3), s=parameter(6), h=head(12))
)
case("a bias of which a part is overwritten")(
    lambda: Lambda(bias_with_a_fixed_part, w=parameter(4, 6), b=parameter(4), h=head(4))
)
case("data written into a parameter's copy")(
    lambda: Lambda(data_added_to_a_parameter, p=parameter(6), s=parameter(1), h=head(6))
)

# Ways to run
case("in-place activations", (2, 5, 5))(
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 1),
        nn.ELU(inplace=True),
        nn.Flatten(),
        LazyHead(),
    )
)
case("checkpointing")(
    lambda: Lambda(
        lambda m, x: m.h(checkpoint(m.b, x, use_reentrant=False)),
        b=nn.Sequential(nn.Linear(6, 4), nn.Tanh()),
        h=head(4),
    )
)
case("channels last", (2, 5, 5))(
    lambda: Lambda(
        lambda m, x: m.c(x.contiguous(memory_format=torch.channels_last)), c=norm(nn.BatchNorm2d(4))
    )
)
case("control flow on data")(
    lambda: Lambda(
        lambda m, x: torch.cat([(m.a if row.sum() > 0 else m.b)(row[None]) for row in x]),
        a=nn.Linear(6, 2),
        b=nn.Linear(6, 2),
    )
)
case("patches folded into the batch", (1, 4, 4))(
    lambda: Lambda(
        lambda m, x: m.h(m.l(x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(-1, 4)).tanh().view(len(x), -1)),
        l=nn.Linear(4, 3),
        h=head(12),
    )
)
case("frames folded into the batch", (2, 1, 5, 5))(
    lambda: Lambda(
        lambda m, x: m.h(m.c(x.flatten(0, 1)).tanh().mean((2, 3)).view(len(x), -1)),
        c=nn.Conv2d(1, 3, 3),
        h=head(6),
    )
)


def time_major(m, x):
    flat = x.transpose(0, 1).reshape(-1, 3)  # time steps of all samples, then the next
    return m.h(m.a(flat).tanh().view(4, len(x), 4).transpose(0, 1))


def packed(m, x):
    lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    found, _ = nn.utils.rnn.pad_packed_sequence(m.r(rows)[0], batch_first=True, total_length=4)
    return m.h(found)


def without_padding(m, x):
    kept = x[..., 0] > -0.5
    rows = m.n(m.a(x[kept])).tanh()
    return m.h(torch.zeros(*x.shape[:2], 4, dtype=x.dtype).masked_scatter(kept[..., None], rows))


class Experts(nn.Module):
    """Each token goes to the best of three experts, all of them in one parameter."""

    def __init__(self):
        super().__init__()
        self.router, self.w, self.v, self.b = (
            nn.Linear(3, 3),
            parameter(3, 4, 3),
            parameter(3, 4, 3),
            parameter(3, 4),
        )
        self.h = head(12)

    def forward(self, x):
        tokens = x.reshape(-1, 3)
        scores = self.router(tokens).softmax(1)
        best = scores.argmax(1)
        found = torch.zeros_like(tokens)
        for e in best.unique():
            at = (best == e).nonzero()[:, 0]
            hidden = (tokens[at] @ self.w[e].T + self.b[e]).tanh() @ self.v[e]
            found.index_add_(0, at, hidden * scores[at, e, None])
        return self.h(found.view(len(x), -1))


case("time steps before samples, flattened", (4, 3))(
    lambda: Lambda(time_major, a=nn.Linear(3, 4), h=head(16))
)
case("packed sequences", (4, 3))(
    lambda: Lambda(packed, r=nn.LSTM(3, 2, batch_first=True, bidirectional=True), h=head(16))
)
case("rows without padding", (4, 3))(
    lambda: Lambda(without_padding, a=nn.Linear(3, 4), n=nn.LayerNorm(4), h=head(16))
)
case("experts in one parameter", (4, 3))(Experts)
case("the batch in two chunks")(
    lambda: Lambda(
        lambda m, x: m.h(torch.cat([m.a(part) * m.s for part in x.chunk(2)]).tanh()),
        a=nn.Linear(6, 4),
        s=parameter(4),
        h=head(4),
    )
)
case("the batch backwards")(
    lambda: Lambda(lambda m, x: m.h(m.a(x.flip(0)).tanh().flip(0)), a=nn.Linear(6, 4), h=head(4))
)
case("x and -x in one batch")(
    lambda: Lambda(
        lambda m, x: m.h(torch.cat(m.a(torch.cat([x, -x])).sigmoid().chunk(2), 1)),
        a=nn.Linear(6, 4),
        h=head(8),
    )
)
case("pictures sorted by brightness", (2, 5, 5))(
    lambda: Lambda(
        lambda m, x: m.c(x[(order := x.mean((1, 2, 3)).argsort())])[order.argsort()],
        c=nn.Sequential(norm(nn.BatchNorm2d(4)), nn.PReLU()),
    )
)
case("a loop over samples", (4, 3))(
    lambda: Lambda(
        lambda m, x: torch.stack([m.h(m.a(row).tanh()[None])[0] * m.s for row in x]),
        a=nn.Linear(3, 4),
        s=parameter(2),
        h=head(16),
    )
)
case("LSTMCell", (4, 3))(
    lambda: Lambda(
        lambda m, x: m.h(reduce(lambda state, step: m.c(step, state), x.unbind(1), None)[0]),
        c=nn.LSTMCell(3, 4),
        h=head(4),
    )
)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**2

    @staticmethod
    def backward(ctx, delta):
        x, w = ctx.saved_tensors
        return delta * w**2, (2 * delta * x * w).sum(0)


case("an autograd.Function of one's own")(
    lambda: Lambda(lambda m, x: m.h(Square.apply(x, m.w)), w=parameter(6), h=head(6))
)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = F.elu(self.down(x))
        y = self.out(torch.cat([a, F.elu(self.up(F.elu(self.deep(a))))], 1))
        return torch.stack([y[:, 0, :2].mean((1, 2)), y[:, 0, 2:].mean((1, 2))], 1)


case("U-Net", (2, 4, 4))(UNet)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(x + self.b(self.a(x)))


case("ResNet", (2, 5, 5))(
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), Block(), nn.MaxPool2d(2), Block(), nn.AdaptiveAvgPool2d(1), head(3)
    )
)


def hugging_face(build):
    def make():
        import transformers

        return build(transformers)

    return make


SMALL = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


class Logits(nn.Module):
    """The first logits of a Hugging Face model, of the last token if there are several."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        logits = self.model(x).logits
        return logits[:, :2] if logits.dim() == 2 else logits[:, -1, :2]


case("BERT", (5,), 20)(
    hugging_face(
        lambda t: Logits(
            t.BertForSequenceClassification(t.BertConfig(vocab_size=20, max_position_embeddings=8, **SMALL))
        )
    )
)
case("GPT-2", (5,), 20)(
    hugging_face(
        lambda t: Logits(
            t.GPT2LMHeadModel(t.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
        )
    )
)
case("Llama", (5,), 20)(
    hugging_face(
        lambda t: Logits(t.LlamaForCausalLM(t.LlamaConfig(vocab_size=20, max_position_embeddings=8, **SMALL)))
    )
)
case("ViT", (3, 8, 8))(
    hugging_face(
        lambda t: Logits(t.ViTForImageClassification(t.ViTConfig(image_size=8, patch_size=4, **SMALL)))
    )
)
case("FNet", (5,), 20)(
    hugging_face(
        lambda t: Logits(
            t.FNetForSequenceClassification(t.FNetConfig(vocab_size=20, max_position_embeddings=8, **SMALL))
        )
    )
)
case("Swin v2", (3, 8, 8))(
    hugging_face(
        lambda t: Logits(
            t.Swinv2ForImageClassification(
                t.Swinv2Config(
                    image_size=8, patch_size=2, embed_dim=4, depths=[2], num_heads=[2], window_size=2
                )
            )
        )
    )
)
case("DeBERTa", (5,), 20)(
    hugging_face(
        lambda t: Logits(
            t.DebertaForSequenceClassification(
                t.DebertaConfig(
                    vocab_size=20,
                    max_position_embeddings=8,
                    relative_attention=True,
                    pos_att_type=["c2p", "p2c"],
                    pooler_hidden_size=8,
                    **SMALL,
                )
            )
        )
    )
)
case("Funnel", (5,), 20)(
    hugging_face(
        lambda t: Logits(
            t.FunnelForSequenceClassification(
                t.FunnelConfig(
                    vocab_size=20,
                    block_sizes=[1, 1],
                    num_decoder_layers=1,
                    d_model=8,
                    n_head=2,
                    d_head=4,
                    d_inner=8,
                )
            )
        )
    )
)
EXPERTS = dict(vocab_size=20, num_key_value_heads=1, **SMALL)
case("Mixtral", (5,), 20)(
    hugging_face(
        lambda t: Logits(
            t.MixtralForCausalLM._from_config(
                t.MixtralConfig(num_local_experts=3, **EXPERTS), experts_implementation="eager"
            )
        )
    )
)
case("GPT-OSS", (5,), 20)(
    hugging_face(
        lambda t: Logits(
            t.GptOssForCausalLM._from_config(
                t.GptOssConfig(head_dim=4, num_local_experts=4, num_experts_per_tok=2, **EXPERTS),
                experts_implementation="eager",
            )
        )
    )
)
