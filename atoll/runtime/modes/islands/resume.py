"""Going on with a run of several sites: from the run's checkpoint, whichever mode wrote it, in rounds that are counted anew.

The checkpoint has the common weights, and an optimizer. Where sites wrote it, the outer momentum, what each site's codec left out and
each site's own optimizer are on their disks, and the journal says up to which of every site's steps the weights have them.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.control.journal import read_records
from atoll.control.rounds.history import RoundHistory
from atoll.control.rounds.messages import Offer, RoundRecord, SiteJoined
from atoll.errors import AtollError, JobFailedError
from atoll.runtime.checkpoint.state_file import newest_whole
from atoll.runtime.modes.islands.saved import SavedExchange, read_exchange, write_exchange
from atoll.runtime.modes.islands.spec import MARK, RoundMark, directory_of_site
from atoll.runtime.modes.swarm.spec import JOURNAL
from atoll.runtime.run_directory import RunDirectory, with_checksum

__all__ = ["Beginning", "growth_of", "link_checkpoint", "prepare_rounds", "read_beginning", "state_to_begin_with"]

_BEGINNING = "beginning.json"
BEFORE = "before"  # in a site's directory: what it has kept of the rounds before these
_RECORDS: "msgspec.json.Decoder[RoundRecord]" = msgspec.json.Decoder(RoundRecord)


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rounds begin: after how many steps, of each site; and of which state of the rounds before, if there were some."""

    step: int = 0
    bases: dict[str, int] = {}
    mark: RoundMark | None = None
    kept: tuple[str, ...] = ()  # sites that have kept the common state of the mark
    growth: tuple[tuple[int, int], ...] = ()  # of batches by sites that joined before, and back (`Samples.grow`)
    notes: tuple[str, ...] = ()


def read_beginning(directory: RunDirectory) -> Beginning:
    """Of the present rounds; a new run's is nothing."""
    return directory.read_as(_BEGINNING, Beginning) if (directory.path / _BEGINNING).exists() else Beginning()


def prepare_rounds(directory: RunDirectory, sites: Sequence[str]) -> Beginning | None:
    """Puts everything where the processes of these sites find it; None where nothing was saved, so that the run begins anew."""
    found, before = newest_whole(directory.checkpoints), read_beginning(directory)
    journal = directory.path / JOURNAL
    records = _records(journal)
    if journal.exists():
        journal.rename(journal.with_name(f"journal-before-{found.step if found is not None else 0}.jsonl"))
    if found is None:
        (directory.path / _BEGINNING).unlink(missing_ok=True)
        return None
    said = found.extra.get(MARK)
    mark = msgspec.convert(said, RoundMark) if said is not None else None
    growth: tuple[tuple[int, int], ...] = ()
    if mark is None:
        bases = dict.fromkeys(sites, found.step)
    elif mark == before.mark:
        bases, growth = before.bases, before.growth
    else:
        history = RoundHistory.of(records)
        named = history.named_at(mark.position)
        bases = {site: before.bases.get(site, 0) + (named[site].last if site in named else 0) for site in sites}
        growth = before.growth + growth_of(history.joined, bases, named)
    kept = []
    for number, site in enumerate(sites):
        own = directory_of_site(directory, site, number == 0)
        own.path.mkdir(parents=True, exist_ok=True)
        if number and mark is None:
            link_checkpoint(found.path, own.checkpoints / found.path.name)
        kept += [site] if _put_aside(own.path, mark if mark != before.mark else None) and mark is not None else []
    notes = list(found.notes)
    if mark is not None and not kept:
        notes.append("no site has kept the outer momentum; it begins at zero")
    beginning = Beginning(step=found.step, bases=bases, mark=mark, kept=tuple(kept), notes=tuple(notes), growth=growth)
    directory.write(_BEGINNING, with_checksum(msgspec.json.encode(beginning)))
    return beginning


def growth_of(joined: Sequence[SiteJoined], bases: Mapping[str, int], named: Mapping[str, Offer]) -> tuple[tuple[int, int], ...]:
    """Sites that joined have to join anew: batches are as long as before once no site has been there."""
    reached = [one.first + (named[one.site].last if one.site in named else 0) for one in joined]
    furthest = max([*bases.values(), *reached], default=0)
    return tuple(change for one in joined for change in ((one.first, one.samples), (max(furthest, one.first), -one.samples)))


def state_to_begin_with(directory: RunDirectory, site: str, gives: Callable[[str], bool] = lambda site: True) -> SavedExchange | None:
    """The common state of the rounds before, with what this site's codec left out; None where there is none.

    A site that has not kept it takes what one that `gives` it has kept.
    """
    beginning = read_beginning(directory)
    if beginning.mark is None or not beginning.kept:
        return None
    holder = next(kept for kept in sorted(beginning.kept, key=lambda kept: kept != site) if kept == site or gives(kept))
    found = read_exchange(directory_of_site(directory, holder, False).path / BEFORE, beginning.mark.position)
    return found if found is None or holder == site else found._replace(residual=None)


def _put_aside(own: Path, mark: RoundMark | None) -> bool:
    """What a site has kept of the mark's state is out of the way of the new rounds; whether it is there. None: it is as it was."""
    aside = own / BEFORE
    if mark is None:
        for rest in own.glob("exchange-*.safetensors"):
            rest.unlink()
        return any(aside.glob("exchange-*.safetensors"))
    shutil.rmtree(aside, ignore_errors=True)
    found = read_exchange(own, mark.position)
    if found is not None:
        aside.mkdir()
        write_exchange(aside, found)
    for rest in own.glob("exchange-*.safetensors"):
        rest.unlink()
    return found is not None


def _records(journal: Path) -> Sequence[RoundRecord]:
    try:
        return read_records(journal.read_bytes() if journal.exists() else b"", _RECORDS)[0]
    except AtollError as error:
        raise JobFailedError(f"{journal}: {error}") from error


def link_checkpoint(source: Path, target: Path) -> None:
    """The same files under another name, where the disk can do that."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    if not target.exists():
        shutil.copytree(source, target, copy_function=link)
