"""Random histories of gangs on a real server, compared step by step with the model."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.gang.lab import NOTHING, GangLab, Rank
from tests.gang.model import Model, Party
from timeslice.embedded import EmbeddedServer
from timeslice.locks.scripts import Ended, Granted, Queued, Renewed, Yielded

WORLD = 2
SLOTS = [(job, rank) for job in "ab" for rank in range(WORLD)]
SLOT = st.sampled_from(SLOTS)
STEPS_S = [4, 8]  # multiples of 4 keep every deadline (15, 30 s) at least a second from any moment
DRIFT_S = 0.9  # an example that took longer than this in real time is not carried on
LONGEST_S = 110.0  # what ended is remembered for 120 s


class GangMachine(RuleBasedStateMachine):
    """Ranks of two jobs ask, renew, leave, give up, die and are started again; time goes by; answers are lost."""

    url: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.lab = GangLab(self.url)
        self.model = Model(WORLD)
        self.ranks: dict[tuple[str, int], tuple[Rank, Party]] = {}
        self.tokens: list[int] = []
        self.began = time.monotonic()

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.began < DRIFT_S

    def teardown(self) -> None:
        if self.fresh:
            for rank, party in self.ranks.values():
                rank.give_up()
                self.model.give_up(party)
            self.lab.pass_time(40)  # who died is over, too
            self.lab.grant("y1")
            self.lab.release("y1", self.lab.number("token"))
            assert self.lab.leftovers() == NOTHING
        self.lab.lose_everything()
        self.lab.redis.close()

    @rule(slot=SLOT, twice=st.booleans())
    def start(self, slot: tuple[str, int], twice: bool) -> None:
        """A process asks for the first time. One that was there before is dead, or has done with its round."""
        if not self.fresh:
            return
        job, number = slot
        self.ranks[slot] = self.lab.rank(number, WORLD, job), Party(job, number)
        self.ask(slot, twice)

    @rule(slot=SLOT, twice=st.booleans(), forgets=st.booleans())
    def refresh(self, slot: tuple[str, int], twice: bool, forgets: bool) -> None:
        """The wait goes on; ``forgets``: the answer that told the gang was lost."""
        if self.fresh and slot in self.ranks:
            self.ask(slot, twice, **({"gang": ""} if forgets else {}))

    def ask(self, slot: tuple[str, int], twice: bool, **known: Any) -> None:
        rank, party = self.ranks[slot]
        for _ in range(1 + twice):
            expected = {"ended": Ended, "granted": Granted, "queued": Queued}[self.model.join(party)]
            answer: Any = rank.ask(**known)
            assert isinstance(answer, expected), (slot, answer)

    def read(self, rank: Rank) -> None:
        if rank.gang == self.lab.holder:
            rank.token = self.lab.number("token")

    @rule(slot=SLOT)
    def renew(self, slot: tuple[str, int]) -> None:
        """A rank confirms its grant, or renews."""
        if self.fresh and slot in self.ranks and self.ranks[slot][0].gang:
            rank, party = self.ranks[slot]
            self.read(rank)
            assert isinstance(rank.renew(), Renewed) is (self.model.renew(party) == "ok")

    @rule(slot=SLOT, twice=st.booleans())
    def leave(self, slot: tuple[str, int], twice: bool) -> None:
        """A rank that was inside gives the group up."""
        if not self.fresh or slot not in self.ranks or self.ranks[slot][1].state not in {"inside", "left"}:
            return
        rank, party = self.ranks[slot]
        for _ in range(1 + twice):
            assert isinstance(rank.leave(), Yielded) is (self.model.leave(party) == "ok")

    @rule(slot=SLOT)
    def give_up(self, slot: tuple[str, int]) -> None:
        """A rank withdraws, whatever it was."""
        if self.fresh and slot in self.ranks and self.ranks[slot][1].state != "left":
            rank, party = self.ranks.pop(slot)
            rank.give_up()
            self.model.give_up(party)

    @precondition(lambda self: self.model.now < LONGEST_S)
    @rule(seconds=st.sampled_from(STEPS_S))
    def pass_time(self, seconds: int) -> None:
        self.lab.pass_time(seconds)
        self.model.now += seconds

    @invariant()
    def the_server_is_in_the_model_s_state(self) -> None:
        """Who holds, who waits in which order, who forms; and no token came twice."""
        if not self.fresh:
            return
        view = self.lab.view
        assert [gang.job for gang in view.queue] == [each.job for each in self.model.queue]
        assert {gang.job: {party.rank for party in gang.parties} for gang in view.forming} == {
            job: set(each.parties) for job, each in self.model.forming.items()
        }
        lease = self.model.lease
        assert view.state.get("job", "") == (lease.job if lease else "")
        states = {"waiting": "arrived", "inside": "inside", "left": "left"}
        assert {party.rank: party.state for party in view.parties} == (
            {rank: states[party.state] for rank, party in lease.parties.items()} if lease else {}
        )
        if view.number("token") and view.number("token") not in self.tokens:
            self.tokens.append(view.number("token"))
        assert self.tokens == sorted(self.tokens)


def test_random_histories_of_gangs_agree_with_the_model(server: EmbeddedServer) -> None:
    """One lease at most, nobody in before all have arrived, first complete first served, nothing left behind."""
    GangMachine.url = server.url
    run_state_machine_as_test(
        GangMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
