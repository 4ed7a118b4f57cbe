"""Characters that change how text around them is shown, made visible."""

import re

# C0 and C1 controls without tab and line feed, line and paragraph separators, bidirectional embeddings,
# overrides and isolates, the byte order mark. Joiners stay: scripts and emoji need them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")


def escape_controls(text: str) -> str:
    r"""Return text with control characters and bidirectional overrides written out, as in ⟨U+202E⟩.

    A name such as "photo\u202egnp.exe" would else be shown as "photoexe.png", and an escape sequence would
    be carried out by a terminal. Line ends of Windows become those of Unix.
    """
    return _CONTROLS.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text.replace("\r\n", "\n"))
