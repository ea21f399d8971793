"""How images of Pillow are written: as a file beside the record, or by size and mode only."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agl_meta.encoding_objects import TAG, type_name

if TYPE_CHECKING:
    from agl_meta.encoding import Encoder

Attach = Callable[[str, bytes], "str | None"]
"""Writes a file beside the record: from a file name and its content to the path below the folder of the pass,
or ``None`` where it could not be written. Names are made of the content: one that is there is the same."""

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


def image(encoder: Encoder, value: Any, __: int) -> Any:
    # The digest tells images apart where no file is written.
    tag = {TAG: "image", "type": type_name(type(value)), "mode": value.mode, "size": list(value.size)}
    pixels = value.tobytes()
    palette = value.getpalette() if value.mode == "P" else None
    name = repr((value.mode, value.size, palette)).encode() + pixels
    tag["digest"] = digest = hashlib.blake2b(name, digest_size=16).hexdigest()
    if encoder.attach is None:
        return tag
    # PNG knows few modes; converting to one of them would lose what the others hold.
    kind = "PNG" if value.mode in _PNG_MODES else "TIFF"
    content = io.BytesIO()
    try:
        value.save(content, kind)
    except Exception as error:
        return {**tag, "why": f"writing it as {kind} raised {type(error).__name__}"}
    path = encoder.attach(f"image-{digest}.{kind.lower()}", content.getvalue())
    return tag if path is None else {**tag, TAG: "file", "path": path}
