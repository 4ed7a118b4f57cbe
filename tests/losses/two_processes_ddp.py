"""What test_training starts by torchrun: one step of DistributedDataParallel with terms."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from likewise import losses

sys.path.insert(0, str(Path(__file__).parent))
from test_training import group, term_of_a_process

torch.set_num_threads(1)
dist.init_process_group("gloo")
net, x, y = term_of_a_process(dist.get_rank())
model = nn.parallel.DistributedDataParallel(net)
term = group(model, x) + losses.two_batches(model, x[:2], x[2:])
(nn.functional.cross_entropy(model(x), y) + term).backward()
found = [p.grad.tolist() for p in net.parameters()]
(Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort while the interpreter shuts down
