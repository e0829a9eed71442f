"""Whatever is done after a failure, what failed is what a rank says it was doing: in real processes, under torchrun's environment."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.warm import run_warm

SCRIPT = """
import torch
from torch import nn
import atoll

class Data:
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if index == 123:
            raise ValueError("corrupt sample")
        return torch.ones(8), torch.ones(2)

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def model():
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

job = atoll.Job(model=model, loss=loss, data=Data(), optimizer=torch.optim.SGD, batch_size=8, steps=100)
job.run(out="run")
"""


def test_a_sample_that_cannot_be_read_is_what_the_others_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environments = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environments.append({**os.environ, **{name: str(value) for name, value in place.items()}})
    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(lambda environment: run_warm([sys.executable, "train.py"], cwd=tmp_path, env=environment), environments))
    said = "".join(process.stdout + process.stderr for process in ended)
    assert "while reading sample 123 of the data: step " in said
    assert "told of run_finished" not in said
    assert "writing down" not in said
