"""Loading: samples that take long, four workers, and how busy the device is kept, beside PyTorch's DataLoader in a plain loop.

python benchmarks/data.py            rounds of both, in turn; a table, or --json

A sample waits (as for a disk or a network) and may compute besides (`--work`). The device is this machine's processor: a step of so many
matrix products. What is compared is the time of a step, from the step after the workers have begun to the last.
"""

import argparse
import time
from statistics import median

import torch
from report import print_json, print_table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from atoll.events import AnyEvent, StepFinished
from atoll.job import Job

FIRST = 4  # steps that are left out: workers begin, and what they prefetched is used up


class Slow:
    """Samples that take `wait_seconds` to come and `work_seconds` of the processor."""

    def __init__(self, count: int, wait_seconds: float, work_seconds: float) -> None:
        self.count, self.wait_seconds, self.work_seconds = count, wait_seconds, work_seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        until = time.thread_time() + self.work_seconds
        time.sleep(self.wait_seconds)
        row = torch.rand(WIDTH)
        while time.thread_time() < until:
            row = row.sin()
        return row


WIDTH = 256


class Deep(nn.Module):
    """So many matrix products that a step takes about as long as four workers take for its batch."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


def plain_steps(options: argparse.Namespace, data: Slow) -> list[float]:
    """Seconds of the steps of a loop over a DataLoader; workers stay, as they do for Atoll."""
    model = Deep(options.layers)
    optimizer, seconds = torch.optim.SGD(model.parameters(), 1e-3), []
    batches = iter(DataLoader(data, batch_size=options.batch, shuffle=True, num_workers=options.workers))  # type: ignore[arg-type]
    for _ in range(options.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        value = loss(model, next(batches))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value.item()
        seconds.append(time.perf_counter() - began)
    return seconds[FIRST:]


def atoll_steps(options: argparse.Namespace, data: Slow, workers: int) -> list[float]:
    """Seconds of the steps of the same job under Atoll."""
    seconds: list[float] = []

    def keep(event: AnyEvent) -> None:
        if isinstance(event, StepFinished):
            seconds.append(event.seconds)

    job = Job(
        model=lambda: Deep(options.layers),
        loss=loss,
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
        batch_size=options.batch,
        steps=options.steps,
        num_workers=workers,
        callbacks=[keep],
    )
    job.run(progress=False, device="cpu")
    return seconds[FIRST:]


def main() -> None:
    """Both in turn, so that what else the machine does is shared fairly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--wait", type=float, default=20.0, help="milliseconds a sample waits")
    parser.add_argument("--work", type=float, default=0.0, help="milliseconds of processor time a sample takes besides")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Slow(options.batch * options.steps, options.wait / 1e3, options.work / 1e3)
    found: dict[str, list[float]] = {"DataLoader": [], "Atoll": []}
    for _ in range(options.rounds):
        found["DataLoader"].append(sum(plain_steps(options, data)) / (options.steps - FIRST))
        found["Atoll"].append(sum(atoll_steps(options, data, options.workers)) / (options.steps - FIRST))
    none = sum(atoll_steps(options, data, 0)) / (options.steps - FIRST)
    ratios = [plain / ours for plain, ours in zip(found["DataLoader"], found["Atoll"], strict=True)]
    result = {
        "workers": options.workers,
        "sample_milliseconds": {"wait": options.wait, "work": options.work},
        "step_milliseconds": {name: [1e3 * seconds for seconds in rounds] for name, rounds in found.items()} | {"no workers": [1e3 * none]},
        "ratio": median(ratios),
        "ratios": ratios,
    }
    if options.json:
        print_json(result)
        return
    rows = [[name, 1e3 * median(rounds), 1e3 * min(rounds), 1e3 * max(rounds)] for name, rounds in found.items()]
    title = (
        f"A step of {options.batch} samples of {options.wait:g} + {options.work:g} ms, {options.workers} workers, {options.rounds} rounds"
    )
    print_table(title, ["", "ms (median)", "least", "most"], [*rows, ["Atoll, no workers", 1e3 * none, 1e3 * none, 1e3 * none]])
    print(f"\n  the device is kept {median(ratios):.3f} times as busy as by the DataLoader (rounds {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
