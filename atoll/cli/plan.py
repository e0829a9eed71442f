"""`atoll plan TARGET --cluster FILE`: make a plan, explain it, and write it down."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.cli.output import check_writable, headed_table, notes_view, print_json, say, titled, working
from atoll.cli.render import plan_view, show
from atoll.cli.target import Target, load_target
from atoll.cli.trial import grounds_without_trial, times_by
from atoll.cluster import Cluster, load_cluster
from atoll.codec import CodecChoice
from atoll.cost import Calibration, Cost, Evaluator, load_calibration, staleness_effect
from atoll.errors import PlanError
from atoll.graph import Graph
from atoll.plan import Plan, diff, load_plan, save_plan, to_text, validate
from atoll.plan.link_codecs import allowed_codecs, codec_notes
from atoll.plan.modes import mode_rules
from atoll.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from atoll.planner import Planned

__all__ = ["make_plan_for", "plan", "priced"]


def plan(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="A training script, or a published model by name, such as gpt3-175b.", metavar="TARGET")],
    cluster: Annotated[
        Path,
        typer.Option("--cluster", "-c", help="The cluster file; `atoll probe -o here.toml` writes one of this machine.", metavar="FILE"),
    ],
    top: Annotated[int, typer.Option(help="How many plans to return, best first.", min=1, max=100)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the best plan here (.txt or .plan: as text, else JSON).", metavar="FILE")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Explain at length.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the target's own.", min=1)] = None,
    mode: Annotated[str | None, typer.Option(help="Only plans of this execution mode.")] = None,
    codec: Annotated[
        CodecChoice, typer.Option(help="How activations are sent between sites: as they are, with a codec, or `auto`: what saves time.")
    ] = "none",
    calibration: Annotated[Path | None, typer.Option(help="Measured constants of the cost model.", metavar="FILE")] = None,
    check: Annotated[Path | None, typer.Option(help="Instead of planning, check this plan and predict its cost.", metavar="FILE")] = None,
) -> None:
    """Choose which layers run where, and say why. What follows `--` are the script's own arguments."""
    if check is not None:
        _refuse_with_check({"--output": output, "--why": why, "--mode": mode, "--codec": codec != "none"})
    if output is not None:
        check_writable(output, PlanError)
    devices = load_cluster(cluster)
    constants = load_calibration(calibration) if calibration else None
    model = load_target(target, batch_size, context.obj or ())
    given, constants = constants, constants or _here(model, devices)
    if check is not None:
        _check(check, model, devices, constants, as_json, batch_size)
        return
    planned = _make(model, devices, constants, top, mode, codec)
    times = times_by(given) if given is not None else grounds_without_trial(planned.candidates[0].plan, devices)
    if output is not None:
        save_plan(planned.candidates[0].plan, output)
    if as_json:
        entries = [_entry(candidate.plan, candidate.cost, model.graph, candidate.reasons) for candidate in planned.candidates]
        more = {name: getattr(planned, name) for name in ("considered", "exact", "ruled_out", "bottleneck", "relief")} | {"times": times}
        print_json(_document(model, devices, entries, planned.seconds, more))
    else:
        _show(planned, model, devices, why, times)
    if output is not None:
        say(f"wrote {output}")


def _here(model: Target, cluster: Cluster) -> Calibration | None:
    """For one device that was probed, presumably this machine: the time that loading a batch took here is part of a step."""
    alone = len(cluster.devices) == 1 and cluster.devices[0].kind.measured is not None
    return Calibration(step_seconds=model.loading_seconds, source="data loaded here") if alone else None


def make_plan_for(model: Target, cluster: Cluster, calibration: Calibration | None, mode: str, codec: CodecChoice) -> "Planned":
    """The best plan that can be run, with progress on stderr."""
    return _make(model, cluster, calibration or _here(model, cluster), 1, mode, codec)


def _make(model: Target, cluster: Cluster, calibration: Calibration | None, top: int, mode: str | None, codec: CodecChoice) -> "Planned":
    with working(f"planning {model.graph.name} on {plural(len(cluster.devices), 'device')}") as update:
        from atoll.planner import plan as make_plans  # it needs scipy, which takes a moment to load

        return make_plans(
            model.graph,
            cluster,
            batch_size=model.batch_size,
            top=top,
            mode=mode,
            optimizer=model.optimizer,
            calibration=calibration,
            codecs=allowed_codecs(codec),
            progress=lambda what, done, total: update(f"{what}, {done:,} of {total:,}"),
        )


def _show(planned: "Planned", model: Target, cluster: Cluster, long: bool, times: str) -> None:
    best = planned.candidates[0]
    others = [alternatives_table(planned, long=long)] if len(planned.candidates) > 1 else []
    notes = _notes((*model.notes, *codec_notes(best.plan)))
    show(plan_view(best.plan, best.cost, model.graph, cluster), why_view(planned, times, long=long), *notes, *others)


def _notes(sentences: tuple[str, ...]) -> list[RenderableType]:
    return [notes_view(sentences)] if sentences else []


def priced(plan: Plan, model: Target, cluster: Cluster, calibration: Calibration | None) -> tuple[Cost, tuple[str, ...]]:
    """What a plan costs that was not just made, and what there is to say of it in sentences."""
    evaluator = Evaluator(model.graph, cluster, optimizer=model.optimizer, calibration=calibration or _here(model, cluster))
    said = (*codec_notes(plan), *mode_rules(plan.mode).notes(plan))
    if plan.staleness > 0:
        said = (*said, f"staleness=1: {staleness_effect(evaluator, plan)}")
    return evaluator.cost(plan), said


def _refuse_with_check(options: dict[str, object]) -> None:
    """Options that make a plan mean nothing where one is given."""
    for name, value in options.items():
        if value:
            raise PlanError(f"{name}: has no meaning with --check, which makes no plan; leave one of them out")


