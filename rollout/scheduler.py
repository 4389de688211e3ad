"""Which request sits in which slot. Pure Python: no arrays, no device, nothing that depends on time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Request:
    """One completion to be made: sample number `sample` of prompt number `index`. `opens`: whether each token is the first that
    its decoding step made."""

    index: int
    sample: int
    prompt: tuple[int, ...]
    prompt_id: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    opens: list[bool] = field(default_factory=list)
    finish: str | None = None


class Scheduler:
    """Waiting requests, and the slots they run in; a slot is refilled as soon as its completion ends."""

    def __init__(self, slots: int):
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._free = list(range(slots - 1, -1, -1))

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def admit(self, prompts: int) -> dict[int, Request]:
        """Moves waiting requests to free slots, of at most `prompts` different prompts; {slot: request}."""
        admitted: dict[int, Request] = {}
        seen: set[int] = set()
        while self.waiting and self._free:
            if self.waiting[0].index not in seen and len(seen) == prompts:
                break
            request = self.waiting.popleft()
            seen.add(request.index)
            admitted[self._free.pop()] = request
        self.running |= admitted
        return admitted

    def release(self, slot: int) -> Request:
        """The request of a slot whose completion has ended; the slot is free again."""
        self._free.append(slot)
        return self.running.pop(slot)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)
