from typing import Any


def emitted_lines(spans: Any) -> list[bytes]:
    return []
