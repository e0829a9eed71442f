"""`atoll export RUN --to model.safetensors`: a run's weights for plain PyTorch and transformers."""

import re
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.output import say, working
from atoll.errors import CheckpointError
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_bytes

__all__ = ["export"]

_BESIDE = ("config.json", "generation_config.json", "adapter_model.safetensors", "adapter_config.json")  # of a directory of weights
_OTHERS = (".pt", ".pth", ".bin", ".ckpt", ".safetensor")  # what a file of weights might be called


def export(
    run: Annotated[Path, typer.Argument(help="The directory that `atoll run` wrote.", metavar="RUN")],
    to: Annotated[
        Path,
        typer.Option(help="A file ending in .safetensors, or a directory for `from_pretrained`: of a Hugging Face model, or an adapter's."),
    ],
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step, instead of the last.", min=0)] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that atoll.BestCheckpoint kept.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The averages of Job(ema_decay=…) instead of the weights.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a PEFT adapter into its base model, and write that.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace weights that are there already.")] = False,
) -> None:
    """Write the weights of a run's checkpoint with the model's own names."""
    _check(run, to)
    if merge and to.suffix == ".safetensors":
        raise CheckpointError(f"--to {to}: --merge writes a directory, with the configuration; give one")
    if best and step is not None:
        raise CheckpointError("give either --best or --step")
    before = _weights_at(to)
    if before and not overwrite:
        raise CheckpointError(f"--to {to}: {before[0]} is there already; give another name, or --overwrite to replace it")
    with working(f"exporting {run}"):
        from atoll.runtime.checkpoint.export import export as write  # PyTorch takes seconds to load: mistakes are told before
        from atoll.runtime.checkpoint.export import export_merged, kept_step

        step = kept_step(run, "best") if best else step
        exported = (export_merged if merge else write)(run, to, step=step, ema=ema)
        for path in set(before) - set(exported.files):  # parts of other weights, which a reader would take for these
            path.unlink(missing_ok=True)
    files = ", ".join(str(path) for path in exported.files)
    say(f"wrote {exported.tensors} tensors of step {exported.step}, {format_bytes(exported.size_bytes)}: {files}")


def _weights_at(to: Path) -> list[Path]:
    """Files there that weights of this name are in, as they were written before, in one part or several."""
    folder, stem = (to.parent, to.stem) if to.suffix == ".safetensors" else (to, "model")
    names = [f"{stem}.safetensors", f"{stem}.safetensors.index.json", *(_BESIDE if folder is to else [])]
    parts = re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}\.safetensors")
    found = sorted(path for path in folder.iterdir() if parts.fullmatch(path.name)) if folder.is_dir() else []
    return [folder / name for name in names if (folder / name).exists()] + found


def _check(run: Path, to: Path) -> None:
    directory = RunDirectory(run)
    if not run.exists():
        raise CheckpointError(f"{run}: there is no such directory; `atoll run SCRIPT --out DIRECTORY` makes one")
    if directory.events.exists() and not any(directory.checkpoints.glob("step-*")):
        advice = "a run saves at its end, and while it trains with --checkpoint-every; --alone saves nothing"
        raise CheckpointError(f"{run}: this run has no checkpoint to export; {advice}")
    if to.suffix != ".safetensors" and (to.is_file() or (to.suffix in _OTHERS and not to.is_dir())):
        raise CheckpointError(f"--to {to}: give a file whose name ends in .safetensors, or a directory; other formats are not written")
    if to.suffix == ".safetensors" and to.is_dir():
        raise CheckpointError(f"--to {to}: is a directory; give a file, or a directory of another name")
