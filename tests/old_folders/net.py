"""The network of tests/old_folders/run-0.1.0."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
