"""Events in words: one line for every event, and which of them people see."""

import time
from typing import Literal, TypeAlias

from atoll import events
from atoll.units import format_bytes, format_clock, format_count, format_seconds, plural

__all__ = ["Importance", "describe_event", "importance"]

Importance: TypeAlias = Literal["detail", "notice", "warning"]
"""detail: for the log and the dashboard; notice: shown; warning: shown even where people asked for quiet."""

_SHOWN = 8  # names in a list of many
_LONG_SECONDS = 2.0  # what takes longer before the first step is told


_WARNINGS = (
    events.Warned, events.WorkerFailed, events.Restarted, events.NonFinite, events.CheckpointFailed, events.Stalled, events.StageLost,
    events.EvaluationFailed, events.CertificateRevoked, events.RenewalFailed, events.StopRequested,
)  # fmt: skip
_DETAILS = (
    events.PeerChanged, events.PeerRetried, events.PeerRefused, events.CertificateIssued, events.CodecChosen, events.LinksMeasured,
    events.ReductionFinished, events.StateFetched, events.CheckpointBegun, events.CheckpointSaved, events.ProcessStarted,
    events.PlanChosen, events.UnknownEvent, events.StallEnded, events.CheckpointIntervalChosen,
)  # fmt: skip


def importance(event: events.AnyEvent) -> Importance:
    """Whether a terminal shows it. What a progress line says better is a detail."""
    match event:
        case events.ProcessEnded():
            return "detail" if event.then == "done" or event.role == "rank" else "warning"  # of a rank `WorkerFailed` says more
        case events.MemberChanged():
            return "notice" if event.state in ("active", "silent", "left") and event.role != "rank" else "detail"
        case events.PhaseFinished():
            return "notice" if event.seconds >= _LONG_SECONDS else "detail"
        case events.StepFinished():
            return "detail" if event.applied else "notice"
        case events.CoordinatorStarted():
            return "notice" if event.term > 1 else "detail"
    return "warning" if isinstance(event, _WARNINGS) else "detail" if isinstance(event, _DETAILS) else "notice"


def describe_event(event: events.AnyEvent) -> str:
    """What happened, in one line of plain words."""
    for part in (_training, _decision, _member, _peer):
        line = part(event)
        if line is not None:
            return " ".join(line.split()) or event.kind
    raise AssertionError(f"{event.kind} has no description")  # a test goes through all kinds


def _training(event: events.AnyEvent) -> str | None:
    match event:
        case events.PhaseFinished():
            whose = f"{event.source}: " if event.source else ""
            return f"{whose}{event.phase} in {format_seconds(event.seconds)}"
        case events.Compiled():
            breaks = f", {plural(event.graph_breaks, 'graph break')}" if event.graph_breaks else ""
            whose = f"{event.source}: " if event.source else ""
            return f"{whose}torch.compile: {plural(event.graphs, 'graph')} in {format_seconds(event.seconds)}{breaks}"
        case events.RunStarted():
            where = f" on {_listed(event.devices)}" if event.devices else ""
            steps = f"{plural(event.steps, 'step')} of {plural(event.batch_size, 'sample')}"
            frozen = f" and {format_count(event.frozen_parameters)} frozen" if event.frozen_parameters else ""
            return f"{event.name}: {format_count(event.parameters)} parameters{frozen}, {steps}, {event.precision}{where}"
        case events.StepFinished(applied=False):
            return f"step {event.step}: fp16 gradients overflowed; step skipped, loss scale lowered"
        case events.StepFinished():
            return f"step {event.step}: loss {event.loss:.4f}, {format_seconds(event.seconds)}"
        case events.Evaluated():
            metrics = "".join(f", {name} {_number(value, '.4g')}" for name, value in event.metrics.items())
            notes = "".join(f"; {note}" for note in event.notes)
            return f"step {event.step}: evaluation loss {_number(event.loss, '.4f')}{metrics}{notes}"
        case events.Logged():
            return f"step {event.step}: " + ", ".join(f"{name} {_number(value, '.4g')}" for name, value in event.numbers.items())
        case events.EvaluationFailed():
            return f"step {event.step}: not evaluated: {event.message}"
        case events.NonFinite():
            return f"step {event.step}: the {event.what} is {event.value}"
        case events.StopRequested():
            return event.message if event.source in ("run", "") else f"{event.source}: {event.message}"
        case events.RunFinished():
            how = "stopped early" if event.reason == "stopped" else event.reason
            loss = f", loss {event.loss:.4f}" if event.loss is not None else ""
            return f"{how}: {plural(event.steps, 'step')} in {format_clock(event.seconds)}{loss}"
        case events.Note() | events.Warned():
            return f"{event.source}: {event.message}" if event.source else event.message
        case events.CheckpointBegun():
            return f"step {event.step}: saving a checkpoint"
        case events.CheckpointSaved():
            return f"step {event.step}: checkpoint saved, {format_bytes(event.size_bytes)} in {format_seconds(event.seconds)}"
        case events.CheckpointFailed():
            return f"step {event.step}: the checkpoint could not be saved: {event.message}"
        case events.CheckpointRestored():
            notes = f": {'; '.join(event.notes)}" if event.notes else ""
            return f"resuming after step {event.step}{notes}"
    return None


