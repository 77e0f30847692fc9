"""What ranks tell each other beside Horovod: values by key in the store through which horovodrun's ranks found another.

The store is an HTTP server of the launcher, which all hosts reach and which lives as long as the job. So a rank can
tell what it does while its collectives stand still.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import Any

_SCOPE = "tf_fusedrec.watchdog"
_TIMEOUT_S = 5.0


class Board:
    """Values by key, shared by all ranks.

    Args:
      address, port: of the store.
    """

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port

    @classmethod
    def of_job(cls) -> Board | None:
        """The board of this job; None when it was launched without a store, as mpirun does."""
        address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{what}") for what in ("ADDR", "PORT"))
        return cls(address, int(port)) if address and port else None

    def put(self, key: str, value: Any) -> bool:
        """Writes a JSON value; whether the store took it."""
        return self._ask("PUT", key, json.dumps(value).encode())[0]

    def get(self, key: str) -> Any:
        """The value of a key; None when nobody wrote it, or the store does not answer."""
        found, body = self._ask("GET", key)
        return json.loads(body) if found else None

    def tell_failure(self, rank: int, cause: str) -> dict[str, Any]:
        """Tells why a rank fails. Returns {"rank", "cause"} of the rank that told first."""
        first = self.first_failure()
        if first is None:
            first = {"rank": rank, "cause": cause}
            self.put("failure", first)
        return first

    def first_failure(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """What the first failing rank told; None when none did so within wait_s seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            first = self.get("failure")
            if first is not None or time.monotonic() >= deadline:
                return first
            time.sleep(0.2)

    def _ask(self, method: str, key: str, body: bytes | None = None) -> tuple[bool, bytes]:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"/{_SCOPE}/{key}", body)
            answer = connection.getresponse()
            return answer.status == http.client.OK, answer.read()
        except (OSError, http.client.HTTPException):
            return False, b""
        finally:
            connection.close()
