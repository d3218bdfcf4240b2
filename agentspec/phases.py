"""Who trains next: blocks of agent, then of speculator updates (Algorithm 1, line 1).

The paper's default is 4 agent updates, then 8 speculator updates; both kinds count as steps.
"""

from __future__ import annotations

import dataclasses

from agentspec.types import Mode


@dataclasses.dataclass(frozen=True)
class Phase:
    """The mode trained at a step, and whether it differs from the mode of the step before."""

    mode: Mode
    switched: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Alternating blocks. A block of 0 steps leaves that mode out; a run then never switches."""

    agent_steps: int = 4
    speculator_steps: int = 8

    def __post_init__(self) -> None:
        for name in ("agent_steps", "speculator_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"schedule {name} must be an integer of at least 0, got {value!r}")
        if self.agent_steps + self.speculator_steps == 0:
            raise ValueError("schedule agent_steps and speculator_steps are both 0: nothing trains")

    def at(self, step: int) -> Phase:
        """The phase of the update numbered ``step`` (from 0). Step 0 is not a switch."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        mode = self._mode(step)
        return Phase(mode, step > 0 and mode != self._mode(step - 1))

    def _mode(self, step: int) -> Mode:
        place = step % (self.agent_steps + self.speculator_steps)
        return "agent" if place < self.agent_steps else "speculator"