def _decision(event: events.AnyEvent) -> str | None:
    match event:
        case events.PlanChosen():
            predicted = f", predicted step {format_seconds(event.step_seconds)}" if event.step_seconds is not None else ""
            why = f": {'; '.join(event.reasons)}" if event.reasons else ""
            return f"plan: {event.mode}, {plural(event.stages, 'stage')} on {plural(len(event.devices), 'device')}{predicted}{why}"
        case events.CheckpointIntervalChosen():
            often = f"every {plural(event.steps, 'step')}" if event.steps is not None else "at the end only"
            return f"checkpoints {often}: {event.reason}"
        case events.CodecChosen():
            before = f" instead of {event.before}" if event.before else ""
            return f"link to {event.link}: codec {event.codec}{before}: {event.reason}"
        case events.MemberMoved():
            return f"{event.name} moves from stage {event.source} to stage {event.target}: {event.reason}"
        case events.Restarted():
            return f"restarting all ranks (restart {event.generation} of at most {event.max_restarts})"
        case events.StageLost():
            return f"stage {event.stage} has no worker left; all workers roll back to step {event.step}"
    return None


def _member(event: events.AnyEvent) -> str | None:
    match event:
        case events.MemberChanged():
            return _changed(event)
        case events.MemberTooSlow():
            return (
                f"{event.name} fetches the state of stage {event.stage} too slowly: after {event.fetched:.0%} the next step replaced it, "
                "several times in a row. It keeps trying; a faster link, longer steps or more stages would let it join"
            )
        case events.MembersAwaited():
            return _awaited(event)
        case events.Stalled():
            return _stalled(event)
        case events.StallEnded():
            return f"progress again after {format_seconds(event.seconds)}"
        case events.CoordinatorStarted():
            which = "a new coordinator" if event.term > 1 else "the coordinator"
            return f"{which} leads from step {event.step} on"
        case events.StepRepaired():
            by_stage = ", ".join(f"{count} of stage {stage}" for stage, count in enumerate(event.micro_batches) if count)
            return f"step {event.step}: {event.reason}; micro-batches computed again: {by_stage or 'none'}"
        case events.RoundFinished():
            gave = ", ".join(f"{site.site} {plural(site.steps, 'step')}" for site in event.sites)
            lacks = f"; without {', '.join(event.missing)}, whose steps count later" if event.missing else ""
            return f"round {event.round} of {event.rounds}: {gave}{lacks}"
        case events.OuterChosen() if event.exchange == "gradients":
            return f"gradients of every step in {event.codec}, added up over all sites"
        case events.OuterChosen():
            since, why = (f"from round {event.round} on ", f": {'; '.join(event.reasons)}") if event.round else ("", "")
            return (
                f"{since}an update in {event.codec} every {plural(event.inner_steps, 'step')}, "
                f"applied {plural(event.delay_steps, 'step')} later; "
                f"outer learning rate {event.learning_rate:g}, momentum {event.momentum:g}{why}"
            )
        case events.ProcessStarted():
            host = f" on {event.host}" if event.host else ""
            again = f" (restart {event.restarts})" if event.restarts else ""
            return f"{event.name} started{host}{again}"
        case events.ProcessEnded():
            host = f" on {event.host}" if event.host else ""
            then = {"done": "", "restart": "; restarting it", "continue": "; the run continues without it", "stop": "; the run ends"}
            return f"{event.name}{host} {'died' if event.exit_code else 'ended'} ({event.how}){then[event.then]}"
        case events.WorkerFailed():
            return event.message
    return None


