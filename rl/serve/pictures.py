"""Pictures of requests: data URLs to the rows that stand in the place of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rl.serve.errors import ApiError, invalid
from rl.training.media.tables import MediaTables
from rollout import Generator
from rollout.generator import EncodedPrompt
from rollout.media.expand import Expanded
from rollout.media.loader import Loader
from rollout.media.processors import Processors
from rollout.media.reference import Reference, refer

_WAITING = 16  # requests whose pictures are decoded at the same time


def picture_of(url: str, place: str) -> Reference:
    """Returns the picture of a data URL. place: the field that has it. The type in the URL is not
    read; the content tells the format.

    Raises ApiError for any other address: the server reads no files and no other servers for a
    client.
    """
    if not url[:5].lower() == "data:":
        raise invalid(place, "only data URLs are read: data:image/png;base64,...")
    try:
        return refer("image", url, Path("/nonexistent"), place)
    except ValueError as error:
        raise invalid(place, str(error)) from None


class Pictures:
    """Encodes the pictures of requests with the towers of the model.

    processors: what reads pictures for the model. Only the thread of the engine calls `prompt`,
    which finds pictures that `decode` has decoded.
    """

    def __init__(self, generator: Generator, processors: Processors):
        from policy.execution.encoding import MediaEncoder

        self.processors = processors
        encoder = MediaEncoder(generator.model.graph)
        rows = 1 << (generator.max_length - 1).bit_length()  # a prompt has no more placeholders
        self._waiting = ThreadPoolExecutor(_WAITING, thread_name_prefix="pictures")
        self._tables = MediaTables(encoder, Loader(processors), rows)

    def check(self, references: Sequence[Reference]) -> None:
        """Raises ApiError for a picture whose size the model cannot represent."""
        for reference in references:
            try:
                self.processors.of(reference.kind).shapes(reference.size)
            except ValueError as error:
                raise invalid(reference.where, str(error)) from None

    async def decode(self, expanded: Expanded) -> None:
        """Decodes the pictures of a prompt in the threads of the loader. Raises ApiError for one
        that cannot be decoded."""
        loader = self._tables.loader
        loader.prefetch(expanded.references)
        loop = asyncio.get_running_loop()
        for reference in expanded.references:
            try:
                await loop.run_in_executor(self._waiting, loader.inputs, [reference])
            except ValueError as error:
                raise invalid(reference.where, str(error), "invalid_image") from None

    def prompt(self, generator: Generator, expanded: Expanded) -> EncodedPrompt:
        """Returns a prompt with the rows of its pictures. Raises ApiError for one that cannot be
        decoded."""
        from rl.errors import DataError

        try:
            table = self._tables.of(generator.model.params, [expanded])
        except DataError as error:
            raise ApiError(400, str(error), None, "invalid_image") from None
        made = table.prompt(expanded.tokens.tolist(), expanded)
        return EncodedPrompt(made.tokens, made.media, made.keys)

    def close(self) -> None:
        """Ends the threads that decode pictures."""
        self._waiting.shutdown()
        self._tables.loader.close()
