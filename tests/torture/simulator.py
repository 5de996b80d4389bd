"""Makes up legal histories: a small group that does everything right, under what is done to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.torture.tale import N, Tale

JOBS = "abc"


class Simulator:
    """One group, one node, three jobs. Each choice of a number is a step, if that step is possible now."""

    def __init__(self, choices: Sequence[int], *, lock_only: bool) -> None:
        self.tale = Tale(lock_only=lock_only)
        self.lock_only = lock_only
        self.label = {job: f"{job}.1" for job in JOBS}
        self.queue: list[str] = []  # waiters, first come first
        self.holder = ""
        self.where = dict.fromkeys(JOBS, "")  # "", in, out
        self.content = dict.fromkeys(JOBS, "")
        self._tries = 0
        self._steps: list[Callable[[str], None]] = [
            *(self.ask, self.ask, self.serve, self.serve, self.leave),
            *(self.kill_holder, self.kill_waiter, self.stop_holder, self.flush),
        ]
        for choice in choices:
            self._steps[choice % len(self._steps)](JOBS[choice // len(self._steps) % len(JOBS)])
        self.tale.calm(1000)
        while self.queue:
            self.leave("")
            self.serve("")
        self.leave("")
        self.tale.ends()

    def ask(self, job: str) -> None:
        waiting = {waiter[0] for waiter in self.queue}
        if job in waiting or job == self.holder[:1]:
            return
        self._tries += 1
        self.tale.asks(self.label[job])
        self.queue.append(f"{job}-{self._tries}")
        self.tale.told("WaiterQueued", self.queue[-1])

    def serve(self, _: str) -> None:
        if self.holder or not self.queue:
            return
        waiter = self.queue.pop(0)
        job = waiter[0]
        others = [other for other in JOBS if other != job and self.where[other] == "in"]
        if not self.lock_only and (others or self.where[job] == "out"):
            self.tale.told("SwapStarted", waiter, swap="1")
            for other in others:
                self._bring_out(other)
            if self.where[job] == "out":
                self.tale.moves(job, "restore", "release")
            self.tale.told("SwapFinished", job=job)
        self.holder = waiter
        self.tale.granted(waiter)
        self.tale.enters(self.label[job], token=self.tale.token)
        if not self.lock_only:
            self._work(job)

    def leave(self, _: str) -> None:
        if self.holder:
            self.tale.leaves(self.label[self.holder[0]])
            self._ends("LeaseYielded")

    def kill_holder(self, _: str) -> None:
        if self.holder:
            job = self.holder[0]
            self._restart(job)
            self._ends("LeaseReclaimed")

    def kill_waiter(self, job: str) -> None:
        for waiter in [waiter for waiter in self.queue if waiter[0] == job]:
            self._restart(job)
            self.tale.told("WaiterReaped", waiter)
            self.queue.remove(waiter)

    def stop_holder(self, _: str) -> None:
        if not self.holder:
            return
        job = self.holder[0]
        fault = self.tale.fault("stop", self.label[job])
        self.tale.wait(3)
        self._ends("LeaseReclaimed")
        if not self.lock_only:
            self._bring_out(job)
        self.tale.heals(fault)
        self.tale.loses(self.label[job])

    def flush(self, _: str) -> None:
        self.tale.heals(self.tale.fault("flush"))
        self.tale.told("StateLost")
        if self.holder:
            self.tale.told("LeaseReinstalled", self.holder, token=str(self.tale.token))
        for waiter in self.queue:
            self.tale.told("WaiterQueued", waiter)
        self.tale.wait(20)  # beyond the time in which a place may be an older one

    def _work(self, job: str) -> None:
        who = self.label[job]
        if expected := self.content[job]:
            self.tale.checks(who, expected, expected)
        self.content[job] = f"{job}{self._tries}"
        self.where[job] = "in"
        self.tale.measured(job)

    def _bring_out(self, job: str) -> None:
        self.tale.moves(job, "prepare", "suspend")
        self.where[job] = "out"

    def _ends(self, kind: str) -> None:
        self.tale.told(kind, self.holder, token=str(self.tale.token))
        self.holder = ""

    def _restart(self, job: str) -> None:
        fault = self.tale.fault("kill", self.label[job])
        number = int(self.label[job].partition(".")[2])
        self.label[job] = f"{job}.{number + 1}"
        self.tale.born(self.label[job], "job", job=job, node=N)
        self.tale.heals(fault)
        self.where[job] = self.content[job] = ""
