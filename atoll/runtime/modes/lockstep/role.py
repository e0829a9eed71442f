"""Role: which rank this process is, among how many, and where they meet — found from what its launcher left in the environment.

This is the one place where the runtime reads the environment. Four launchers are known: Atoll's own, torchrun (and whoever sets the same
variables, as Kubeflow's PyTorchJob does), Slurm's srun and Kubernetes' indexed Jobs.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

import msgspec

from atoll.errors import RoleError

__all__ = ["GENERATION", "Role", "Source", "find_role", "hidden_role"]

Source: TypeAlias = Literal["atoll", "torchrun", "slurm", "kubernetes"]

GENERATION = "ATOLL_GENERATION"  # set by Atoll's launcher only
_DEFAULT_PORT = 29500  # torchrun's
_SLURM_PORTS = range(15000, 30000)  # below the ports that systems give away by themselves
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # Slurm numbers an interactive shell, a batch script and the like from here


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """This process's place among the processes of a run."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this host
    local_world_size: int
    master_addr: str
    master_port: int
    source: Source
    generation: int = 0  # how often the launcher has started everybody anew
    store_outside: bool = False  # the launcher hosts the store at master_addr:master_port; otherwise rank 0 does

    @property
    def hosts_store(self) -> bool:
        """Whether this very process has to host the store."""
        return self.rank == 0 and not self.store_outside


def find_role(environ: Mapping[str, str]) -> Role | None:
    """The role that the environment gives this process; None when it is alone.

    A group of one under Slurm or Kubernetes is alone: there `atoll run` starts its own processes. Raises `RoleError` when variables are
    missing, are no numbers or contradict each other.
    """
    variables = _Variables(environ)
    if "RANK" in variables:
        return _checked(_from_torchrun(variables))
    if _is_slurm_task(variables):
        return _unless_single(_checked(_from_slurm(variables)))
    if "JOB_COMPLETION_INDEX" in variables and ("WORLD_SIZE" in variables or "MASTER_ADDR" in variables):
        return _unless_single(_checked(_from_indexed_job(variables)))
    if "WORLD_SIZE" in variables or "LOCAL_RANK" in variables or GENERATION in variables:
        present = next(name for name in ("WORLD_SIZE", "LOCAL_RANK", GENERATION) if name in variables)
        raise RoleError(f"environment: {present} is set but RANK is not; set both, or neither to train alone")
    return None


