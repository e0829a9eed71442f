"""Every error Atoll raises on purpose.

```
AtollError
├── JobError          the training script or its Job is wrong
│   ├── CaptureError  the model cannot be turned into a Graph; names the module and the reason
│   │   └── DividedLossError  the losses of a batch's pieces do not add up to the batch's; shows both and the operator
│   └── JobFailedError  the job's own code failed in a run under way, or its numbers did; says at which step
├── AnnotationError   replica/split/stage/pipeline contradict each other or the devices
├── ClusterError      a cluster file or a catalogue entry is wrong; names the file and the key
├── PlanError         a plan breaks its own rules; shows the table with the wrong cell marked
├── ScheduleError     a schedule cannot be read or run; shows the table with the wrong cell marked
├── CheckpointError   a checkpoint or a file of weights cannot be read, or is not this job's; names the file and the tensor
│   ├── DamagedCheckpointError  it is not what was saved: bytes differ, or something is missing; the one before it may be whole
│   └── RebuiltWeightsError  the job makes other weights than the run began with, where a checkpoint or a state leaves them out
├── FabricError       something between hosts went wrong in a run under way
│   ├── FrameError    a peer sent what the protocol or the limits do not allow
│   ├── PeerLostError the connection to a peer ended, or it could not be reached; says which and why
│   ├── DeadlineError a call took longer than measured speeds allow
│   ├── RefusedError  a peer refused a call: unknown method, wrong type, limit, not allowed
│   ├── CollectiveError  a collective did not give all of its result; says which parts are missing and because of whom
│   └── RemoteError   a peer's own code raised; carries its kind and text
├── CodecError        a tensor cannot be encoded for a link, or what arrived is not a tensor some codec made; says which part
│   └── NonFiniteTensorError  the codec cannot carry NaN or Inf
├── LabError          a lab, or a fault scripted for it, is not possible; says what and what would be
├── RoleError         the environment of a launched process is partial or contradicts itself; names the variables
└── NoPlanError       nothing fits; says what came closest and what would help
```

All of them are mistakes a user can mend, so they are `ValueError`s and the command line prints them as
one sentence and exits with their `exit_code`: 2, or 1 for a run that failed. Broken invariants of our own are `assert`s.
"""

from typing import ClassVar

__all__ = [
    "AtollError",
    "JobError",
    "CaptureError",
    "DividedLossError",
    "JobFailedError",
    "AnnotationError",
    "ClusterError",
    "PlanError",
    "ScheduleError",
]
__all__ += ["CheckpointError", "DamagedCheckpointError", "CodecError", "NonFiniteTensorError", "LabError", "RoleError", "NoPlanError"]
__all__ += ["FabricError", "FrameError", "PeerLostError", "DeadlineError", "RefusedError", "CollectiveError", "RemoteError"]


class AtollError(ValueError):
    """Something the user gave is wrong; the message says what, where and what to do."""

    exit_code: ClassVar[int] = 2


class JobError(AtollError):
    """The training script or the Job it defines is wrong."""


class CaptureError(JobError):
    """The model cannot be captured as a Graph."""


class DividedLossError(CaptureError):
    """The losses of a batch's pieces do not add up to the batch's, so that every plan would train another model."""


class JobFailedError(JobError):
    """A run under way failed: the job's own code raised, or its loss or gradient is not finite."""

    exit_code: ClassVar[int] = 1


class AnnotationError(AtollError):
    """Annotations contradict each other, the model or the devices."""


class ClusterError(AtollError):
    """A cluster description is wrong."""


class PlanError(AtollError):
    """A plan breaks its own rules or does not belong to this graph and cluster."""


class ScheduleError(AtollError):
    """A schedule cannot be read, does not do what its plan asks, or would wait for ever."""


class CheckpointError(AtollError):
    """A checkpoint or a file of weights cannot be read, or belongs to another job."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was saved: bytes differ from their checksums, or a file is missing or cut short."""


class RebuiltWeightsError(CheckpointError):
    """The weights a job makes are not those a run began with, where a checkpoint or a swarm's state leaves them out."""


class FabricError(AtollError):
    """Something between hosts went wrong in a run under way."""

    exit_code: ClassVar[int] = 1


class FrameError(FabricError):
    """A peer sent what the protocol or the limits do not allow."""


class PeerLostError(FabricError):
    """The connection to a peer ended, or it could not be reached."""


class DeadlineError(FabricError):
    """A call took longer than the measured speeds of the link and of the method allow."""


class RefusedError(FabricError):
    """A peer refused a call: there is no such method, its types are others, a limit was passed, or the caller may not."""


class CollectiveError(FabricError):
    """A collective did not give all of its result; `blamed` are the peers it is missing because of."""

    def __init__(self, text: str, blamed: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.blamed = blamed


class RemoteError(FabricError):
    """A peer's own code raised while it served a call; `kind` is the class of what it raised."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class CodecError(AtollError):
    """A tensor cannot be encoded for a link, or what arrived cannot be decoded."""


class NonFiniteTensorError(CodecError):
    """A codec that sends a tensor as a whole was given NaN or Inf, which it could only spread."""


class LabError(AtollError):
    """A lab, or a fault scripted for it, is not possible here."""


class RoleError(AtollError):
    """What a launcher left in the environment is partial or contradicts itself."""


class NoPlanError(AtollError):
    """No plan satisfies the constraints."""
