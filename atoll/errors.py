"""Every error Atoll raises on purpose.

```
AtollError
├── JobError          the training script or its Job is wrong
│   └── CaptureError  the model cannot be turned into a Graph; names the module and the reason
├── AnnotationError   replica/split/stage/pipeline contradict each other or the devices
├── ClusterError      a cluster file or a catalogue entry is wrong; names the file and the key
├── PlanError         a plan breaks its own rules; shows the table with the wrong cell marked
└── NoPlanError       nothing fits; says what came closest and what would help
```

All of them are mistakes a user can mend, so they are `ValueError`s and the command line prints them as
one sentence and exits with 2. Broken invariants of our own are `assert`s.
"""

__all__ = [
    "AnnotationError",
    "AtollError",
    "CaptureError",
    "ClusterError",
    "JobError",
    "NoPlanError",
    "PlanError",
]


class AtollError(ValueError):
    """Something the user gave is wrong; the message says what, where and what to do."""


class JobError(AtollError):
    """The training script or the Job it defines is wrong."""


class CaptureError(JobError):
    """The model cannot be captured as a Graph."""


class AnnotationError(AtollError):
    """Annotations contradict each other, the model or the devices."""


class ClusterError(AtollError):
    """A cluster description is wrong."""


class PlanError(AtollError):
    """A plan breaks its own rules or does not belong to this graph and cluster."""


class NoPlanError(AtollError):
    """No plan satisfies the constraints."""
