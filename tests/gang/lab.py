"""A group on a real server, with the ranks of gangs played by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.locks.lab import Lab
from timeslice.locks import scripts
from timeslice.locks.scripts import Granted, Party, Queued, Renewed, Request

HOST = "n1"

# The time of a rank's own renewal stands inside of a text, where `Lab` does not move it.
_SHIFT_RENEWALS = """
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local head, at = string.match(flat[i + 1], '^(%S+ %S+ %S+ %S+ )([1-9]%d*)$')
  if at and string.find(flat[i], '/party/') then
    redis.call('HSET', KEYS[1], flat[i], head .. string.format('%.0f', tonumber(at) + tonumber(ARGV[1])))
  end
end
"""


@dataclass
class Rank:
    """One rank of a gang as its client knows it."""

    lab: GangLab
    request: Request
    gang: str = ""
    token: int = 0
    score: str = ""

    @property
    def number(self) -> int:
        assert self.request.party
        return self.request.party.rank

    def ask(self, **known: Any) -> Any:
        """Join, or refresh; what was answered is kept."""
        given = {"gang": self.gang, "score": self.score, **known}
        reply = self.lab.run(scripts.join(self.lab.group, self.request, **given))
        if isinstance(reply, Granted | Queued):
            self.gang = reply.gang
        if isinstance(reply, Granted):
            self.token = reply.token
        elif isinstance(reply, Queued):
            self.score = reply.score or self.score
        return reply

    def read(self) -> bool:
        """Whether a grant lies in the gang's stream; its token is kept."""
        grants = [entry for entry in self.lab.mail(self.gang) if entry["kind"] == "grant"]
        if grants:
            self.token = int(grants[-1]["token"])
        return bool(grants)

    def renew(self, *, floor: int = 0) -> Any:
        request = replace(self.request, waiter=self.gang)
        mode = "lock" if request.lock_only else "served"
        return self.lab.run(scripts.renew(self.lab.group, request, self.token, floor=floor, mode=mode))

    def leave(self, *, floor: int = 0) -> Any:
        call = scripts.yield_(self.lab.group, self.gang, self.token, rank=self.number, floor=floor)
        return self.lab.run(call)

    def give_up(self, why: str = "") -> str:
        return self.lab.run(scripts.cancel(self.lab.group, self.request.waiter, why=why))

    def point(self, number: int, min_slice_ms: int = 0) -> bool:
        return self.lab.run(scripts.gang_point(self.lab.group, self.gang, self.number, number, min_slice_ms))


class GangLab(Lab):
    """Makes ranks. Each has a process of its own on node n1, with its number and the world's as pid."""

    def rank(self, number: int, world: int, job: str = "a", **fields: Any) -> Rank:
        self._ids += 1
        party = Party(fields.pop("gang", "g1"), number, world)
        request = self.request(
            f"{job}{number}-{self._ids}", job, **{"pid": 100 + number, "party": party, "served": False, **fields}
        )
        return Rank(self, request)

    def gang(self, world: int, job: str = "a", **fields: Any) -> list[Rank]:
        """A gang whose ranks have all asked, the last first."""
        ranks = [self.rank(number, world, job, **fields) for number in range(world)]
        for rank in reversed(ranks):
            rank.ask()
        for rank in ranks:
            rank.gang = ranks[-1].gang
        return ranks

    def holding(self, world: int, job: str = "a", **fields: Any) -> list[Rank]:
        """A gang that holds, all its ranks inside."""
        ranks = self.gang(world, job, **fields)
        for rank in ranks:
            assert rank.read(), self.view.state
            assert isinstance(rank.renew(), Renewed)
        return ranks

    def _shift(self, seconds: float, *, jump: bool) -> None:
        super()._shift(seconds, jump=jump)
        self.redis.eval(_SHIFT_RENEWALS, 1, self.group.waiters, int(seconds * 1000))

    def leftovers(self) -> dict[str, int]:
        """What is kept of waiters and ranks."""
        group = self.group
        return {
            "waiters": self.redis.hlen(group.waiters),
            "alive": self.redis.zcard(group.alive),
            "queue": self.redis.zcard(group.queue),
        }


NOTHING = {"waiters": 0, "alive": 0, "queue": 0}
