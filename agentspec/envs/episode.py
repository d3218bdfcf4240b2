"""The plain episode loop: sample a turn, run its calls, append what came back, until it is over.

In: an engine, a world and a task. Out: a ``Trajectory``. ``speculation.runtime`` is the fast twin
of this loop and must give the same trajectory; what both do to it is in ``EpisodeBuilder``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from agentspec.configuration import ConfigError
from agentspec.envs.base import Expert, World
from agentspec.envs.tools import ToolBox, ToolResult
from agentspec.types import Completion, Event, ParsedTurn, SamplingParams, Task, Trajectory, Turn

CUT_TURN = "error: turn cut at its token limit"


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """``max_tokens`` bounds the whole episode, prompt and observations included."""

    max_turns: int
    max_turn_tokens: int
    max_tokens: int


class EpisodeBuilder:
    """A trajectory under construction. Ids are appended, never changed (see ``check``)."""

    def __init__(
        self, world: World, task: Task, chat: Any, limits: EpisodeLimits, seed: int = 0
    ) -> None:
        """Resets the world and renders the first messages; an overlong prompt is a ConfigError."""
        self.world, self.task, self.chat, self.limits, self.seed = world, task, chat, limits, seed
        self._clock = asyncio.get_running_loop()
        self.start_s = self._clock.time()
        self._events: list[Event] = []
        messages = world.reset(task)
        self.ids: list[int] = list(chat.prompt_ids(messages, world.tools))
        if len(self.ids) >= limits.max_tokens:
            raise ConfigError(
                f"task {task.id!r}: the prompt has {len(self.ids)} tokens, which leaves no room "
                f"below config key episode.max_tokens={limits.max_tokens}"
            )
        self.mask = [0] * len(self.ids)
        self.logps = [0.0] * len(self.ids)
        self.entropies = [0.0] * len(self.ids)
        self.has_entropies = False
        self.turns: list[Turn] = []
        self.version = 0
        self.finish = ""  # empty while the episode goes on
        self.came_back: list[str] | str | None = None  # observations, or a user's text

    def turn_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """``sampling`` with the tokens that this turn may still use."""
        room = self.limits.max_tokens - len(self.ids)
        tokens = min(sampling.max_tokens, self.limits.max_turn_tokens, room)
        return dataclasses.replace(sampling, max_tokens=tokens)

    def add_turn(self, completion: Completion, state_version: str) -> tuple[Turn, ParsedTurn]:
        """Appends a sampled turn and parses it."""
        start = len(self.ids)
        if not self.turns:
            self.version = completion.version
        self._append(completion.ids, 1, completion.logps, completion.entropies)
        parsed: ParsedTurn = self.chat.parse(list(completion.ids), self.world.tools)
        turn = Turn(
            start=start,
            end=len(self.ids),
            finish=completion.finish,
            calls=tuple(parsed.calls),
            problems=tuple(parsed.problems),
            state_version=state_version,
        )
        self.turns.append(turn)
        return turn, parsed

    def add_results(
        self, results: Sequence[ToolResult], called_s: float, hits: Sequence[bool] = ()
    ) -> float:
        """Gives the last turn its observations; returns the seconds waited since ``called_s``."""
        turn, index = self.turns[-1], len(self.turns) - 1
        turn.observations = tuple(result.text for result in results)
        turn.hits = tuple(hits) or (False,) * len(results)
        self.note("wait", index, called_s, self._clock.time())
        for call, result, hit in zip(turn.calls, results, turn.hits, strict=True):
            if not hit:
                self.note("tool", index, result.start_s, result.end_s, call.name, result.status)
        return self._clock.time() - called_s

    def note(
        self, kind: str, turn: int, start_s: float, end_s: float, label: str = "", status: str = ""
    ) -> None:
        """Notes an event, given on the loop's clock, on the episode's."""
        start_s, end_s = start_s - self.start_s, end_s - self.start_s
        self._events.append(Event(kind, turn, start_s, end_s, label, status))

    def sorted_events(self) -> list[Event]:
        """All events by start; those that start together in the order they were noted."""
        return sorted(self._events, key=lambda event: event.start_s)

    async def respond(self, parsed: ParsedTurn) -> list[int]:
        """Appends and returns the ids that follow the last turn; [] once ``finish`` is set.

        Calls are answered by their observations, a turn that could not be read by an error, any
        other by the world's user, whose silence ends the episode.
        """
        turn = self.turns[-1]
        self.came_back = list(turn.observations)
        added = list(self.chat.close_ids(turn.finish, self.ids[turn.start : turn.end]))
        if turn.calls:
            added += self.chat.observation_ids(self.came_back)
            if getattr(self.world, "done", False):
                self.finish = "world"
        elif turn.finish != "stop" or turn.problems:
            self.came_back = [self._complaint(turn)]
            added += self.chat.observation_ids(self.came_back)
        else:
            message = await self.world.reply(parsed.content)
            if message is None:
                self.finish = "answered"
            else:
                self.came_back = message.content
                added += self.chat.user_ids(message.content)
        if not self.finish and len(self.turns) >= self.limits.max_turns:
            self.finish = "max_turns"
        elif not self.finish and len(self.ids) + len(added) >= self.limits.max_tokens:
            self.finish = "max_tokens"
        if self.finish:
            return []
        self._append(added, 0)
        return added

    def _complaint(self, turn: Turn) -> str:
        if turn.finish != "stop":
            return CUT_TURN
        return "error: " + "; ".join(turn.problems)

    def _append(
        self,
        ids: Iterable[int],
        mask: int,
        logps: Sequence[float] = (),
        entropies: Sequence[float] = (),
    ) -> None:
        new = list(ids)
        if logps and len(logps) != len(new):
            raise ValueError(f"got {len(new)} ids but {len(logps)} log-probs")
        self.ids += new
        self.mask += [mask] * len(new)
        self.logps += list(logps) or [0.0] * len(new)
        self.entropies += list(entropies) or [0.0] * len(new)
        self.has_entropies |= bool(entropies)

    def check(self, engine_ids: Sequence[int]) -> None:
        """Raises AssertionError unless the engine's sequence holds exactly these ids."""
        if list(engine_ids) != self.ids:
            raise AssertionError(
                f"task {self.task.id!r}, turn {len(self.turns)}: the engine's {len(engine_ids)} "
                f"ids are not the trajectory's {len(self.ids)}; ids may only be appended"
            )

    def trajectory(self) -> Trajectory:
        """The finished episode with the world's score; it took until now."""
        return Trajectory(
            task_id=self.task.id,
            world=self.task.world,
            ids=self.ids,
            mask=self.mask,
            logps=self.logps,
            turns=self.turns,
            score=self.world.score(),
            final_state=self.world.state_version,
            finish=self.finish,
            seed=self.seed,
            version=self.version,
            entropies=self.entropies if self.has_entropies else [],
            total_s=self._clock.time() - self.start_s,
            events=self.sorted_events(),
        )


