"""When such a run goes on, looks and ends: by launches and minutes, never by what it found."""

from __future__ import annotations

import pytest

from evalgate.errors import EvidenceError
from evalgate.looks import Look
from evalgate.stopping import MAX_BLOCKS, Stopping, TimeLimit


class Machine:
    """Blocks of a given length on a clock that nothing else moves."""

    def __init__(self, block_s: float | list[float], open_until: int, **settings: float) -> None:
        self.now = 1000.0
        self.done = 0
        self._block_s = block_s
        self._open_until = open_until
        self.saves = 0
        self.said: list[str] = []
        given = {"first_look": 3, "heavy_blocks": 0, **settings}
        limit = TimeLimit(given.pop("max_minutes", 10.0), clock=lambda: self.now)
        self.stopping = Stopping(
            limit=limit,
            open_rules=self.find_open,
            **given,  # type: ignore[arg-type]
        )

    def find_open(self) -> list[str]:
        return [] if self.done >= self._open_until else ["TPOT"]

    def save(self) -> None:
        self.saves += 1

    def wants_block(self) -> bool:
        return self.stopping.wants_block(self.done, self.save, self.said.append)

    def run(self) -> Stopping:
        while self.wants_block():
            block_s = self._block_s
            seconds = block_s if isinstance(block_s, float) else block_s[self.done]
            self.now += seconds
            self.done += 1
            self.stopping.block_s.append(seconds)
        return self.stopping


def test_it_ends_at_the_first_look_that_leaves_nothing_open():
    machine = Machine(60.0, open_until=5)
    stopping = machine.run()
    assert (machine.done, stopping.ended) == (5, "decided")
    # Ten minutes hold ten blocks: 0.3, 0.4 and 0.5 of them, each to the power of 1.5.
    assert [look.blocks for look in stopping.looks] == [3, 4, 5]
    assert [look.spent for look in stopping.looks] == pytest.approx([0.1643, 0.2530, 0.3536], 1e-3)
    assert machine.saves == 3


def test_the_results_are_not_looked_at_before_the_first_look():
    machine = Machine(60.0, open_until=0)
    assert machine.run().looks[0].blocks == 3


def test_no_block_is_started_that_does_not_fit_and_the_last_look_spends_the_rest():
    machine = Machine(170.0, open_until=99)
    stopping = machine.run()  # 510 s of 600 are used: a fourth does not fit
    assert (machine.done, stopping.ended) == (3, "minutes")
    assert stopping.looks == [Look(3, 1.0)]
    assert "open are TPOT; another takes about 2.8 minutes, 1.5 are left" in machine.said[-1]


def test_blocks_that_got_slower_end_it_earlier_and_still_spend_all():
    machine = Machine([60.0, 60.0, 60.0, 60.0, 200.0, 200.0], open_until=99)
    stopping = machine.run()
    assert [look.blocks for look in stopping.looks] == [3, 4, 5]
    assert stopping.planned_blocks == 10
    assert stopping.looks[-1].spent == 1.0


def test_minutes_that_end_before_the_first_look_leave_a_single_look():
    machine = Machine(250.0, open_until=99, first_look=6)
    assert machine.run().looks == [Look(2, 1.0)]


def test_blocks_with_tasks_do_not_say_how_long_another_one_takes():
    machine = Machine([300.0, 60.0, 60.0, 60.0, 60.0, 60.0], open_until=99, heavy_blocks=1)
    assert machine.run().planned_blocks == machine.done == 6


def test_minutes_without_end_do_not_mean_launches_without_end():
    machine = Machine(1.0, open_until=999, max_minutes=600.0)
    stopping = machine.run()
    assert (machine.done, stopping.ended) == (MAX_BLOCKS, "launches")
    assert stopping.looks[-1] == Look(MAX_BLOCKS, 1.0)


def test_what_was_stored_goes_on_with_the_minutes_that_are_left():
    machine = Machine(60.0, open_until=99)
    for _ in range(4):
        assert machine.wants_block()
        machine.now += 60
        machine.done += 1
        machine.stopping.block_s.append(60.0)
    assert machine.wants_block()
    stored = machine.stopping.to_json()
    machine.now += 9999  # nobody measured
    again = Stopping.restore(stored, open_rules=machine.find_open, clock=lambda: machine.now)
    assert again.limit.used_s == pytest.approx(240)
    machine.stopping = again
    assert machine.run().looks[-1] == Look(10, 1.0)
    assert [look.blocks for look in again.looks] == list(range(3, 11))


def test_a_resumed_run_whose_minutes_are_spent_looks_no_second_time():
    machine = Machine(60.0, open_until=99)
    for _ in range(3):
        machine.done += 1
        machine.stopping.block_s.append(60.0)
    assert machine.wants_block()
    stored = {**machine.stopping.to_json(), "used_s": 590.0}
    machine.stopping = Stopping.restore(
        stored, open_rules=machine.find_open, clock=lambda: machine.now
    )
    assert not machine.wants_block()
    assert machine.stopping.ended == "minutes"
    assert len(machine.stopping.looks) == 1


def test_what_is_damaged_is_not_resumed():
    with pytest.raises(EvidenceError, match="max_minutes"):
        Stopping.restore({"first_look": 3}, open_rules=list)
