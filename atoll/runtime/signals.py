"""Which signals ask a run to stop."""

import signal

__all__ = ["signals_to_stop"]


def signals_to_stop() -> tuple[signal.Signals, ...]:
    """Ctrl-C, SIGTERM and the end of the terminal, unless that is ignored, as `nohup` has it."""
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, hangup
