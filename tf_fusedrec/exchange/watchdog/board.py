"""A key-value store that all ranks share beside Horovod: the rendezvous store of horovodrun.

The store is an HTTP server of the launcher. All hosts reach it, and it lives as long as the job. A rank can therefore
report its state while its collectives are blocked.
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
      address, port: Address and port of the store.
    """

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port

    @classmethod
    def of_job(cls) -> Board | None:
        """The board of this job; None if the launcher has no store, like mpirun."""
        address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
        return cls(address, int(port)) if address and port else None

    def put(self, key: str, value: Any) -> bool:
        """Writes a JSON value. Returns whether the store accepted it."""
        return self._request("PUT", key, json.dumps(value).encode())[0]

    def get(self, key: str) -> Any:
        """Reads the value of a key; None if the key is missing or the store does not answer."""
        found, body = self._request("GET", key)
        return json.loads(body) if found else None

    def report_failure(self, rank: int | None, cause: str) -> dict[str, Any]:
        """Reports the cause of a rank's failure. Returns {"rank", "cause"} of the first reported failure.

        Args:
          rank: The failed rank; None if it is not known which one failed.
          cause: One sentence.
        """
        first = self.first_failure()
        if first is None:
            first = {"rank": rank, "cause": cause}
            self.put("failure", first)
        return first

    def first_failure(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """The first reported failure, {"rank", "cause"}; None if no rank reports one within wait_s seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            first = self.get("failure")
            if first is not None or time.monotonic() >= deadline:
                return first
            time.sleep(0.2)

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[bool, bytes]:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"/{_SCOPE}/{key}", body)
            answer = connection.getresponse()
            return answer.status == http.client.OK, answer.read()
        except (OSError, http.client.HTTPException):
            return False, b""
        finally:
            connection.close()
