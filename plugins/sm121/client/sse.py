"""Server-sent events: the one reader of them."""

from collections.abc import Iterator

#: The data of the last event of an OpenAI stream.
DONE = b"[DONE]"
_OTHER_FIELDS = (b"event", b"id", b"retry")


class EventParser:
    """Events from the pieces of a body, wherever it was cut. CR, LF and CRLF end a line, and
    nothing else does: U+2028 may stand in a model's text. An empty line ends an event; one that the
    body breaks off before it is never given."""

    def __init__(self) -> None:
        #: Lines that are neither a field of an event nor a comment.
        self.malformed: list[bytes] = []
        self._data: list[bytes] = []
        self._line = bytearray()
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the events that end in this piece, without blanks around each line."""
        if not piece:
            return
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]  # the second half of a CRLF that was cut in two
        self._after_cr = piece.endswith(b"\r")
        self._line += piece
        if b"\n" not in piece and b"\r" not in piece:
            return  # a long line is not looked at again for each of its pieces
        lines = bytes(self._line).splitlines(keepends=True)
        self._line.clear()
        if lines and not lines[-1].endswith((b"\r", b"\n")):
            self._line += lines.pop()
        for ended in lines:
            line = ended.rstrip(b"\r\n")
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.strip())
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event
            elif name and name not in _OTHER_FIELDS:
                self.malformed.append(line)
