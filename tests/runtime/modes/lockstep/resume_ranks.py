"""Runs that stop under one plan and go on under another, in real processes, compared with one that was never stopped.

python resume_ranks.py FOLDER JOB …: runs every case of these jobs and writes what each rank found at the end to FOLDER/<rank>.json.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.optim.lr_scheduler import CosineAnnealingLR

sys.path.insert(0, str(Path(__file__).parents[4]))

from atoll import Job
from atoll.events import AnyEvent, Observer, StepFinished, StopTraining
from atoll.graph.capture import capture_program
from atoll.plan import Plan, validate
from atoll.runtime.checkpoint.export import export
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rendezvous import joined
from atoll.runtime.modes.lockstep.role import Role
from atoll.runtime.modes.lockstep.worker import RankTraining
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.runtime.training import train
from tests.process_group import fork_ranks
from tests.runtime.modes.lockstep.equality_cases import EQUAL, EXPERTS_SHARDED, PIPE, TENSOR, TENSOR_UNEQUAL, UNEQUAL, plan_of
from tests.runtime.modes.lockstep.equality_models import JOBS, Adapted, adam, gpt2, job, own_loss
from tests.runtime.modes.lockstep.equality_ranks import Subject, differences, subject_of

STOP, PROCESSES = 4, 4
SINGLE = "4 | a=8"
CALLED_BACK = "dropout"  # of this job's runs the last rank, and only it, has a callback, which asks to stop
schedule = partial(CosineAnnealingLR, T_max=10)


def frozen_beginning() -> torch.nn.Module:
    """The first half is frozen: a stage without anything to train."""
    model: Any = gpt2(4)
    model.requires_grad_(False)
    model.transformer.h[3].requires_grad_(True)
    model.lm_head = Adapted(model.lm_head)
    return model  # type: ignore[no-any-return]


OWN_JOBS = {
    "scheduled": lambda: job(gpt2, max_grad_norm=0.5, optimizer=adam, scheduler=schedule),
    "frozen beginning": lambda: job(frozen_beginning, own_loss, scheduler=schedule),
}

# Replicas and lanes see other samples than one process does: what is evaluated is the statistics of a stage's first rank.
FIRSTS_STATISTICS: tuple[tuple[str, str, str], ...] = (
    ("batch-norm", "2 | a=4 b=4", "4 | (a b)=4,4"),
    ("batch-norm", "2 | a=4 b=4 | c=8", "2 | a=8 | b=2 c=6"),
)

CASES: tuple[tuple[str, str, str], ...] = (
    ("scheduled", SINGLE, "2 | a=3 b=3 c=2"),
    ("scheduled", "4 | sharded: (a b)=5,3", "2 | a=8 | b=8 | c=8"),
    ("scheduled", TENSOR_UNEQUAL, "2 | a=5 b=3"),
    ("scheduled", "4 | tensor=2 sharded: (a b c d)=4,4", "1 | a=8 | b=5 c=3"),
    ("scheduled", "1 interleaved | a=8 | b=8 | a=8 | b=8", "4 | tensor=2: (a b)=5@3:1 (c d)=3"),
    ("mixtral", EXPERTS_SHARDED, "2 | a=4 b=2 c=2"),
    ("mixtral", "4 | expert: (a b)=4,4 | c=8", TENSOR),
    ("dropout", "2 | a=4 b=4", "2 | a=8 | recompute: b=8"),
    ("batch-norm", "2 | recompute: a=8 | b=8", "2 | a=8"),
    *FIRSTS_STATISTICS,
    ("frozen beginning", PIPE, UNEQUAL),
    ("frozen beginning", EQUAL, "2 | a=8 | b=8 | c=8"),
    ("classifier", "4 | split={last}: (a b)=5,3", EQUAL),
    ("fp16", UNEQUAL, PIPE),
)


def role(rank: int, world: int, port: int, generation: int) -> Role:
    place = {"rank": rank, "world_size": world, "local_rank": rank, "local_world_size": world}
    return Role(**place, master_addr="127.0.0.1", master_port=port, source="atoll", generation=generation, store_outside=True)


def part_of_run(
    subject: Subject, plan: Plan, rank: int, port: int, generation: int, directory: Path, stop: int | None, by_callback: bool
) -> dict[str, float]:
    """This rank's part of a run under one plan: all that is left of it, or up to and with a step."""
    layout, cpu = Layout(plan), torch.device("cpu")
    with joined(role(rank, layout.world_size, port, generation), layout.devices[rank], device=cpu) as run:

        def ask_to_stop(event: AnyEvent) -> None:
            if isinstance(event, StepFinished) and event.step + 1 == stop:
                signal.raise_signal(signal.SIGTERM)  # as Ctrl-C does: heard by all at the end of the next step

        def callback(event: AnyEvent) -> None:
            if isinstance(event, StepFinished) and event.step == stop:
                raise StopTraining

        observers: list[Observer] = [ask_to_stop]
        if by_callback:
            observers = [callback] if rank == layout.world_size - 1 else []
        own = dataclasses.replace(subject.job, callbacks=observers if by_callback else ())
        place, settings = RunDirectory(directory), RunSettings(script="")
        session = RankTraining(own, layout, subject.captured, subject.evaluated, cpu, run, place, settings, None)
        with session.under_way(observers):
            train(session)
        stopped = "stopped" if by_callback else "interrupted"
        assert (session.reason, session.trainer.last_step) == (("done", 10) if stop is None else (stopped, stop))
        if stop is not None:
            return {}
        found = differences(session.trainer, session.work, subject.reference)
        if rank == 0 and session.trainer.evaluations:
            evaluated = session.trainer.evaluations[-1].loss
            assert evaluated is not None
            found["exported"] = abs(evaluated - loss_of_exported(own, directory)) / abs(evaluated)
        return found


