"""A checkpoint tool without a device: keeps a state file a process, writes down each call, and fails as it is told.

Usage: stub_tool.py FOLDER [the flags of cuda-checkpoint]. Files in FOLDER: ``PID`` the state, ``log`` the calls as they
begin and end, ``ACTION-PID`` (or ``ACTION``) the text to fail with, ``wait-PID`` another pid: a lock of PID waits until
that one runs again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STEPS = {
    "lock": ("running", "locked"),
    "checkpoint": ("locked", "checkpointed"),
    "restore": ("checkpointed", "locked"),
    "unlock": ("locked", "running"),
}


def main() -> int:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    pid = words[words.index("--pid") + 1]
    action = words[words.index("--action") + 1] if "--action" in words else "get-state"
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"begin {action} {pid}\n".encode())
    try:
        return act(folder, action, pid)
    finally:
        os.write(log, f"end {action} {pid}\n".encode())


def act(folder: Path, action: str, pid: str) -> int:
    for name in (f"{action}-{pid}", action):
        if (folder / name).exists():
            print((folder / name).read_text(), file=sys.stderr)
            return 1
    state = folder / pid
    if action == "get-state":
        print(state.read_text())
        return 0
    if action == "lock" and (folder / f"wait-{pid}").exists():
        peer = (folder / f"wait-{pid}").read_text()
        while (folder / peer).read_text() != "running" or not (folder / f"was-locked-{peer}").exists():
            time.sleep(0.01)
    needed, wanted = STEPS[action]
    if state.read_text() != needed:
        print(f'Could not {action} on process ID {pid}: "invalid state"', file=sys.stderr)
        return 1
    draft = folder / f"{pid}.new"
    draft.write_text(wanted)
    draft.replace(state)
    if action == "lock":
        (folder / f"was-locked-{pid}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
