"""What gangs in a lock-only group should do, in Python. Seconds; nothing is shared with the Lua."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TTL, LEASE = 15.0, 30.0


@dataclass(eq=False)
class Party:
    """One process that is a rank of its job's gang."""

    job: str
    rank: int
    round: Round | None = None
    state: Literal["waiting", "inside", "left", "over"] = "waiting"
    alive: float = 0.0


@dataclass(eq=False)
class Round:
    """One gang, from its first rank's arrival to its end."""

    job: str
    parties: dict[int, Party] = field(default_factory=dict)

    @property
    def everybody_left(self) -> bool:
        return all(party.state == "left" for party in self.parties.values())


@dataclass
class Model:
    """The state that the server should be in, and the answers it should give."""

    world: int
    now: float = 0.0
    forming: dict[str, Round] = field(default_factory=dict)
    queue: list[Round] = field(default_factory=list)
    lease: Round | None = None
    grants: int = 0

    def join(self, party: Party) -> str:
        """'ended', 'granted' or 'queued', which a gang that forms is called, too."""
        if party.state in {"over", "left"}:
            return "ended"
        self._reap()
        if party.state == "over":
            self._advance()
            return "ended"
        if party.round is None:
            party.round = self.forming.setdefault(party.job, Round(party.job))
            earlier = party.round.parties.get(party.rank)
            if earlier:
                earlier.state = "over"
            party.round.parties[party.rank] = party
        if party.round is not self.lease:
            party.alive = self.now + TTL
            if len(party.round.parties) == self.world and self.forming.get(party.job) is party.round:
                del self.forming[party.job]
                self.queue.append(party.round)
            self._advance()
        if party.round is not self.lease:
            return "queued"
        self._sign(party)
        return "granted"

    def renew(self, party: Party) -> str:
        """'ok' or 'lost'."""
        self._reap()
        if party.round and party.round is self.lease and party.state in {"waiting", "inside"}:
            self._sign(party)
            return "ok"
        self._advance()
        return "lost"

    def leave(self, party: Party) -> str:
        """'ok' or 'not_holder'."""
        if party.state == "left":
            return "ok"
        if party.round is None or party.round is not self.lease:
            return "not_holder"
        party.state = "left"
        if party.round.everybody_left:
            self.lease = None
            if self.queue:
                self._reap()
                self._advance()
        return "ok"

    def give_up(self, party: Party) -> None:
        if party.round and party.state in {"waiting", "inside"}:
            self._end(party.round)
        party.state = "over"
        self._reap()
        self._advance()

    def _sign(self, party: Party) -> None:
        party.state, party.alive = "inside", self.now + LEASE

    def _end(self, over: Round) -> None:
        """A gang that ends by one of its ranks ends for all."""
        for party in over.parties.values():
            if party.state != "left":
                party.state = "over"
        if self.forming.get(over.job) is over:
            del self.forming[over.job]
        if over in self.queue:
            self.queue.remove(over)
        if self.lease is over:
            self.lease = None

    def _reap(self) -> None:
        lease = [self.lease] if self.lease else []
        for each in [*self.forming.values(), *self.queue, *lease]:
            if any(party.state != "left" and party.alive < self.now for party in each.parties.values()):
                self._end(each)

    def _advance(self) -> None:
        if self.lease is None and self.queue:
            self.lease = self.queue.pop(0)
            self.grants += 1
