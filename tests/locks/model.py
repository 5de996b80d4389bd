"""What the lock of a lock-only group should do, in Python. Seconds; nothing is shared with the Lua."""

from __future__ import annotations

from dataclasses import dataclass, field

TTL, LEASE, QUIET, ENDED_KEPT, JUMP = 15.0, 30.0, 30.0, 120.0, 10.0
MARK = 0.001  # a deadline after a clock step is shorter by this than one after a sign of life


@dataclass
class Waiter:
    name: str
    band: int
    order: float  # when it was queued, and after whom
    alive: float  # until when


@dataclass
class Model:
    """The state that the server should be in, and the answers it should give."""

    now: float = 0.0
    last: float = 0.0  # when anybody last asked anything
    rebased: float = -1e9
    queue: list[Waiter] = field(default_factory=list)
    lease: str = ""
    confirmed: bool = False
    deadline: float = 0.0
    drawn: int = 0  # grants so far
    token: int = 0  # of the last grant that the server remembers
    quiet: float = -1e9
    ended: dict[str, float] = field(default_factory=dict)
    tickets: int = 0

    def acquire(self, name: str, band: int, order: float | None, news: bool) -> str:
        """'ended', 'granted' or 'queued'. ``order`` is that of an earlier entry; ``news``: the caller knows more."""
        if name in self.ended:
            return "ended"
        self._settle(news)
        if self.lease == name and self.deadline >= self.now:
            self.confirmed, self.deadline = True, self.now + LEASE
            return "granted"
        self._reap()
        entry = next((waiter for waiter in self.queue if waiter.name == name), None)
        if entry is None:
            self.tickets += 1
            entry = Waiter(name, band, self.tickets if order is None else order, 0.0)
            self.queue.append(entry)
            self.queue.sort(key=lambda waiter: (-waiter.band, waiter.order))
        entry.alive = self.now + TTL
        self._advance(caller=name)
        return "granted" if self.lease == name else "queued"

    def renew(self, name: str, token: int, news: bool) -> str:
        """'ok' or 'lost'."""
        forgotten = not self.lease and self.token < token
        self._settle(news)
        if (self.lease, self.token) == (name, token) and self.deadline >= self.now:
            self.confirmed, self.deadline = True, self.now + LEASE
        elif forgotten and name not in self.ended:
            self.lease, self.token, self.confirmed, self.deadline = name, token, True, self.now + LEASE
        else:
            self._reap()
            self._advance()
            return "lost"
        return "ok"

    def release(self, name: str, token: int, news: bool = False) -> str:
        """'ok' or 'not_holder'. ``news``: the token itself is more than the server knows."""
        mine = (self.lease, self.token) == (name, token)
        forgotten = self.token < token and name not in self.ended
        if not mine and not forgotten:
            return "ok" if name in self.ended else "not_holder"
        self._settle(news and forgotten)
        if mine:
            self.lease = ""
        elif not self.lease:
            self.token = token
        self._end(name)
        if self.queue:
            self._reap()
            self._advance()
        return "ok"

    def cancel(self, name: str) -> None:
        self._settle(news=False)
        if self.lease == name:
            self.lease = ""
        self.queue = [waiter for waiter in self.queue if waiter.name != name]
        self._end(name)
        self._reap()
        self._advance()

    def lose(self) -> None:
        """FLUSHALL."""
        self.queue, self.lease, self.token, self.quiet = [], "", 0, -1e9
        self.ended, self.rebased = {}, -1e9
        self.last = self.now

    def _end(self, name: str) -> None:
        self.ended = {other: at for other, at in self.ended.items() if at > self.now - ENDED_KEPT}
        self.ended[name] = self.now

    def pass_time(self, seconds: float) -> None:
        """Others use the group meanwhile, so that no jump is seen."""
        self.now += seconds
        self.last += seconds

    def _settle(self, news: bool) -> None:
        if self.now < self.last or self.now > self.last + JUMP:
            self._rebase()
        self.last = self.now
        if news:
            self.quiet = self.now + QUIET

    def _rebase(self) -> None:
        back = self.now < self.last

        def again(deadline: float, term: float) -> float:
            if back:
                return self.now + term
            return self.now + term - MARK if deadline - term >= self.rebased else deadline

        if self.lease:
            self.deadline = again(self.deadline, LEASE if self.confirmed else TTL)
        for waiter in self.queue:
            waiter.alive = again(waiter.alive, TTL)
        if self.quiet > self.last:
            self.quiet = again(self.quiet, QUIET)
        self.rebased = min(self.rebased, self.now) if back else self.now

    def _reap(self) -> None:
        if self.lease and self.deadline < self.now:
            self.lease = ""
        self.queue = [waiter for waiter in self.queue if waiter.alive >= self.now]

    def _advance(self, caller: str = "") -> None:
        if self.lease or self.quiet > self.now or not self.queue:
            return
        first = self.queue.pop(0)
        self.drawn += 1
        self.lease, self.token, self.confirmed = first.name, self.drawn, first.name == caller
        self.deadline = self.now + LEASE if self.confirmed else first.alive
