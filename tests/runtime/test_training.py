"""What training has besides steps, against plain PyTorch: groups of parameters, plateaus, averages, snapshots, the best checkpoint."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import atoll
from atoll.cli.main import run as command
from atoll.cost import Evaluator
from atoll.errors import JobError
from atoll.events import Compiled, Evaluated, Logged, Note, read_events
from atoll.plan import parse_plan

from .training_cases import NETS, Net, Watching, bf16_job, measured_job, net_job, squares

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5
RANKS = "own"  # cases of training_cases.py, which the fixture `ranks` runs


def plain() -> dict[str, Any]:
    """The loop as one would write it, with PyTorch's own averages."""
    job = net_job()
    model = job.build_model()
    named = dict(model.named_parameters())
    flat = [value for name, value in named.items() if value.dim() < 2 or "norm" in name]
    rest = [value for name, value in named.items() if not (value.dim() < 2 or "norm" in name)]
    groups = [{"params": rest}, {"params": flat, "weight_decay": 0.0, "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, eps=1e-3, weight_decay=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    losses, evaluations = [], []
    whole = torch.utils.data.default_collate([job.eval_dataset[i] for i in range(12)])
    for step in range(job.total_steps):
        loss = squares(model, job.samples.batch(step))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            evaluations.append(float(squares(averaged.module, whole)))
        plateau.step(evaluations[-1])
        losses.append(float(loss.detach()))
    names = {id(value): name for name, value in named.items()}
    return {
        "losses": losses,
        "evaluations": evaluations,
        "rate": [group["lr"] for group in optimizer.param_groups],
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
        "ema": {name: value.tolist() for name, value in averaged.module.state_dict().items()},
        "moments": {names[id(value)]: state["exp_avg"].tolist() for value, state in optimizer.state.items()},
    }


def check(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for key in ("losses", "evaluations"):
        assert found[key] == pytest.approx(expected[key], rel=tolerance), key
    assert sorted(found["rate"]) == pytest.approx(sorted(expected["rate"]))
    for key in ("weights", "ema", "moments"):
        assert found[key].keys() == expected[key].keys(), key
        for name, value in expected[key].items():
            assert torch.allclose(torch.tensor(found[key][name]), torch.tensor(value), rtol=tolerance, atol=tolerance), (key, name)


def test_what_cannot_be_captured_is_evaluated_all_the_same(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = ranks
    expected = measured_job().run(progress=False)
    assert found[0]["measured"]["losses"] == pytest.approx(expected.losses, rel=TOLERANCE)
    for mine, theirs in zip(found[1]["measured"]["evaluations"], expected.evaluations, strict=True):
        assert mine == pytest.approx(theirs.metrics, rel=TOLERANCE)
    events = list(read_events(folder / "measured" / "events.jsonl"))
    told = [event.message for event in events if isinstance(event, Note)]
    assert ["metrics['near'] is evaluated by rank 0 alone, with the whole model" in line for line in told] == [False, True]
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert ["metrics['worst'] is averaged" in note for note in evaluated[0].notes] == [True], "and `near` returns its weight"
    assert not evaluated[1].notes, "told once"


def test_alone_it_is_what_one_would_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, watching = plain(), Watching()
    assert expected["rate"][0] < 0.05, "the plateau was reached"
    job = net_job(callbacks=[watching, atoll.BestCheckpoint()])
    result = job.run(out=tmp_path / "run", progress=False)
    last = watching.snapshots[-1]
    assert result.optimizer is not None
    found = {
        "losses": list(result.losses),
        "evaluations": [event.loss for event in result.evaluations],
        "rate": [group["lr"] for group in result.optimizer.param_groups],
        "weights": {name: value.tolist() for name, value in last.model.items()},
        "ema": {name: value.tolist() for name, value in last.ema.items()},
        "moments": {name: state["exp_avg"].tolist() for name, state in last.optimizer.items()},
    }
    check(found, expected, 1e-6)
    assert command(["export", str(tmp_path / "run"), "--to", str(tmp_path / "ema.safetensors"), "--ema"]) == 0
    for name, value in load_file(tmp_path / "ema.safetensors").items():
        assert torch.allclose(value, torch.tensor(expected["ema"][name]), atol=1e-6)
    logged = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Logged)]
    assert [event.numbers["seen"] for event in logged] == [float(i + 1) for i in range(8)]
    assert command(["report", str(tmp_path / "run")]) == 0
    assert "seen 1 → 8" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("number", [number for number, _ in NETS])
def test_ranks_compute_the_same_and_go_on_under_another_plan(ranks: tuple[Path, list[dict[str, Any]]], number: int, tmp_path: Path) -> None:
    folder, found = ranks
    expected = plain()
    check(found[0][f"net {number}"], expected | {"evaluations": expected["evaluations"][4:]}, TOLERANCE)
    compiled = {event.source for event in read_events(folder / f"net {number}" / "events.jsonl") if isinstance(event, Compiled)}
    assert compiled == ({"rank 0", "rank 1"} if NETS[number][1][1] else set())
    best = min(range(8), key=lambda step: expected["evaluations"][step]) + 1
    assert command(["export", str(folder / f"net {number}"), "--to", str(tmp_path / "best.safetensors"), "--best", "--ema"]) == 0
    model = Net()
    model.load_state_dict(load_file(tmp_path / "best.safetensors"))
    data: Any = net_job().eval_dataset
    with torch.no_grad():
        loss = float(squares(model, torch.utils.data.default_collate([data[i] for i in range(12)])))
    assert loss == pytest.approx(expected["evaluations"][best - 1], rel=1e-4)
    assert net_job().load_model(folder / f"net {number}").state_dict().keys() == model.state_dict().keys()


def test_bf16_is_what_a_plain_loop_in_bf16_is(ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    job = bf16_job()
    model = Net()
    model.load_state_dict(net_job().build_model().state_dict())
    model.to(torch.bfloat16)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    samples = net_job().samples
    for step in range(job.total_steps):
        inputs, wanted = samples.batch(step)
        loss = squares(model, (inputs.bfloat16(), wanted.bfloat16()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    result = job.run(out=tmp_path / "run", progress=False)
    assert list(result.losses) == losses, "bit for bit"
    assert result.model is not None
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in result.model.state_dict().items())
    loaded = job.load_model(tmp_path / "run").state_dict()
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())
    for number in range(2):
        found = ranks[1][0][f"bf16 {number}"]
        assert found["losses"] == pytest.approx(losses, rel=2e-2)
        for name, value in model.state_dict().items():
            assert torch.allclose(torch.tensor(found["weights"][name]), value.float(), atol=2e-2), name
        assert ranks[1][1][f"bf16 {number}"]["weights"] is None


def test_bf16_is_priced_with_two_bytes() -> None:
    graph = atoll.capture(bf16_job())
    assert (graph.precision, graph.master_weights) == ("bf16", False)
    cluster = atoll.load_cluster(Path(__file__).parents[2] / "examples" / "clusters" / "lab.toml")
    plan = parse_plan(
        f"plan v1 graph={graph.name} cluster={cluster.name} mode=lockstep schedule=1f1b batch=4 micro_batch=4\n"
        f"stage 0: layers 0-{len(graph.layers) - 1}: {cluster.devices[0].name}=4\n"
    )
    use = {}
    for master in (False, True):
        priced = Evaluator(msgspec.structs.replace(graph, master_weights=master), cluster).cost(plan)
        use[master] = next(iter(priced.memory.values()))
    assert use[False].parameters == 2.0 * graph.parameters
    assert (use[False].gradients, use[False].optimizer) == (use[True].gradients / 2, use[True].optimizer / 2)


def test_the_best_checkpoint_outlives_the_last_ones_and_is_remembered(tmp_path: Path) -> None:
    class Told(atoll.BestCheckpoint):
        """Improves at the second evaluation for the last time."""

        def improves(self, event: Evaluated, by: float = 0.0) -> bool:
            return event.step <= 2

    job = net_job(callbacks=[Told()], scheduler=None, steps=6)
    job.run(out=tmp_path / "run", progress=False, checkpoint_every=1)
    present = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert present == ["step-00000002", "step-00000005", "step-00000006"]


def test_early_stopping_counts_on_after_a_resume(tmp_path: Path) -> None:
    def run(steps: int, **how: Any) -> Any:
        stopping = atoll.EarlyStopping(patience=3, min_delta=100.0)  # only the first evaluation improves by that
        return net_job(callbacks=[stopping], steps=steps).run(progress=False, **how)

    assert (run(8, out=tmp_path / "a").reason, len(run(8).losses)) == ("stopped", 4)
    assert run(3, out=tmp_path / "b").reason == "done"
    again = run(8, resume=tmp_path / "b")
    assert (again.reason, len(again.losses)) == ("stopped", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eval_data": None, "eval_every": None, "eval_ema": False}, "ReduceLROnPlateau is told the loss of evaluations; give eval_data"),
        ({"ema_decay": 1.5}, "ema_decay: must be from 0 to 1"),
        ({"callbacks": [atoll.EarlyStopping("accuracy")]}, "EarlyStopping: 'accuracy' is not evaluated; there is loss"),
        ({"callbacks": [atoll.BestCheckpoint()]}, "run.keep: there is nowhere to save; give a directory with out"),
        ({"callbacks": [lambda a, b, c: None]}, r"callbacks\[0\]: must be a callable that takes an event, or an event and the run"),
    ],
)
def test_what_cannot_be_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        net_job(**change).run(progress=False)


def test_a_parameter_that_gets_its_first_gradient_late_is_averaged_as_pytorch_does() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late, self.calls = nn.Linear(6, 3), nn.Linear(6, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            return self.first(x) + (self.late(x) if self.calls > 2 else 0)

    watching = Watching()
    given: dict[str, Any] = {"model": Late, "scheduler": None, "parameter_groups": None, "steps": 4, "callbacks": [watching]}
    job = net_job(**given, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    job.run(progress=False)
    model = job.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(4):
        optimizer.zero_grad()
        squares(model, job.samples.batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        averaged.update_parameters(model)
    for name, value in averaged.module.state_dict().items():
        assert torch.allclose(watching.snapshots[-1].ema[name], value, atol=1e-6), name
