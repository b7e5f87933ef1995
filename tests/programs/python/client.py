"""Asks an HTTP server for each body, sends each, and checks every byte:
client.py HOST:PORT FOLDER SECONDS"""

import sys
import threading
import time
from pathlib import Path

import requests

WORKERS = 4


def work(url, bodies, end, answers):
    session = requests.Session()
    turn = 0
    while turn < len(bodies) or time.monotonic() < end:
        name, content = bodies[turn % len(bodies)]
        for answer in (session.get(f"{url}/{name}"), session.post(f"{url}/echo", data=content)):
            if answer.status_code != 200 or answer.content != content:
                raise ValueError(f"{name}: {answer.status_code}, a wrong answer")
            answers.append(name)
        turn += 1


def main():
    to, folder, seconds = sys.argv[1:]
    bodies = [(path.name, path.read_bytes()) for path in sorted(Path(folder).glob("body-*"))]
    answers, failures = [], []
    threading.excepthook = failures.append
    arguments = (f"http://{to}", bodies, time.monotonic() + float(seconds), answers)
    threads = [threading.Thread(target=work, args=arguments) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        sys.exit(f"{failures}")
    print(len(answers))


main()
