"""What runs inside of a script's own process while it is profiled.

Loaded there under another name, by `inject/sitecustomize.py`: it imports torch and Python's own library, and
its own files relatively. It measures and writes; what that means is worked out elsewhere.
"""

from __future__ import annotations

import json
import os
from typing import Any

_agent: Any = None


def start() -> None:
    """torch was imported: from now on this process is watched."""
    global _agent
    from .agent import Agent

    _agent = Agent(json.loads(os.environ["FROSTLINE_PROFILE_SETTINGS"]))
    _agent.begin()


def imported(name: str) -> None:
    """A library that decodes was imported."""
    if _agent is not None:
        _agent.decodes.install(name)
