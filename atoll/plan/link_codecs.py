"""Which codec tensors between two devices are sent with: a plan names links between sites, its cluster says which devices they join.

What a codec is for are activations and their gradients on the way between stages. Sums of gradients travel as they are: replicas stay
equal to the bit.
"""

from atoll.cluster import Cluster
from atoll.cluster.cluster import device_index, wan_index
from atoll.codec import CodecChoice, codec_spec
from atoll.errors import PlanError
from atoll.plan.plan import CodecName, Plan

__all__ = ["PlanCodecs", "allowed_codecs", "codec_notes"]

_AUTO: tuple[CodecName, ...] = ("none", "bf16", "int8")  # what `--codec auto` chooses among


def allowed_codecs(choice: CodecChoice) -> tuple[CodecName, ...]:
    """What the planner may choose for links between sites where `--codec` says this."""
    return _AUTO if choice == "auto" else (choice,)


class PlanCodecs:
    """The codecs of a plan, by devices. PlanError where it has some and the cluster it was made for is not given."""

    def __init__(self, plan: Plan, cluster: Cluster | None) -> None:
        self._named = {link: codec for link, codec in plan.codecs.items() if codec != "none"}
        self._cluster = cluster
        if self._named and (cluster is None or cluster.name != plan.cluster):
            given = "there is none" if cluster is None else f"{cluster.name!r} is another"
            said = ", ".join(f"{codec} on {link}" for link, codec in self._named.items())
            raise PlanError(
                f"the plan has codecs ({said}): which devices a link joins is said by the file of cluster {plan.cluster!r}, and {given}; "
                "give it with --cluster"
            )

    def __bool__(self) -> bool:
        return bool(self._named)

    def between(self, a: str, b: str) -> CodecName:
        """What one of two devices sends to the other with."""
        if not self._named:
            return "none"
        assert self._cluster is not None
        sites = device_index(self._cluster)[a].site, device_index(self._cluster)[b].site
        return "none" if sites[0] == sites[1] else self._named.get(wan_index(self._cluster)[sites].name, "none")

    def between_sites(self) -> list[tuple[str, str, CodecName]]:
        """The two sites of every link that has one, and the codec."""
        links = self._cluster.links if self._cluster is not None else ()
        return [(*link.between, self._named[link.name]) for link in links if link.name in self._named]


def codec_notes(plan: Plan) -> list[str]:
    """What a plan's codecs do to the numbers, for people; nothing where it has none."""
    said = []
    for codec in sorted({codec for codec in plan.codecs.values() if codec != "none"}):
        links = ", ".join(sorted(link for link, chosen in plan.codecs.items() if chosen == codec))
        error = codec_spec(codec).relative_error
        said.append(f"{codec} on {links} (an error of about {error:.1%} of what is sent)")
    if not said:
        return []
    return [
        f"activations and their gradients are sent as {'; '.join(said)}: losses are near those of one process, not equal to float "
        "tolerance; sums of gradients travel as they are, so replicas stay equal"
    ]
