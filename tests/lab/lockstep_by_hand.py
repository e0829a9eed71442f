"""Lockstep through a lab: `atoll run` inside one, a rank on each host, gives the losses of one process. Run by hand, as it takes a minute:

python -m tests.lab.lockstep_by_hand
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from atoll.cluster import dump_cluster
from atoll.graph.capture import capture_program
from atoll.plan import Plan, Replica, Stage, save_plan
from atoll.script import load_job
from atoll.watch.report import read_report
from tests.lab.clusters import two_sites

SCRIPT = """
import torch
import atoll

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, x.sum().unsqueeze(0)

def build():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

job = atoll.Job(model=build, loss=loss, data=Numbers(), optimizer=torch.optim.SGD, batch_size=8, steps=5)
"""
ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]


def main() -> None:
    """Trains twice and compares."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        cluster = two_sites(hosts=1)
        (place / "train.py").write_text(SCRIPT)
        (place / "c.toml").write_text(dump_cluster(cluster))
        save_plan(plan_of(str(place / "train.py"), cluster.name), place / "plan.json")
        run = [*ATOLL, "run", str(place / "train.py")]
        subprocess.run([*run, "--alone", "--out", str(place / "alone")], check=True)
        inside = [*run, "--cluster", str(place / "c.toml"), "--plan", str(place / "plan.json"), "--out", str(place / "lab")]
        subprocess.run([*ATOLL, "lab", str(place / "c.toml"), "--impose-speeds", "--", *inside], check=True)
        alone, together = (read_report(place / name).losses for name in ("alone", "lab"))
        assert len(alone) == 5
        assert max(abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True)) < 1e-5, (alone, together)
    print("equal")


def plan_of(script: str, cluster: str) -> Plan:
    """A pipeline from one site to the other."""
    graph = capture_program(load_job(script)).graph
    layers = len(graph.layers)
    stages = [
        Stage(start=start, stop=stop, replicas=(Replica(devices=(device,), samples=(8,)),))
        for start, stop, device in ((0, 1, "oslo-0/0"), (1, layers, "rome-0/0"))
    ]
    return Plan(graph=graph.name, cluster=cluster, batch_size=8, micro_batch_size=2, stages=tuple(stages))


if __name__ == "__main__":
    main()
