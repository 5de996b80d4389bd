"""One group on a real server, with the means to play every party by hand and to move the server's clock."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from timeslice.locks import scripts
from timeslice.locks.connection import connect
from timeslice.locks.keys import GroupKeys, Keys
from timeslice.locks.scripts import Call, Exited, Granted, Mine, Observed, Promoted, Queued, Request, text
from timeslice.locks.view import GroupView, look

T = TypeVar("T")

# Moves every stored time, as if the clock had moved the other way. ARGV[2]: also the time of the last script and what
# is drawn from the clock, so that the scripts see a jump; else time merely passes.
_SHIFT = """
local by, jump = tonumber(ARGV[1]), ARGV[2] == '1'
local function hash(key, pattern)
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local field, value = flat[i], tonumber(flat[i + 1])
    if value and value > 0 and string.find(field, pattern) and (jump or field ~= 'clock_ms')
      and not string.find(field, 'lease_ms$') and not string.find(field, 'ttl_ms$')
      and not string.find(field, 'budget_ms$') and not string.find(field, 'swap_ms$')
      and not string.find(field, 'usage_ms$') then
      redis.call('HSET', key, field, string.format('%.0f', value + by))
    end
  end
end
local function zset(key)
  for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
    redis.call('ZINCRBY', key, by, member)
  end
end
hash(KEYS[1], '_ms$') hash(KEYS[3], '_ms$') hash(KEYS[7], '_ms$')
zset(KEYS[4]) zset(KEYS[6]) zset(KEYS[9])
if jump and by > 0 then
  for _, field in ipairs({ 'counter', 'seq' }) do
    local value = tonumber(redis.call('HGET', KEYS[1], field) or 0)
    redis.call('HSET', KEYS[1], field, string.format('%.0f', value + by))
  end
