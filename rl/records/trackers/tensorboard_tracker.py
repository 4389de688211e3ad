"""Writes the scalars of a run for TensorBoard."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from rl.records.trackers.mirror import Metrics, StageSteps, numbers


class TensorBoard:
    """Writes scalars for TensorBoard, with the steps of all stages numbered in sequence."""

    def __init__(self, stages: Mapping[str, StageSteps], directory: Path):
        self._stages = stages
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @cached_property
    def _writer(self) -> Any:
        from tensorboardX.event_file_writer import EventsWriter

        # A SummaryWriter has a thread and an exit handler that show tracebacks on a full disk. The
        # suffix is random because the name of the file holds the time in seconds: a run that
        # continues within a second would overwrite its file.
        return EventsWriter(
            str(self._directory / "events"), filename_suffix=f".{secrets.token_hex(4)}"
        )

    def start_stage(self, name: str, steps: int, first_step: int) -> None:
        pass

    def step(self, stage: str, step: int, metrics: Metrics) -> None:
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        Event = cast(Any, event_pb2).Event  # made by protobuf at import
        at = self._stages[stage].before + step
        now = time.time()
        for name, value in numbers(metrics).items():
            self._writer.write_event(Event(wall_time=now, step=at, summary=scalar(name, value)))
        self._writer.flush()

    def note(self, text: str) -> None:
        pass

    def truncate_after(self, stage: str, step: int) -> None:
        """Removes the scalars after `step` of `stage` from the files of earlier starts of the
        run."""
        last = self._stages[stage].before + step
        for file in sorted(self._directory.glob("events*")):
            records = file.read_bytes()
            kept = b"".join(
                record for at, record in _scalar_records(records) if at is None or at <= last
            )
            if kept != records:
                temporary = file.with_name(f"new.{file.name}")
                temporary.write_bytes(kept)
                temporary.replace(file)

    def close(self) -> None:
        if "_writer" in self.__dict__:
            self._writer.close()


def _scalar_records(data: bytes) -> Iterator[tuple[int | None, bytes]]:
    """Yields (step of a scalar, or None; bytes of the record) of an event file, without a torn last
    record.

    A record is its length in 8 bytes, a check sum in 4, the event, and a check sum in 4 (the format
    of TFRecord).
    """
    from tensorboardX.proto import event_pb2

    start = 0
    while len(data) >= start + 12:
        length = int.from_bytes(data[start : start + 8], "little")
        end = start + 16 + length
        if end > len(data):
            return
        event = cast(Any, event_pb2).Event.FromString(data[start + 12 : start + 12 + length])
        yield (event.step if event.HasField("summary") else None), data[start:end]
        start = end