@contextmanager
def hidden_role(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, launchers have left nothing: libraries that a script uses would meet the other processes by themselves."""
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", GENERATION}
    hidden = {name: value for name, value in environ.items() if name in ours or name.startswith("TORCHELASTIC_")}
    for name in hidden:
        del environ[name]
    try:
        yield
    finally:
        environ.update(hidden)


class _Variables:
    """The environment, with words for what is wrong in it. Empty variables count as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __contains__(self, name: str) -> bool:
        return bool(self._environ.get(name, "").strip())

    def text(self, *names: str, because: str) -> str:
        """The first of `names` that is set."""
        for name in names:
            if name in self:
                return self._environ[name].strip()
        raise RoleError(f"environment: {because} but {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not; set {names[0]}")

    def number(self, *names: str, because: str) -> int:
        """The first of `names` that is set, as a number of 0 or more."""
        text = self.text(*names, because=because)
        if not re.fullmatch(r"[0-9]{1,18}", text):
            name = next(name for name in names if name in self)
            raise RoleError(f"environment: {name} must be a whole number of 0 or more, got {text!r}")
        return int(text)

    def says(self, name: str, text: str) -> bool:
        return self._environ.get(name, "").strip() == text

    def optional(self, name: str) -> int | None:
        return self.number(name, because="") if name in self else None


def _from_torchrun(variables: _Variables) -> Role:
    """The variables of torchrun, which Atoll's launcher and PyTorchJob set too."""
    rank = variables.number("RANK", because="")
    world_size = variables.number("WORLD_SIZE", because="RANK is set")
    by_torchrun, by_atoll = "TORCHELASTIC_RUN_ID" in variables, GENERATION in variables
    source: Source = "atoll" if by_atoll else "torchrun"
    if not by_torchrun and not by_atoll:
        _agree_with_slurm(variables, rank, world_size)
        source = "kubernetes" if "KUBERNETES_SERVICE_HOST" in variables else "torchrun"
    master_addr = variables.text("MASTER_ADDR", because="RANK and WORLD_SIZE are set")
    local_rank, local_world_size = _local(variables, rank, world_size, master_addr, source)
    return Role(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=variables.number("MASTER_PORT", because="MASTER_ADDR is set"),
        source=source,
        generation=variables.optional(GENERATION if by_atoll else "TORCHELASTIC_RESTART_COUNT") or 0,
        store_outside=by_atoll or variables.says("TORCHELASTIC_USE_AGENT_STORE", "True"),
    )


def _local(variables: _Variables, rank: int, world_size: int, master_addr: str, source: Source) -> tuple[int, int]:
    """Local rank and local world size; a launcher that leaves them out has a pod per rank, or everything on one host."""
    local_rank, local_world_size = variables.optional("LOCAL_RANK"), variables.optional("LOCAL_WORLD_SIZE")
    one_host = master_addr in ("localhost", "::1") or master_addr.startswith("127.")
    if local_rank is None and one_host:
        local_rank = rank
    if local_rank is None and source == "kubernetes":
        return 0, 1
    if local_rank is None:
        raise RoleError("environment: RANK is set but LOCAL_RANK is not; set it to this process's number on its host, from 0")
    if local_world_size is None and not one_host and local_rank != rank:
        raise RoleError("environment: LOCAL_RANK is set but LOCAL_WORLD_SIZE is not; set it to the number of processes on this host")
    return local_rank, world_size if local_world_size is None else local_world_size


def _agree_with_slurm(variables: _Variables, rank: int, world_size: int) -> None:
    """Variables exported by hand inside a Slurm step must say what Slurm says."""
    if not _is_slurm_task(variables) or "SLURM_NTASKS" not in variables:
        return
    tasks, task = variables.number("SLURM_NTASKS", because=""), variables.number("SLURM_PROCID", because="")
    if tasks == world_size and task != rank:
        raise RoleError(
            f"environment: RANK is {rank} but SLURM_PROCID is {task}, of {world_size} both; unset RANK and WORLD_SIZE to let Slurm say"
        )


def _is_slurm_task(variables: _Variables) -> bool:
    """Started by srun, and not the script that sbatch runs once nor the shell of salloc, where the ranks are not started yet."""
    step = variables.optional("SLURM_STEP_ID")
    if "SLURM_PROCID" not in variables or (step is not None and step >= _FIRST_SPECIAL_STEP):
        return False
    return step is not None or not variables.says("ENVIRONMENT", "BATCH")


def _from_slurm(variables: _Variables) -> Role:
    """What srun sets for each of its tasks; MASTER_ADDR and MASTER_PORT, when exported by the batch script, go first."""
    because = "SLURM_PROCID is set"
    world_size = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", because=because)
    said = variables.optional("WORLD_SIZE")
    if said is not None and said != world_size:
        raise RoleError(
            f"environment: WORLD_SIZE is {said} but Slurm started {world_size} tasks (SLURM_NTASKS); unset WORLD_SIZE or ask for {said}"
        )
    hosts = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return Role(
        rank=variables.number("SLURM_PROCID", because=""),
        world_size=world_size,
        local_rank=variables.number("SLURM_LOCALID", because=because),
        local_world_size=_slurm_local_tasks(variables, world_size),
        master_addr=variables.text("MASTER_ADDR", because="")
        if "MASTER_ADDR" in variables
        else _first_host(variables.text(*hosts, because=because)),
        master_port=variables.number("MASTER_PORT", because="") if "MASTER_PORT" in variables else _slurm_port(variables),
        source="slurm",
        generation=variables.optional("SLURM_RESTART_COUNT") or 0,
    )


def _slurm_port(variables: _Variables) -> int:
    """The same for every task of a step, another one for the steps and jobs beside it."""
    job = variables.number("SLURM_JOB_ID", "SLURM_JOBID", because="SLURM_PROCID is set")
    step = variables.optional("SLURM_STEP_ID") or 0
    return _SLURM_PORTS[(job + 7919 * step) % len(_SLURM_PORTS)]


def _slurm_local_tasks(variables: _Variables, tasks: int) -> int:
    """How many tasks of the step run on this node."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in variables:
            counts = _tasks_per_node(name, variables.text(name, because=""))
            node = variables.optional("SLURM_NODEID") or 0
            if node >= len(counts):
                raise RoleError(f"environment: SLURM_NODEID is {node} but {name} speaks of {len(counts)} nodes")
            return counts[node]
    each = variables.optional("SLURM_NTASKS_PER_NODE")
    nodes = variables.optional("SLURM_NNODES") or 1
    if each is None and tasks % nodes:
        raise RoleError(f"environment: {tasks} tasks on {nodes} nodes, but SLURM_TASKS_PER_NODE does not say how many run here")
    return tasks // nodes if each is None else min(each, tasks)


def _tasks_per_node(name: str, text: str) -> list[int]:
    """`"4(x2),3"` → 4, 4, 3."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item.strip())
        if match is None:
            raise RoleError(f"environment: {name} is {text!r}, which is not Slurm's way to count tasks, such as '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """`"oslo[003-007,9],rome"` → `oslo003`."""
    match = re.match(r"([^\[\],]+)(?:\[(\d+)[^\]]*\])?([^\[\],]*)", nodes)
    if match is None:
        raise RoleError(f"environment: no host found in Slurm's list of nodes, {nodes!r}; set MASTER_ADDR")
    return match[1] + (match[2] or "") + match[3]


def _from_indexed_job(variables: _Variables) -> Role:
    """A pod of a Kubernetes Job with `completionMode: Indexed`: Kubernetes numbers it, the manifest says the rest."""
    because = "JOB_COMPLETION_INDEX is set"
    return Role(
        rank=variables.number("JOB_COMPLETION_INDEX", because=""),
        world_size=variables.number("WORLD_SIZE", because=because),
        local_rank=0,
        local_world_size=1,
        master_addr=variables.text("MASTER_ADDR", because=because),
        master_port=variables.number("MASTER_PORT", because="") if "MASTER_PORT" in variables else _DEFAULT_PORT,
        source="kubernetes",
    )


def _checked(role: Role) -> Role:
    """The role, if its numbers can be true together."""
    for local, rank, size in (("", role.rank, role.world_size), ("local ", role.local_rank, role.local_world_size)):
        if rank >= size:
            raise RoleError(f"environment: {local}rank {rank} with a {local}world size of {size}; ranks count from 0 (by {role.source})")
    if role.local_world_size > role.world_size:
        raise RoleError(f"environment: {role.local_world_size} processes on this host, but {role.world_size} in all (by {role.source})")
    if not 0 < role.master_port < 65536:
        raise RoleError(f"environment: MASTER_PORT must be a port from 1 to 65535, got {role.master_port}")
    return role


def _unless_single(role: Role) -> Role | None:
    return role if role.world_size > 1 else None
