"""Checks: every guard of the swarm protocol by name, so that a test can switch one off and see that the simulator notices.

In production all are on. `docs/swarm.md` says of each what it guards and what goes wrong without it.
"""

import msgspec

from atoll.errors import AtollError

__all__ = ["ALL_CHECKS", "CHECKS", "Checks"]

CHECKS = {
    "completeness": "a step is reduced only when chosen buffers hold every micro-batch",
    "once": "a worker adds a micro-batch only when its buffers do not hold it yet",
    "duplicate-filter": "a part that arrives twice is added to the sum once",
    "message-order": "announcements older than the newest seen are ignored",
    "disjointness": "chosen buffers have no micro-batch in common",
    "atomic-manifest": "a manifest lists a micro-batch only once its gradient has landed in the buffer",
    "out-of-place": "a sum is kept apart from the buffers it was made of",
    "journal-fence": "the journal refuses records of an older term",
    "token": "an acknowledgement or an attempt is known by its whole token, not by its number alone",
    "all-stages": "a commit needs a reduced gradient of every stage",
    "round-digest": "a commit is applied only to the result with its round and digest",
    "checkpoint-version": "a checkpoint is a snapshot of exactly one version",
    "stage": "work for another stage is refused",
    "version": "work for another version is refused",
    "journal-first": "a record is durable before anyone hears of it",
    "fetch-version": "fetched chunks are all of one epoch and version",
    "term-digest": "rounds of different terms differ, and digests are compared",
    "freeze": "nothing is added to a buffer whose manifest was reported",
    "round-match": "parts and sums of another round are refused",
    "clear": "buffers are emptied when the state beneath them changes",
    "incarnation": "whoever comes back under the same name is somebody new",
    "epoch": "messages of an older epoch are refused",
    "same-weights": "with staleness all of a step is computed with the weights before the last step's, applied or not",
    "survived": "with staleness a manifest counts only from a state that has the commit of the step before",
    "set-aside": "with staleness the sums of the step before are kept apart from those of the step under way",
}
"""What each check guards, by name."""


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """Which checks are on. `Checks()` is what production uses; `Checks.without("freeze")` is for tests of the checker."""

    completeness: bool = True
    once: bool = True
    duplicate_filter: bool = True
    message_order: bool = True
    disjointness: bool = True
    atomic_manifest: bool = True
    out_of_place: bool = True
    journal_fence: bool = True
    token: bool = True
    all_stages: bool = True
    round_digest: bool = True
    checkpoint_version: bool = True
    stage: bool = True
    version: bool = True
    journal_first: bool = True
    fetch_version: bool = True
    term_digest: bool = True
    freeze: bool = True
    round_match: bool = True
    clear: bool = True
    incarnation: bool = True
    epoch: bool = True
    same_weights: bool = True
    survived: bool = True
    set_aside: bool = True

    @classmethod
    def without(cls, *names: str) -> "Checks":
        """All checks but the named ones."""
        for name in names:
            if name not in CHECKS:
                raise AtollError(f"no check is called {name!r}; there are: {', '.join(CHECKS)}")
        return msgspec.convert({name.replace("-", "_"): False for name in names}, cls)


ALL_CHECKS = Checks()
