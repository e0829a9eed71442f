"""A rank that trains nothing: it reduces a number, and does at step 3 what its script says. Used by the tests of launching and failing."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from atoll.events import AnyEvent
from atoll.runtime.modes.lockstep.heartbeat import Doing, read_heartbeats
from atoll.runtime.modes.lockstep.rendezvous import RankMembership, joined
from atoll.runtime.modes.lockstep.role import Role, find_role
from atoll.watch.describe import describe_event


def users_loss() -> None:
    raise ArithmeticError("the loss went wrong")


def wait_until_known(run: RankMembership, action: str) -> None:
    """Until every other rank has read what this one is doing: it has finished a round that began after this was written."""
    run.doing(action)
    everybody, me = range(run.role.world_size), run.role.rank
    while read_heartbeats(run.store, range(me, me + 1))[me].doing != action:
        time.sleep(0.05)
    before = read_heartbeats(run.store, everybody)
    while any(beat.count < before[rank].count + 2 for rank, beat in read_heartbeats(run.store, everybody).items()):
        time.sleep(0.05)


def act(run: RankMembership, action: str) -> None:
    wait_until_known(run, "1B3")
    match action:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            users_loss()
        case "block":
            run.doing(Doing("reading sample 12 of the data", "user"))
            while True:  # until the others give up
                time.sleep(0.05)
        case "interrupt":
            os.kill(os.getppid(), signal.SIGINT)


def show(event: AnyEvent) -> None:
    print(f"atoll: {describe_event(event)}", file=sys.stderr, flush=True)


def train(role: Role, culprit: int, action: str) -> None:
    times = {"deadline_seconds": 2.0 if action == "freeze" else 60.0, "timeout_seconds": 20.0 if action == "block" else 600.0}
    with joined(role, f"oslo/cpu{role.local_rank}", "stage 1", observer=show, **times) as run:
        for step in range(1, 7 if action == "train" else 10_000):
            run.doing(Doing("reducing", "others"), step)
            total = torch.tensor([1.0, 1.0, float(run.stop_asked)])
            dist.all_reduce(total)
            assert total[:2].tolist() == [role.world_size] * 2
            if step == 2:
                run.saved(2)
            if step == 3 and role.rank == culprit:
                act(run, action)
            if total[2]:
                sys.stdout.write(f"rank {role.rank} stops after step {step}\n")
                break
        else:
            sys.stdout.write(f"rank {role.rank} trained {step} steps\n")  # whole: `print` writes the end of the line apart


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = find_role(os.environ)
    assert found is not None
    train(found, int(sys.argv[1]), sys.argv[2])
