import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from serve_process import CLASSES, Server

from likewise.cli.app import exit_code

NET = """
import torch
from torch import nn

def images():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

def rows():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

def texts():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(64, 8), nn.Linear(8, 3))

def tokens(text):
    if "crash" in text:
        raise RuntimeError("no such word")
    return torch.tensor([(sum(map(ord, word)) % 64) for word in (text.split() + ["."] * 6)[:6]])
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Images, rows and texts of three classes, a run of the images with its index, indexes of the others."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("serve")
    (folder / "net.py").write_text(NET)
    chance = np.random.default_rng(0)
    x, y = [], []
    for number in range(150):
        truth = number % 3
        pixels = chance.uniform(0, 0.4, (8, 8))
        pixels[2 * truth] += 0.6
        label = (truth + 1) % 3 if number % 10 == 3 else truth
        (folder / "images" / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8)).save(
            folder / "images" / CLASSES[label] / f"{number:03}.png"
        )
        x.append(torch.tensor(pixels, dtype=torch.float32)[None])
        y.append(label)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(torch.stack(x)), torch.tensor(y)).backward()
        optimizer.step()
    save_file(net.state_dict(), folder / "net.safetensors")
    rows = ["b,a,kind,d,c"]
    rows += [
        ",".join(f"{v:.3f}" if i != 2 else CLASSES[n % 3] for i, v in enumerate(chance.normal(size=5)))
        for n in range(40)
    ]
    (folder / "rows.csv").write_text("\n".join(rows) + "\n")
    texts = [
        f'"{" ".join(chance.choice(["red", "green", "blue", "fast"], 5))}",{CLASSES[n % 3]}'
        for n in range(40)
    ]
    (folder / "texts.csv").write_text("text,kind\n" + "\n".join(texts) + "\n")
    words = {
        "run": [
            "analyze",
            "net.py:images",
            "images",
            "--weights",
            "net.safetensors",
            "--gray",
            "--sketch",
            "64",
        ],
        "rows": ["index", "net.py:rows", "rows.csv", "--label", "kind", "--width", "64"],
        "texts": [
            "index",
            "net.py:texts",
            "texts.csv",
            "--label",
            "kind",
            "--text",
            "text",
            "--width",
            "64",
        ],
    }
    words["texts"] += ["--prepare", "net.py:tokens"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, given in words.items():
            assert exit_code([*given, "--out", name, "--quiet"]) == 0
    return folder


@pytest.fixture(scope="session")
def served(place):
    """The run of images, served."""
    server = Server(place, "run")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def start(place):
    return lambda *words: Server(place, *words)
