"""A WebSocket server that echoes, and a client that checks every byte:
web_socket.py serve PORT, or web_socket.py ask HOST:PORT FOLDER SECONDS"""

import asyncio
import sys
import time
from pathlib import Path

import websockets

WORKERS = 4
MAX_BYTES = 1 << 24


async def echo(connection):
    async for message in connection:
        await connection.send(message)


async def serve(port):
    async with websockets.serve(echo, "0.0.0.0", int(port), max_size=MAX_BYTES):
        await asyncio.Future()


async def work(to, bodies, end):
    answers = 0
    async with websockets.connect(f"ws://{to}/ws", max_size=MAX_BYTES) as connection:
        while answers < len(bodies) or time.monotonic() < end:
            body = bodies[answers % len(bodies)]
            await connection.send(body)
            if await connection.recv() != body:
                raise ValueError(f"answer {answers} is wrong")
            answers += 1
    return answers


async def ask(to, folder, seconds):
    bodies = [path.read_bytes() for path in sorted(Path(folder).glob("body-*"))]
    end = time.monotonic() + float(seconds)
    print(sum(await asyncio.gather(*(work(to, bodies, end) for _ in range(WORKERS)))))


asyncio.run({"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:]))
