"""How single values are written."""

import json
import re

_PLANE_16 = re.compile("[\U00100000-\U0010ffff]")


def scalar_text(text: str) -> bytes:
    """Return a string as JSON: characters as themselves, those of plane 16 escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _PLANE_16.sub(lambda match: json.dumps(match[0])[1:-1], quoted).encode()
