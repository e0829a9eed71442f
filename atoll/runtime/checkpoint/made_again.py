"""Weights that a checkpoint leaves out, for who has nothing but a run's directory: its script's job makes them again."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from atoll.errors import AtollError, CheckpointError
from atoll.job import Job
from atoll.runtime.checkpoint.manifest import Rebuilt
from atoll.runtime.checkpoint.rebuilt import check_rebuilt, tensor_digests
from atoll.runtime.run_directory import RunDirectory
from atoll.script import load_job

__all__ = ["MadeAgain", "make_again"]


class MadeAgain:
    """One tensor after another, each as it was when the run began; what comes from files is read when it is asked for."""

    def __init__(self, job: Job, rebuilt: Mapping[str, Rebuilt], where: str) -> None:
        """CheckpointError where any of them is not what it was."""
        model, self._files = job.build_to_take_parts_from()
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters() if name in rebuilt}
        for name, one in rebuilt.items():
            found = tensor_digests({name: self[name]}) if name in self._parameters else {}
            check_rebuilt(where, {name: one}, found)

    def __getitem__(self, name: str) -> Tensor:
        kept = self._parameters[name]
        if self._files is None or name not in self._files.names:
            return kept
        value = torch.empty_like(kept)
        self._files.fill([(name, tuple(slice(0, size) for size in value.shape), value)])
        return value


def make_again(run: Path, checkpoint: Path, rebuilt: Mapping[str, Rebuilt]) -> MadeAgain:
    """What a checkpoint of a run leaves out. CheckpointError where the run's script cannot make it."""
    found = next((path for path in (run, run.parent, run.parent.parent) if (path / "run.json").is_file()), None)
    name = next(iter(rebuilt))
    what = f"{checkpoint}: it leaves out weights that are not trained ({name!r}, …), which the run's script makes again"
    if found is None:
        raise CheckpointError(f"{what}, and there is no run.json to tell which that is; give the run's whole directory")
    try:
        settings = RunDirectory(found).settings()
        job = load_job(settings.script, settings.arguments)
    except AtollError as error:
        python = "In Python, job.load_model(RUN) gives the whole model"
        raise CheckpointError(f"{what}, but that does not work: {error}. {python}; Job(store_frozen=True) stores them") from error
    return MadeAgain(job, rebuilt, str(checkpoint))
