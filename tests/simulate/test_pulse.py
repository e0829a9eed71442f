"""What runs long says so, on standard error and not all the time."""

import pytest

from atoll.simulate.pulse import Pulse


def test_it_speaks_when_it_is_time_and_leaves_answers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Pulse(3600.0).count("seeds", 1, 100)
    Pulse(0.0).count("seeds", 20, 100)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "seeds: 20 of 100, about 0 s left\n"