def loss_of_exported(job: Job, run: Path) -> float:
    """The evaluation data's loss in plain PyTorch, of the weights and running statistics that a run exports."""
    export(run, run / "model.safetensors")
    model = job.build_model("cpu")
    model.load_state_dict(load_file(run / "model.safetensors"))
    model.eval()
    data: Any = job.eval_dataset
    with torch.no_grad():
        return float(job.loss(model, job.collate_fn([data[i] for i in range(len(data))])))


def rank_process(rank: int, port: int, folder: Path, subjects: dict[str, Subject], cases: list[tuple[str, str, Plan, Plan]]) -> None:
    found: dict[str, Any] = {}
    for number, (task, name, before, after) in enumerate(cases):
        directory = folder / f"run-{number}"
        try:
            for half, plan in enumerate((before, after)):
                if rank < Layout(plan).world_size:
                    stop = STOP if half == 0 else None
                    found[task] = part_of_run(subjects[name], plan, rank, port, 2 * number + half, directory, stop, name == CALLED_BACK)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # nobody waits for this rank in the next case
        finally:
            (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def subjects_of(names: list[str]) -> dict[str, Subject]:
    found = {}
    for name in names:
        made: Job = (OWN_JOBS.get(name) or JOBS[name])()
        # an interrupted run is not evaluated where it stops, so only the end is compared
        made = dataclasses.replace(made, eval_every=None, metrics={})
        found[name] = subject_of(made, capture_program(made))
    return found


def main(folder: Path, jobs: list[str]) -> int:
    """Capture once, then go on as so many processes."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ports, stop = fork.Queue(), fork.Event()
    host = fork.Process(target=host_store, args=(ports, stop))
    host.start()
    port = ports.get()
    subjects = subjects_of(jobs)
    cases = []
    for name, before, after in (case for case in CASES if case[0] in jobs):
        graph = subjects[name].captured.graph
        plans = [plan_of(graph, text, subjects[name].job.batch_size) for text in (before, after)]
        for plan in plans:
            validate(plan, graph)
        cases.append((f"{name}: {before} → {after}", name, plans[0], plans[1]))
    failed = fork_ranks(PROCESSES, rank_process, port, folder, subjects, cases)
    stop.set()
    host.join()
    return failed


def host_store(ports: Any, stop: Any) -> None:
    """The launcher's part: a store outside of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    stop.wait()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
