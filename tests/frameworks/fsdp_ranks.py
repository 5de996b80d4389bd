"""One rank of a sharded training run, under torchrun. `python fsdp_ranks.py KIND FOLDER`.

Each step is a hold. Between two steps it waits until the other job has had a turn, if there is one; what it has found
goes to FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import timeslice
from timeslice.integrations.torch import register_module
from timeslice.integrations.torch_find import find, raw

STEPS = 4
WAIT_S = 90.0


def build(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    if kind.startswith("fsdp1"):
        return FullyShardedDataParallel(model, use_orig_params=kind != "fsdp1-flat", device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def digest(model: Any, optimizer: Any) -> str:
    whole = hashlib.sha256()
    for piece in find([model], [optimizer]):
        whole.update(raw(piece.storage).clone().numpy())
    return whole.hexdigest()


def turns_of_rival(folder: Path) -> int:
    """As far as it has told: of the last one it may tell only after it has left."""
    path = folder / "rival"
    return int(path.read_text() or 0) if path.exists() else 0


def await_rival(folder: Path, turns: int) -> None:
    until = time.monotonic() + WAIT_S
    while (folder / "rival").exists() and turns_of_rival(folder) < turns:
        if time.monotonic() > until:
            raise SystemExit(f"the other job had no turn within {WAIT_S:g} s")
        time.sleep(0.02)


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {"how": [], "same_bytes": [], "losses": []}
    with timeslice.hold("trainers", phase="init", timeout=WAIT_S):
        model = build(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        register_module("trainers", model, optimizers=[optimizer])
        objects = [id(parameter) for parameter in model.parameters()]
        left, rivals = digest(model, optimizer), turns_of_rival(folder)
    for step in range(STEPS):
        await_rival(folder, rivals + 2)  # one that was not told yet, and one since
        with timeslice.hold("trainers", phase="train", timeout=WAIT_S) as lease:
            found["how"].append(lease.grant.how)
            found["same_bytes"].append(digest(model, optimizer) == left)
            torch.manual_seed(100 * step + rank)
            loss = model(torch.randn(16, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found["losses"].append(loss.item())
            left, rivals = digest(model, optimizer), turns_of_rival(folder)
    found["same_objects"] = [id(parameter) for parameter in model.parameters()] == objects
    found["end"] = left
    (folder / f"{os.environ['TIMESLICE_JOB']}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # PyTorch's own threads (FSDP over gloo) abort a process now and then while it is taken down


if __name__ == "__main__":
    main()