def _changed(event: events.MemberChanged) -> str:
    stages = f" stage{'s' * (len(event.stages) > 1)} {', '.join(map(str, event.stages))}" if event.stages else ""
    why = f" ({event.reason})" if event.reason else ""
    match event.state:
        case "active" if event.before == "silent":
            return f"{event.name} is back: heartbeats again{why}"
        case "active":
            return f"{event.name} joined{stages}{why}"
        case "left":
            return f"{event.name} left{stages}{why}"
        case "silent":
            return f"{event.name} missed heartbeats{why}; it gets no work"
        case "dead":
            return f"{event.name} is dead{why}"
        case _:
            return f"{event.name} is {event.state}{why}"


def _awaited(event: events.MembersAwaited) -> str:
    line = f"waiting for members: {event.joined} of {event.expected} joined"
    if event.missing:
        line += f"; not joined after {event.seconds:.0f} s: {_listed(event.missing)}"
    if not event.missing and not event.stages:
        return f"{event.joined} of {event.expected} members joined; the first step is under way"
    if event.stages:
        line += f"; no member yet for stage{'s' * (len(event.stages) > 1)} {_listed(tuple(map(str, event.stages)))}"
    if not event.joined:
        line += " (they load PyTorch and the job)"
    if event.until_unix_seconds is not None:
        line += f"; the others wait until {time.strftime('%H:%M:%S', time.localtime(event.until_unix_seconds))}"
    return line


def _stalled(event: events.Stalled) -> str:
    known = {wait.name: wait for wait in event.members}
    if event.cause:
        those = "; ".join(_waiting(known[name]) if name in known else name for name in event.cause[:_SHOWN])
        return f"{those}; the others wait for {'it' if len(event.cause) == 1 else 'them'}"
    if len(event.members) > 1 and len({(wait.doing, wait.step) for wait in event.members}) == 1:
        wait = event.members[0]
        when = f" at step {wait.step}" if wait.step is not None else ""
        return f"every member has been {wait.doing} for {event.seconds:.0f} s{when}"
    return f"no progress for {event.seconds:.0f} s: " + "; ".join(map(_waiting, event.members[:_SHOWN]))


def _waiting(wait: events.Wait) -> str:
    """`rank 2 (oslo-1/gpu0) has been reading sample 12 for 42 s at step 3`."""
    names = ", ".join(filter(None, (wait.device, wait.stage)))
    when = f" at step {wait.step}" if wait.step is not None else ""
    return f"{wait.name}{f' ({names})' if names else ''} has been {wait.doing} for {wait.seconds:.0f} s{when}"


def _peer(event: events.AnyEvent) -> str | None:
    match event:
        case events.PeerChanged():
            return f"{event.peer}: {event.state} ({event.reason})"
        case events.PeerRefused():
            return f"{event.what} refused: {event.peer}: {event.reason}"
        case events.PeerRetried():
            what = "given up" if event.delay_seconds is None else f"retry in {format_seconds(event.delay_seconds)}"
            return f"{event.peer}: {what}: {event.reason}"
        case events.CertificateIssued():
            return f"{event.how}: {event.peer} ({event.role}) for {format_seconds(event.lifetime_seconds)}"
        case events.CertificateRevoked():
            return f"revoked: {event.peer}: {event.reason}"
        case events.RenewalFailed():
            return f"certificate not renewed, {format_seconds(max(event.expires_seconds, 0))} left: {event.reason}"
        case events.StateFetched():
            size, seconds = format_bytes(event.size_bytes), format_seconds(event.seconds)
            return f"{event.name} has the state of stage {event.stage} after step {event.step}: {size}, {seconds} after connecting"
        case events.LinksMeasured():
            total = sum(link.bytes for link in event.links)
            return f"{plural(len(event.links), 'link')} carried {format_bytes(total)} in {format_seconds(event.seconds)}"
        case events.ReductionFinished():
            missing = f" without {_listed(event.left_out)}" if event.left_out else ""
            why = f": {event.message}" if event.message else ""
            return f"reduction {event.round} {'done' if event.complete else 'incomplete'}{missing} in {format_seconds(event.seconds)}{why}"
        case events.FaultInjected():
            amount = f" {event.amount:g}" if event.amount is not None else ""
            return f"fault: {event.fault} {' '.join(event.places)}{amount}"
        case events.FaultEnded():
            return f"fault over: {event.fault} {' '.join(event.places)}"
        case events.UnknownEvent():
            return f"{event.name} (written by a newer version of Atoll)"
    return None


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
