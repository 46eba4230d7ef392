"""A credentials server, as containers of Amazon's have one: it answers with the credentials that a file has now, and
lets them expire soon. It is a process of its own, because delta-rs keeps Python's lock during some of its requests.

``python -m tests.torture.s3.credentials FILE SECONDS`` prints its own address. With ``--once`` it prints the
credentials, as a ``credential_process`` does.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def credentials(file: str, seconds: float) -> str:
    access_key, secret_key = Path(file).read_text().split()
    expires = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    answer = {"Version": 1, "AccessKeyId": access_key, "SecretAccessKey": secret_key, "Token": "", "SessionToken": ""}
    return json.dumps({**answer, "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ")})


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = credentials(sys.argv[1], float(sys.argv[2])).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    if sys.argv[3:] == ["--once"]:
        print(credentials(sys.argv[1], float(sys.argv[2])))
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}/credentials", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
