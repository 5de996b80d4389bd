"""veRL's v1 trainers in miniature: the same hooks in the same order, with the devices of this folder.

After ``verl/__init__.py`` and ``verl/trainer/ppo/v1/`` of github.com/verl-project/verl (main, after release 0.8).
"""

from __future__ import annotations

import importlib
import os

for _module in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(_module)
