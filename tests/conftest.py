import pytest
import torch
from hypothesis import settings

settings.register_profile("likewise", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("likewise")


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
