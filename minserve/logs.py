"""The form of the log: lines for people, or an object a line for machines.

Owns: which libraries are heard, and the members of a JSON line. Does not know: what is logged. No line that the server
writes holds what clients wrote.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """A record as a JSON object: time, level, logger, message, what the record was given beside, and an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


def set_up_logs(level: str, form: str) -> None:
    """Log to stderr. level: of what minserve says; form: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(message)s"))
    # Libraries are heard when something is wrong only: some log every request that they make.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("minserve").setLevel(level.upper())
    # It writes a traceback, with what the client sent, for whatever is no HTTP. Faults of ours are logged by the API.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
