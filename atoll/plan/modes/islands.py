"""What sites can run that train by themselves and exchange weights every so many steps, and how they may be asked to do it.

A plan of this mode is a lockstep plan in which no replica is on devices of two sites and every site has all stages: each site's part of it
is a plan of its own (`plan/sites.py`, which knows where devices are; here nothing is known of that).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from atoll.plan.modes.rules import Failures, ModeRules
from atoll.plan.plan import Plan

__all__ = ["ISLANDS", "Islands", "IslandsOptions"]

_ONLY = "only sites that train by themselves exchange updates"


class IslandsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `atoll run` for sites that train together, and their section of run.json. None: chosen from the links."""

    exchange: Annotated[
        Literal["gradients", "weights"] | None,
        Meta(
            description="What sites exchange: gradients at every step, so that all have the same weights, or weights every so many steps; "
            "chosen from the links if not given.",
            extra={"only": _ONLY},
        ),
    ] = None
    inner_steps: Annotated[
        int | None,
        Meta(description="Steps a site makes between two exchanges; chosen from the links if not given.", extra={"min": 1, "only": _ONLY}),
    ] = None
    delay_steps: Annotated[int | None, Meta(description="Steps a site makes while an update travels.", extra={"min": 0, "only": _ONLY})] = (
        None
    )
    outer_codec: Annotated[
        str | None,
        Meta(
            description="How updates are sent: none, bf16, fp16, int8, int4, 2-bit, top-k-2-bit:64.",
            extra={"metavar": "CODEC", "only": _ONLY},
        ),
    ] = None
    outer_learning_rate: Annotated[float | None, Meta(description="Of the outer update.", extra={"min": 0, "only": _ONLY})] = None
    outer_momentum: Annotated[
        float | None, Meta(description="Of the outer update, Nesterov's.", extra={"min": 0, "max": 1, "only": _ONLY})
    ] = None
    outer_aggregation: Annotated[
        Literal["mean", "clipped", "trimmed"],
        Meta(
            description="How updates are joined: their weighted mean; none larger than the median norm; or without the smallest and "
            "largest of every number.",
            extra={"only": _ONLY},
        ),
    ] = "mean"
    outer_trim: Annotated[
        int | None,
        Meta(
            description="With trimmed: how many of the smallest, and of the largest, are left out; 1 if not given.",
            extra={"min": 1, "only": _ONLY},
        ),
    ] = None
    noise_multiplier: Annotated[
        float | None,
        Meta(
            description="Noise every update: the standard deviation over --clip-norm. The report tells the (ε, δ) of each site.",
            extra={"only": _ONLY},
        ),
    ] = None
    clip_norm: Annotated[float | None, Meta(description="The largest norm of an update that is noised.", extra={"only": _ONLY})] = None
    target_delta: Annotated[float | None, Meta(description="The δ that ε is told for; 1e-6 if not given.", extra={"only": _ONLY})] = None
    quorum: Annotated[
        int | None,
        Meta(description="A round is made with the updates of so many sites at least; 1 if not given.", extra={"min": 1, "only": _ONLY}),
    ] = None
    equal_steps: Annotated[
        bool,
        Meta(
            description="Every site makes all steps of every round, however long the others wait: runs can be repeated.",
            extra={"only": _ONLY},
        ),
    ] = False
    adapt: Annotated[
        bool | None,
        Meta(
            description="Make later rounds as links and steps measured meanwhile ask for; not with --equal-steps, unless given.",
            extra={"only": _ONLY},
        ),
    ] = None
    frugal: Annotated[bool, Meta(description="Bytes cost more than time: the fewest are sent.", extra={"only": _ONLY})] = False


class Islands(ModeRules):
    """For sites joined by slow links, each able to hold the model."""

    name = "islands"
    summary = "sites that train by themselves and exchange weights every so many steps"
    runtime = "atoll.runtime.modes.islands.runtime:IslandsRuntime"
    options = IslandsOptions
    sites_apart = True
    keeps_borders = True
    limits = "Every site trains the whole model. "

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """What predictions are of."""
        return (
            "the prediction is of a site's own steps; what updates take on the links between sites is said with how they are exchanged",
        )

    def goodput(self, plan: Plan, failures: Failures) -> float:
        """As inside a site; that the other sites go on when one stops is not counted."""
        return super().goodput(plan, failures)


ISLANDS = Islands()
