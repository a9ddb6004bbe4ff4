"""The running batch in simulated time, with the step times of an H200."""

from __future__ import annotations

from benchmarks.simulate_listeners import simulate_listeners


def test_a_pause_of_the_host_is_not_heard_where_many_listen() -> None:
    """A full garbage collection took 0.35 s. Who had begun with a tenth of a second of sound had none left, while
    few of 200 listeners were spoken at the moment."""
    summary = simulate_listeners(200, seed=0, seconds=16, pauses=range(9, 16), pause_seconds=0.3).summary()
    assert summary["clean"] and summary["requests"] > 250
