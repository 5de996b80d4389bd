"""What a torture run plays with: servers, a proxy, agents and coordinators, on folders and disks of the run."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from timeslice.arena import Device, EmulatedDeviceError, syscalls
from timeslice.errors import TimeSliceError
from timeslice.locks import scripts
from timeslice.locks.drivers import SyncDriver
from timeslice.locks.keys import Keys
from timeslice.torture import forms
from timeslice.torture.clock import prepare_server
from timeslice.torture.faults import World, groups_of
from timeslice.torture.fleet import make_fleet
from timeslice.torture.fleet_base import HOST
from timeslice.torture.history import Born, Writer
from timeslice.torture.processes import Child, Processes
from timeslice.torture.proxy import Proxy
from timeslice.torture.stage import (
    CONFIG,
    COORDINATORS,
    DEVICE_BYTES,
    GROUPS,
    LOCK_GROUP,
    NODE_TTL_S,
    NODES,
    OWNER_LEASE_MS,
    ROOM,
    SERVED,
    Topology,
    served_by,
)

READY_S = 60.0
_DISK = "size=1m,mode=700"


class Scene:
    """Everything but the jobs. ``url`` leads straight to the servers, ``proxied`` through the proxy if there is one.

    With ``late`` the agents are not started yet, and nobody has said how the groups are served.
    """

    def __init__(
        self,
        topology: Topology,
        work: Path,
        history: Path,
        writer: Writer,
        stack: ExitStack,
        *,
        mutant: str = "",
        late: bool = False,
    ) -> None:
        self._work, self._writer = work, writer
        self.parts, self.pids = history / "parts", work / "job.pids"
        self.logs = history / "logs"
        binary, clock = None, None
        if topology == "standalone":
            binary, clock = prepare_server(work)
        self.fleet = make_fleet(topology, work / "servers", aof=True, binary=binary)
        stack.callback(self.fleet.stop)
        self.fleet.start()
        for name in self.fleet.names():
            writer.write(Born(who="run", label=name, role="server"))
        self.url = self.proxied = self.fleet.url
        proxy = None
        if topology == "standalone":
            proxy = Proxy((HOST, self.fleet.ports[self.fleet.names()[0]]))
            stack.callback(proxy.close)
            self.proxied = proxy.url
        self.processes = Processes(work, history / "logs", writer, mutant=mutant)
        stack.callback(self._clear_away)
        knobs = work / "knobs"
        knobs.mkdir()
        self.world = World(self.processes, self.fleet, proxy, knobs, self._disks(), clock, forms.missing())
        self._configure(declared=not late)
        if late:  # the devices are there, as real ones are, and nobody serves them
            for node in NODES:
                for group, path in self.devices(node).items():
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    Device.create(path, ROOM.get(group, DEVICE_BYTES))
        # One of each is behind the proxy, like some of the jobs.
        for index, name in enumerate(COORDINATORS):
            self._add_coordinator(name, self.proxied if index == 1 else self.url)
        if not late:
            self.start_agents()
            self._await_agents()

    def start_agents(self) -> None:
        """At the next turn of the keeper."""
        for index, node in enumerate(NODES):
            self._add_agent(node, self.proxied if index == 1 else self.url, self.world.knobs)

    def served(self) -> bool:
        """Every group has all its nodes."""
        driver, keys = SyncDriver(self.url), Keys()
        try:
            return all(set(driver.view(keys.group(group)).nodes) >= set(nodes) for group, nodes in SERVED.items())
        finally:
            driver.close()

    def waits(self) -> bool:
        """In each served group somebody waits."""
        driver, keys = SyncDriver(self.url), Keys()
        try:
            return all(driver.view(keys.group(group)).queue for group in SERVED)
        finally:
            driver.close()

    @property
    def everywhere(self) -> dict[str, dict[str, Path]]:
        """The emulated devices of all nodes of each group."""
        return {group: {node: self.devices(node)[group] for node in nodes} for group, nodes in SERVED.items()}

    def environment(self, node: str) -> dict[str, str]:
        """The user's, without what is about another installation."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("TIMESLICE_", "SLURM_"))}
        return {**mine, "TIMESLICE_NODE": node, "TIMESLICE_RUNTIME_DIR": str(self._work / node)}

    def devices(self, node: str) -> dict[str, Path]:
        """The emulated device of each group that the node serves."""
        return {group: self._work / node / "devices" / group for group in served_by(node)}

    def _disks(self) -> dict[str, Path]:
        """State folders of the agents, each on a small disk of its own if this process may mount."""
        disks = {}
        for node in NODES:
            (self._work / node).mkdir(mode=0o700)
            folder = self._work / node / "state"
            folder.mkdir(mode=0o700)
            if syscalls.mount_tmpfs(str(folder), _DISK) == 0:
                disks[node] = folder
        return disks

    def _configure(self, *, declared: bool) -> None:
        """The groups' deadlines and, if they are ``declared``, modes, before anybody uses them."""
        driver, keys = SyncDriver(self.url), Keys()
        settings = CONFIG.stored()
        for group in GROUPS:
            mode = "lock" if group == LOCK_GROUP else "served" if declared else ""
            driver.run(scripts.configure(keys.group(group), settings, mode=mode))
        driver.retry(lambda: driver.client.sadd(keys.groups, *GROUPS))
        driver.close()

    def _add_agent(self, node: str, url: str, knobs: Path) -> None:
        def spec(label: str) -> dict[str, Any]:
            return {
                "label": label,
                "node": node,
                "url": url,
                "groups": served_by(node),
                "device_bytes": DEVICE_BYTES,
                "room": ROOM,
                "ttl_s": NODE_TTL_S,
                "state_dir": str(self._work / node / "state"),
                "knobs": str(knobs),
                "history": str(self.parts),
                "leave": True,  # where it is told to stop
            }

        groups = groups_of("agent", node)
        self.processes.add(Child(f"agent-{node}", "agent", spec, self.environment(node), node=node, groups=groups))

    def _add_coordinator(self, name: str, url: str) -> None:
        def spec(label: str) -> dict[str, Any]:
            return {"label": label, "name": name, "url": url, "lease_ms": OWNER_LEASE_MS}

        groups = groups_of("coordinator", "")
        self.processes.add(Child(f"coordinator-{name}", "coordinator", spec, self.environment(name), groups=groups))

    def _await_agents(self) -> None:
        until = time.monotonic() + READY_S
        while True:
            self.processes.keep(time.monotonic())
            if self.served():
                break
            if time.monotonic() > until:
                raise TimeSliceError(f"the agents did not join within {READY_S:g} s; see {self.logs}")
            time.sleep(0.1)

    def _clear_away(self) -> None:
        self.processes.end()
        for node in NODES:
            for path in self.devices(node).values():
                try:
                    Device.open(path).destroy(force=True)
                except (EmulatedDeviceError, OSError):
                    pass  # it was never made
        self.processes.clear()
