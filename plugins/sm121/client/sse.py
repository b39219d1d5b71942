"""A parser of server-sent events.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from collections.abc import Iterator

#: The data of the last event of an OpenAI stream.
DONE = b"[DONE]"
#: The other fields of the specification, which are ignored, because OpenAI streams do not need
#: them.
_OTHER_FIELDS = (b"event", b"id", b"retry")


class EventParser:
    """Parses events from the pieces of a body. The body may be split at any byte.

    A line ends with CR, LF or CRLF, and with no other character, because a model's text may
    contain, for example, U+2028. An event ends with an empty line. If the body ends without one,
    the last event is discarded.

    Attributes:
        malformed: Lines that are neither a field of an event nor a comment.
    """

    def __init__(self) -> None:
        self.malformed: list[bytes] = []
        self._data: list[bytes] = []
        self._line = bytearray()
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Parse the next piece of the body.

        Args:
            piece: The bytes, which may be empty.

        Yields:
            The data of each event that ends in this piece, without blanks around its lines.
        """
        if not piece:
            return
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]  # the LF of a CRLF that was split between two pieces
        self._after_cr = piece.endswith(b"\r")
        self._line += piece
        if b"\n" not in piece and b"\r" not in piece:
            return  # do not search a long line again for each of its pieces
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
                event = b"\n".join(self._data)
                self._data = []
                yield event
            elif name and name not in _OTHER_FIELDS:
                self.malformed.append(line)
