"""Two processes that train jobs under plans, for tests of what training has besides steps: weights from files, adapters, callbacks.

python training_ranks.py FOLDER KIND: the cases `training_cases.CASES[KIND]` are run; FOLDER/<rank>.json says what the rank found of each.
"""

import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from atoll.graph.capture import Captured, capture_program
from atoll.plan import Plan, validate
from atoll.runtime.evaluated_programs import capture_evaluated
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rendezvous import joined
from atoll.runtime.modes.lockstep.worker import RankTraining
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.runtime.stage.compilation import compiler_for
from atoll.runtime.training import train
from tests.process_group import fork_ranks
from tests.runtime.modes.lockstep.equality_cases import plan_of
from tests.runtime.modes.lockstep.resume_ranks import host_store, role
from tests.runtime.training_cases import CASES, Case

CPU = torch.device("cpu")
Ready = tuple[Case, Captured, dict[str, Captured], list[Plan]]


def run_case(ready: Ready, rank: int, port: int, generation: int, directory: Path) -> dict[str, Any]:
    """This rank's part of a case: the job under its first plan until it stops, then under the next."""
    case, captured, evaluated, plans = ready
    found: dict[str, Any] = {}
    for number, plan in enumerate(plans):
        layout = Layout(plan)
        with joined(role(rank, layout.world_size, port, generation + number), layout.devices[rank], device=CPU) as run:
            job = case.job_of(number)
            saved_in = RunDirectory(directory) if case.saved else None
            session = RankTraining(
                job, layout, captured, evaluated, CPU, run, saved_in, RunSettings(script=""), None, compiler_for(job, CPU)
            )
            with session.under_way(job.callbacks if rank == 0 else ()):
                train(session)
                session.bring_model()
            found = case.look(session) | {"losses": session.trainer.losses}
    return found


def rank_process(rank: int, port: int, folder: Path, cases: list[Ready]) -> None:
    found: dict[str, Any] = {}
    try:
        for number, ready in enumerate(cases):
            found[ready[0].name] = run_case(ready, rank, port, 4 * number, folder / ready[0].name)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def ready_to_run(case: Case, known: dict[int, tuple[Captured, dict[str, Captured]]]) -> Ready:
    """Capturing takes longest: once a job."""
    job = case.job_of(0)
    if id(case.job) not in known:
        known[id(case.job)] = capture_program(job, divided=True), capture_evaluated(job)
    captured, evaluated = known[id(case.job)]
    plans = [plan_of(captured.graph, text, job.batch_size) for text in case.plans]
    for plan in plans:
        validate(plan, captured.graph)
    return case, captured, evaluated, plans


def main(folder: Path, kind: str) -> int:
    """Capture, then go on as two processes."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ports, stop = fork.Queue(), fork.Event()
    host = fork.Process(target=host_store, args=(ports, stop))
    host.start()
    known: dict[int, tuple[Captured, dict[str, Captured]]] = {}
    failed = fork_ranks(2, rank_process, ports.get(), folder, [ready_to_run(case, known) for case in CASES[kind](folder)])
    stop.set()
    host.join()
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
