"""How tokens are counted."""

from __future__ import annotations

from typing import Literal

#: By the ids that the server sends with each chunk, by its continuous usage, or a token a chunk.
Clock = Literal["token_ids", "usage", "chunks"]
