"""Gradients between sites over real TLS, the sites in one process: sums, what is refused, and who is not heard."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.codec.registry import decode, make_codec
from atoll.errors import JobFailedError, RefusedError
from atoll.events import Note
from atoll.fabric.security import Authority, serve
from atoll.fabric.service import CallingPeer
from atoll.runtime.modes.islands import gradient_gateway
from atoll.runtime.modes.islands.gateway_thread import SiteAccount
from atoll.runtime.modes.islands.gradient_gateway import GradientGateway, GradientService, SiteRecords, SiteSaid
from atoll.runtime.modes.islands.gradient_sums import EncodedBucket, GradientSums, StepNumbers
from atoll.runtime.modes.swarm.transport import Directory

pytestmark = pytest.mark.timeout(120)
SITES = ("oslo", "rome", "kyiv")
SIZES = ((("last", 600), ("tail", 3)), (("first", 500),))


class Site:
    """What one has, without a model."""

    def __init__(self, name: str, codec: str = "int4") -> None:
        self.sums = GradientSums(SITES, name, make_codec(codec), lambda: 0)
        self.buffers = [torch.zeros(sum(size for _, size in slots) + len(slots)) for slots in SIZES]
        for number, (slots, buffer) in enumerate(zip(SIZES, self.buffers, strict=True)):
            self.sums.add(number, slots, buffer)
        self.gateway: GradientGateway

    def step(self, rows: Sequence[Tensor]) -> list[Tensor]:
        for number, row in enumerate(rows):
            self.buffers[number].copy_(torch.cat([row, torch.ones(len(SIZES[number]))]))
            self.sums.begin(number, lambda: None)
        for number in range(len(rows)):
            self.sums.finish(number)
        return [buffer.clone() for buffer in self.buffers]


class World:
    def __init__(self, stack: ExitStack, path: Path) -> None:
        self.authority, self.said = Authority.create(path), list[SiteSaid]()

        def heard(name: str, said: SiteSaid) -> bool:
            self.said.append(said)
            return any(each.events for each in self.said)

        coordinator, self.address = serve(self.authority, "127.0.0.1:0", services=[SiteRecords(heard), Directory()])
        stack.enter_context(coordinator)
        self._stack = stack

    def begin(self, site: Site) -> Site:
        name = site.sums.own
        others = {other: f"{other}-1" for other in SITES if other != name}
        site.gateway = GradientGateway(
            self.authority.credentials(f"{name}-1", "worker"), self.address, others, site.sums, {}, lambda event: None, None
        )
        self._stack.callback(site.gateway.close, False)
        site.gateway.start()
        return site


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, tmp_path)


def together(sites: Sequence[Site], calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returns; where one fails, the others end too."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        failed = [future.exception() for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception() is not None]
        for site in sites if failed else ():
            site.sums.fail(JobFailedError(str(failed[0])))
        return [future.result() for future in futures]


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "2-bit"])
def test_all_sites_have_the_same_sum_and_owe_what_was_left_out(codec: str, world: World) -> None:
    sites = [world.begin(Site(name, codec)) for name in SITES]
    owed = [[torch.zeros(603), torch.zeros(500)] for _ in SITES]
    for step in range(3):
        rows = [[torch.randn(603, generator=torch.Generator().manual_seed(9 * step + site)), torch.ones(500) * site] for site in range(3)]
        wanted = [torch.zeros(603), torch.zeros(500)]
        for row, rest in zip(rows, owed, strict=True):
            for number in range(2):
                whole = row[number] + rest[number]
                arrived = decode(make_codec(codec).encode(whole))
                rest[number] = whole - arrived
                wanted[number] = wanted[number] + arrived
        found = together(sites, [lambda site=site, row=row: site.step(row) for site, row in zip(sites, rows, strict=True)])  # type: ignore[misc]
        for number in range(2):
            assert torch.equal(found[0][number], found[1][number])
            assert torch.equal(found[0][number], found[2][number])
            torch.testing.assert_close(found[0][number][: len(wanted[number])], wanted[number], rtol=1e-6, atol=1e-6)
    for site, rest in zip(sites, owed, strict=True):
        torch.testing.assert_close(site.sums.owed()["first"], rest[1], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.cat([site.sums.owed()[name] for name in ("last", "tail")]), rest[0], rtol=1e-6, atol=1e-6)
    said = together(sites, [lambda site=site: site.sums.share([len(site.sums.own)], site.sums.own) for site in sites])  # type: ignore[misc]
    assert said[0] == said[1] == said[2] == [StepNumbers(1, (4.0,), name) for name in SITES]
    sites[0].gateway.tell(SiteAccount(ended="done", steps=3))
    sites[0].gateway.relay(Note(message="a callback of the run asks to stop"))
    sites[0].gateway.close()
    assert sites[0].gateway.stop_asked
    assert ("oslo", "done") in [(each.site, each.account.ended) for each in world.said]


def test_what_is_owed_begins_as_it_was_kept(world: World) -> None:
    site = Site("oslo")
    site.sums.owe({"first": torch.full((500,), 0.5), "gone": torch.ones(7)})
    assert {name: float(row.sum()) for name, row in site.sums.owed().items()} == {"last": 0.0, "tail": 0.0, "first": 250.0}
    site.sums.close()


@pytest.mark.parametrize("met", [False, True])
def test_a_site_that_is_not_heard_ends_the_step_with_its_name(met: bool, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was never there, or went away."""
    if not met:
        monkeypatch.setattr(gradient_gateway, "_ABSENT_SECONDS", 0.5)
    sites = [world.begin(Site(name)) for name in SITES[: 3 if met else 2]]
    rows = [torch.randn(603), torch.randn(500)]
    if met:
        together(sites, [lambda site=site: site.step(rows) for site in sites])  # type: ignore[misc]
        sites.pop().gateway.close(False)
        monkeypatch.setattr(gradient_gateway, "_SILENT_SECONDS", 0.5)
        monkeypatch.setattr(gradient_gateway, "_ABSENT_SECONDS", 0.5)  # on a busy machine it was there between two looks
    with pytest.raises(JobFailedError, match=r"nothing was heard of kyiv for .* while oslo waits for its gradients"):
        sites[0].step(rows)
    sites[1].sums.fail(JobFailedError("the test is over"))