def toolbox_for(world: World, toolbox: ToolBox | None) -> ToolBox:
    """``toolbox``, or a plain one; a toolbox of another world is a ValueError."""
    if toolbox is not None and toolbox.world is not world:
        raise ValueError("the toolbox belongs to another world than the episode's")
    return toolbox or ToolBox(world)


async def run_episode(
    engine: Any,
    world: World,
    task: Task,
    chat: Any,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    seed: int,
    *,
    toolbox: ToolBox | None = None,
) -> Trajectory:
    """Plays one task and returns its trajectory; the world is left in its final state."""
    clock = asyncio.get_running_loop()
    toolbox = toolbox_for(world, toolbox)
    builder = EpisodeBuilder(world, task, chat, limits, seed)
    seq = engine.open(list(builder.ids), seed=seed)
    try:
        while not builder.finish:
            version, turn_s = world.state_version, clock.time()
            completion = await seq.sample(builder.turn_sampling(sampling))
            turn, parsed = builder.add_turn(completion, version)
            called_s = clock.time()
            turn.generate_s = called_s - turn_s
            builder.note("generate", len(builder.turns) - 1, turn_s, called_s)
            if turn.calls:
                results = await toolbox.run_turn(turn.calls, len(builder.turns) - 1)
                turn.tool_s = builder.add_results(results, called_s)
            builder.check(seq.ids)
            seq.extend(await builder.respond(parsed))
    finally:
        seq.close()
    return builder.trajectory()


async def run_scripted(
    world: World, task: Task, chat: Any, expert: Expert, limits: EpisodeLimits, seed: int
) -> Trajectory:
    """Plays one task by a scripted policy; its turns have mask 1 and log-prob 0.

    A turn over the limits is cut like a sampled one. ValueError if a turn, rendered and parsed
    again, does not give the expert's calls: such an example would teach broken calls.
    """
    clock, toolbox = asyncio.get_running_loop(), ToolBox(world)
    builder = EpisodeBuilder(world, task, chat, limits, seed)
    while not builder.finish:
        act = expert.act(builder.came_back)
        text = chat.assistant_text(act.thinking, act.content, tuple(act.calls))
        ids = list(chat.turn_ids(text))
        room = builder.turn_sampling(SamplingParams(max_tokens=len(ids))).max_tokens
        finish: Literal["stop", "length"] = "stop" if len(ids) <= room else "length"
        completion = Completion(tuple(ids[:room]), (0.0,) * min(room, len(ids)), finish)
        turn, parsed = builder.add_turn(completion, world.state_version)
        if finish == "stop" and (turn.calls != tuple(act.calls) or turn.problems):
            raise ValueError(
                f"task {task.id!r}: the expert's calls {tuple(act.calls)} read back as "
                f"{turn.calls} with problems {turn.problems}, from {text!r}"
            )
        if turn.calls:
            called_s = clock.time()
            results = await toolbox.run_turn(turn.calls, len(builder.turns) - 1)
            turn.tool_s = builder.add_results(results, called_s)
        await builder.respond(parsed)
    return builder.trajectory()