end
"""


@dataclass(frozen=True)
class Closed:
    """What a finished swap left."""

    lease_id: str
    swap: int


class Lab:
    """Clients ask in the name of jobs, agents and coordinators act by scripts; nothing runs by itself.

    ``twice`` sends every call a second time, as after a lost reply, and compares the kinds of the answers.
    """

    def __init__(self, url: str, prefix: str | None = None, *, twice: bool = False) -> None:
        self.url = url
        self.redis: redis.Redis = connect(url)
        self.group: GroupKeys = Keys(prefix or f"t{secrets.token_hex(6)}").group("g")
        self.twice = twice
        self.floor = 0
        self._ids = 0

    # calls

    def send(self, call: Call[Any]) -> list[Any]:
        """The raw reply."""
        reply: list[Any] = self.redis.eval(call.script.source, len(call.keys), *call.keys, *call.args)
        return reply

    def run(self, call: Call[T]) -> T:
        reply = self.send(call)
        if self.twice:
            again = self.send(call)
            assert text(reply[0]) == text(again[0]), f"{call.script.name}: {reply} then {again}"
        return call.parse(reply)

    # clients

    def request(self, waiter: str, job: str = "", *, served: bool = False, **fields: Any) -> Request:
        job = job or waiter[0]
        return Request(waiter, job, **{"host": "n1", "pid": 7, "start": 1, "lock_only": not served, **fields})

    def ask(self, waiter: str, job: str = "", *, score: str = "", floor: int = 0, **fields: Any) -> Any:
        """Acquire or refresh."""
        return self.run(scripts.acquire(self.group, self.request(waiter, job, **fields), floor=floor, score=score))

    def grant(self, waiter: str, job: str = "", **fields: Any) -> int:
        """Acquire; the token of the grant that must come of it."""
        reply = self.ask(waiter, job, **fields)
        assert isinstance(reply, Granted), reply
        return reply.token

    def queue(self, waiter: str, job: str = "", **fields: Any) -> Queued:
        """Acquire; the reply that must say that it is queued."""
        reply = self.ask(waiter, job, **fields)
        assert isinstance(reply, Queued), reply
        return reply

    def renew(self, waiter: str, token: int, job: str = "", *, floor: int = 0, **fields: Any) -> Any:
        request = self.request(waiter, job, **fields)
        mode = "lock" if request.lock_only else "served"
        return self.run(scripts.renew(self.group, request, token, floor=floor, mode=mode))

    def release(self, waiter: str, token: int | None) -> Any:
        return self.run(scripts.yield_(self.group, waiter, token))

    def cancel(self, waiter: str, by: str = "client") -> str:
        return self.run(scripts.cancel(self.group, waiter, by=by))

    # agents and coordinators

    def join(self, *nodes: str) -> None:
        """Agents of nodes join and report that nothing is on their devices."""
        for node in nodes:
            self.run(scripts.heartbeat(self.group, node, 15_000))
            self.report(node)

    def beat(self, *nodes: str) -> None:
        for node in nodes:
            self.run(scripts.heartbeat(self.group, node, 15_000))

    def forget(self, node: str, *lose: str) -> None:
        """An operator takes out a node that is silent."""
        lapse = "redis.call('HDEL', KEYS[2], '_') redis.call('ZADD', KEYS[1], 1, ARGV[1])"  # works on a full server too
        self.redis.eval(lapse, 2, self.group.nodes, self.group.state, node)
        self.run(scripts.forget(self.group, node, "eve", "", lose=lose))

    def report(
        self, node: str, *observed: Observed, ended: Sequence[Exited] = (), seen: int | None = None, whole: bool = True
    ) -> scripts.Reported:
        number = self.counter if seen is None else seen
        reply = self.run(scripts.report(self.group, node, number, observed, ended, whole=whole))
        assert reply, f"{node} is no member"
        return reply

    def own(self, coordinator: str = "c1") -> int:
        """The epoch of the ownership that must come of it."""
        reply = self.run(scripts.own(self.group, coordinator))
        assert isinstance(reply, Mine), reply
        return reply.epoch

    def command(self, node: str, epoch: int, step: str) -> str:
        """An accepted order; its id."""
        self._ids += 1
        command = f"{self.swap}/{node}/{step}/{self._ids}"
        self.run(scripts.accepted(self.group, node, self.swap, epoch, step, command))
        return command

    def ack(self, node: str, command: str, *observed: Observed, swap: int | None = None, **result: Any) -> bool:
        return self.run(scripts.ack(self.group, node, swap or self.swap, command, observed, **result))

    def prepare(self, epoch: int, *nodes: str) -> None:
        """The planned swap's first step, on all nodes, without fault."""
        self.run(scripts.plan(self.group, self.swap, epoch, "{}", 10_000))
        for node in nodes:
            self.ack(node, self.command(node, epoch, "prepare"), outcome="prepared")

    def carry_out(self, epoch: int, *nodes: str, seen: Sequence[Observed], how: str = "restored") -> Closed:
        """The whole swap; every node observes ``seen`` at its end."""
        swap = self.swap
        self.prepare(epoch, *nodes)
        self.run(scripts.step(self.group, swap, epoch, "prepare", "commit", 10_000))
        for node in nodes:
            self.ack(node, self.command(node, epoch, "commit"), *seen, outcome="done")
        closed = self.run(scripts.promote(self.group, swap, epoch, how))
        assert isinstance(closed, Promoted), closed
        return Closed(closed.lease_id, swap)

    def refuse(self, epoch: int, *nodes: str, reason: str = "no room", defer_ms: int = 30_000) -> None:
        """The swap is prepared, fails and is settled."""
        self.run(scripts.plan(self.group, self.swap, epoch, "{}", 10_000))
        for node in nodes:
            self.ack(node, self.command(node, epoch, "prepare"), outcome="failed", kind="busy", error=reason)
        assert self.run(scripts.settle(self.group, self.swap, epoch, reason, defer_ms)) is None

    # looking

    @property
    def view(self) -> GroupView:
        call = look(self.group)
        return call.parse(self.send(call))

    def number(self, field: str) -> int:
        return self.view.number(field)

    @property
    def swap(self) -> int:
        return self.number("swap_id")

    @property
    def counter(self) -> int:
        return self.number("counter")

    @property
    def holder(self) -> str:
        return self.view.state.get("lease_id", "")

    @property
    def waiting(self) -> list[str]:
        return [entry.waiter for entry in self.view.queue]

    def events(self, kind: str = "") -> list[dict[str, str]]:
        """What the event bus says, oldest first."""
        entries: Any = self.redis.xrange(self.group.events)
        found = [{text(k): text(v) for k, v in fields.items()} for _, fields in entries]
        return [event for event in found if not kind or event["type"] == kind]

    def mail(self, waiter: str) -> list[dict[str, str]]:
        """What lies in a waiter's grant stream."""
        entries: Any = self.redis.xrange(self.group.grant(waiter))
        return [{text(k): text(v) for k, v in fields.items()} for _, fields in entries]

    def wakes(self) -> list[str]:
        """Why the coordinator was woken, oldest first."""
        entries: Any = self.redis.xrange(self.group.inbox)
        return [text(fields[b"why"]) for _, fields in entries]

    # time and loss

    def pass_time(self, seconds: float) -> None:
        """Time goes by, with others using the group meanwhile."""
        self._shift(-seconds, jump=False)

    def jump(self, seconds: float) -> None:
        """The clock steps, or (forwards) nobody could reach the server for so long."""
        self._shift(-seconds, jump=True)

    def _shift(self, seconds: float, *, jump: bool) -> None:
        keys = self.group.all
        self.redis.eval(_SHIFT, len(keys), *keys, int(seconds * 1000), int(jump))

    def lose_everything(self) -> None:
        """What FLUSHALL does to this group."""
        keys = list(self.redis.scan_iter(self.group.prefix + ":*", count=1000))
        if keys:
            self.redis.delete(*keys)

    def plant(self, **fields: str | int) -> None:
        """Write into the state behind the scripts' back."""
        for field, value in fields.items():
            self.redis.hset(self.group.state, field, str(value))


def start_swap(lab: Lab, *nodes: str) -> int:
    """Job a is on the device, b waits for it; the epoch of the owner."""
    lab.join(*(nodes or ("n1",)))
    token = lab.grant("a1", served=True)
    lab.queue("b1", served=True)
    epoch = lab.own()
    lab.release("a1", token)
    assert (lab.view.state["swap_waiter"], lab.view.state["swap_job"]) == ("b1", "b")
    return epoch
