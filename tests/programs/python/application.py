"""A WSGI application, for gunicorn: the folder of bodies is in BODIES."""

import os
from pathlib import Path

FOLDER = Path(os.environ["BODIES"])


def application(environ, start_response):
    if environ["REQUEST_METHOD"] == "POST":
        content = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0))
    else:
        content = (FOLDER / Path(environ["PATH_INFO"]).name).read_bytes()
    start_response("200 OK", [("Content-Length", str(len(content)))])
    return [content]