def _check(path: Path, model: Target, cluster: Cluster, calibration: Calibration | None, as_json: bool, batch_size: int | None) -> None:
    """Validate a plan someone else made and predict what it costs. One that does not fit the devices' memory is a failure (exit 1)."""
    given = load_plan(path)
    if batch_size is not None and batch_size != given.batch_size:
        raise PlanError(f"--batch-size {batch_size}: {path} is a plan of a batch of {given.batch_size}; leave it out, or plan anew")
    validate(given, model.graph, cluster, source=path)
    predicted, said = priced(given, model, cluster, calibration)
    if as_json:
        print_json(_document(model, cluster, [_entry(given, predicted, model.graph, said)]))
    else:
        show(plan_view(given, predicted, model.graph, cluster), *_notes((*model.notes, *said)))
    if not predicted.fits:
        device, lacking = max(predicted.over_memory.items(), key=lambda item: item[1])
        short = plural(len(predicted.over_memory), "device lacks", "devices lack")
        say(f"{path}: the plan does not fit: {short} memory, {device} the most ({format_bytes(lacking)})")
        raise typer.Exit(1)


_FEW = 3  # sentences of each kind when the user did not ask for all
_SHORT = 56  # characters of a difference in a table


def why_view(planned: "Planned", times: str, *, long: bool) -> RenderableType:
    """The bottleneck and what would relieve it, the reasons for the choice, what was considered and ruled out, what times are by."""
    search = "that is all there are, and none is faster" if planned.exact else "not all there are; a faster one may exist"
    considered = f"{planned.considered:,} plans in {format_seconds(planned.seconds)}; {search}"
    rows: list[tuple[str, Sequence[str]]] = [
        ("bottleneck", [planned.bottleneck]),
        ("would help", planned.relief),
        ("because", planned.candidates[0].reasons),
        ("considered", [considered]),
        ("ruled out", planned.ruled_out),
        ("times", [times.removeprefix("times are ")]),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for name, sentences in rows:
        shown = [sentence for sentence in sentences if sentence][: None if long else _FEW]
        for number, sentence in enumerate(shown):
            table.add_row(name if number == 0 else "", Text(sentence))
        if len(sentences) > len(shown) and shown:
            table.add_row("", Text(f"… {len(sentences) - len(shown)} more with --why", style="dim"))
    return titled("Why", table)


def alternatives_table(planned: "Planned", *, long: bool) -> RenderableType:
    """The plans after the best: how their steps compare, and in what they differ from it."""
    best = planned.candidates[0]
    table = headed_table()
    table.add_column("#", justify="right")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("against the best", justify="right")
    table.add_column("plan", no_wrap=True)
    table.add_column("differs from the best in", ratio=1)
    for number, candidate in enumerate(planned.candidates[1:], start=2):
        longer = candidate.cost.step_seconds / best.cost.step_seconds - 1 if best.cost.step_seconds else 0.0
        changes = diff(best.plan, candidate.plan).lines()
        shown = changes if long else [_short(change) for change in changes[:2]]
        more = [f"… {len(changes) - len(shown)} more"] if len(changes) > len(shown) else []
        step = format_seconds(candidate.cost.step_seconds)
        table.add_row(str(number), step, f"{longer:+.1%}", _shape(candidate.plan), Text("\n".join([*shown, *more]), style="dim"))
    return Group(Text("Next best", style="bold"), table)


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= _SHORT else f"{sentence[: _SHORT - 1].rstrip()}…"


def _shape(plan: Plan) -> str:
    """`lockstep 4×16`: the mode, and stages × the replicas of each."""
    replicas = sorted({len(stage.replicas) for stage in plan.stages})
    each = str(replicas[0]) if len(replicas) == 1 else f"{replicas[0]}–{replicas[-1]}"
    return f"{plan.mode} {len(plan.stages)} × {each}"


def _document(
    model: Target, cluster: Cluster, plans: list[dict[str, Any]], plan_seconds: float = 0.0, more: Mapping[str, object] | None = None
) -> dict[str, object]:
    """What `--json` prints, best plan first; docs fix its shape, more keys may come."""
    graph = model.graph
    return {
        "capture_seconds": model.capture_seconds,
        "plan_seconds": plan_seconds,
        "graph": {
            "name": graph.name,
            "layers": len(graph.layers),
            "parameters": graph.parameters,
            "frozen_parameters": graph.frozen_parameters,
            "precision": graph.precision,
        },
        "cluster": {"name": cluster.name, "sites": len(cluster.sites), "hosts": len(cluster.hosts), "devices": len(cluster.devices)},
        "batch_size": plans[0]["batch_size"],
        "notes": model.notes,
        **(more or {}),
        "plans": plans,
    }


def _entry(plan: Plan, cost: Cost, graph: Graph, reasons: Sequence[str]) -> dict[str, Any]:
    fields = msgspec.to_builtins(plan)
    stages = [{**stage, **msgspec.to_builtins(price)} for stage, price in zip(fields.pop("stages"), cost.stages, strict=True)]
    return {
        **fields,
        "text": to_text(plan),
        "stages": stages,
        "predicted": {
            "step_seconds": cost.step_seconds,
            "samples_per_second": cost.samples_per_second,
            "tokens_per_second": cost.samples_per_second * graph.tokens_per_sample,
            "memory_bytes": {device: use.total_bytes for device, use in cost.memory.items()},
            "memory_available_bytes": cost.memory_available,
            "link_bytes": cost.link_bytes,
            "breakdown": cost.breakdown,
            "dollars_per_step": cost.dollars_per_step,
            "fits": cost.fits,
        },
        "reasons": list(reasons),
    }
