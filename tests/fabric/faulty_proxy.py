"""A way between two peers that can be made to fail: it forwards bytes, and cuts, holds or spoils them when told to."""

import asyncio
import contextlib
import threading

from atoll.fabric.address import split_address

__all__ = ["FaultyProxy"]


class FaultyProxy:
    """Listens at `address` and forwards to a target, in an event loop and a thread of its own."""

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spoil = 0  # pieces that get a wrong byte
        self._refuses = False
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._accept, "127.0.0.1", 0), self._loop).result()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Every connection is reset."""
        self._loop.call_soon_threadsafe(self._cut)

    def hold(self, held: bool) -> None:
        """While held nothing passes, and nobody is told."""
        self._loop.call_soon_threadsafe(self._flowing.clear if held else self._flowing.set)

    def refuse(self, refuses: bool) -> None:
        """While it refuses, connections end as soon as they are made; those that are there are cut."""
        self._refuses = refuses
        if refuses:
            self.cut()

    def spoil(self) -> None:
        """One byte of the next piece is wrong."""
        self._spoil += 1

    def close(self) -> None:
        """Ends all of it."""

        async def close() -> None:
            self._server.close()
            self._cut()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ours = [writer]
        try:
            if not self._refuses:
                other_reader, other = await asyncio.open_connection(*self._target)
                ours.append(other)
                self._writers.update(ours)
                await asyncio.gather(self._forward(reader, other), self._forward(other_reader, writer))
        except OSError:
            pass  # nobody there, or cut
        finally:
            self._writers.difference_update(ours)
            for one in ours:
                one.transport.abort()
            for one in ours:
                with contextlib.suppress(OSError):
                    await one.wait_closed()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            await self._flowing.wait()
            if self._spoil:
                self._spoil -= 1
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            writer.write(piece)
            await writer.drain()
        writer.close()