def test_what_cannot_be_meant_is_refused() -> None:
    site = Site("oslo")
    service, rome = GradientService(site.sums, {"rome-1": "rome"}), CallingPeer("rome-1", "worker")
    encoded = make_codec("int4").encode(torch.randn(500))
    good = EncodedBucket(1, 1, b"\1", encoded.header, encoded.parts)
    exact = make_codec("none").encode(torch.full((500,), float("nan")))
    asyncio.run(service.bucket(good, rome))
    for wrong, said in (
        (replace(good, bucket=7), "there is no bucket 7"),
        (replace(good, bucket=0), "not 603 numbers"),
        (replace(good, step=3), "it is of step 3, and this site is at step 0"),
        (replace(good, has_gradient=b"\1\1"), "who has a gradient"),
        (replace(good, parts=encoded.parts[:-1]), "the parts that arrived"),
        (replace(good, header=exact.header, parts=exact.parts), "not finite"),
        (replace(good, header=replace(encoded.header, codec="int8")), "in int8"),
    ):
        with pytest.raises(RefusedError, match=said):
            asyncio.run(service.bucket(wrong, rome))
    with pytest.raises(RefusedError, match="kyiv-1 speaks for no other site"):
        asyncio.run(service.bucket(good, CallingPeer("kyiv-1", "worker")))
    site.sums.close()


def test_a_gradient_that_is_not_finite_is_not_sent() -> None:
    site = Site("oslo")
    with pytest.raises(JobFailedError, match="step 1: the gradient of oslo is nan"):
        site.step([torch.full((603,), float("inf")), torch.zeros(500)])
    site.sums.close()
