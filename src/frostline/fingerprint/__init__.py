"""What a field was computed from: code, parameters, weights, precision, chunk size, libraries, upstream.

`fingerprint(pipeline)` gives each field one digest and, in `parts`, what it was made from; `differences` says
which part of two differs. `code_of`, `weights_of`, `value_of` and `file_id` are the pieces. Nothing counts by
an address (`id`), and nothing by a path alone.
"""

from __future__ import annotations

from frostline.fingerprint.code import Code, Reference, code_of
from frostline.fingerprint.differences import differences
from frostline.fingerprint.field import Fingerprint, fingerprint
from frostline.fingerprint.files import FileId, content_of, file_id, tree_of
from frostline.fingerprint.lazies import made_by
from frostline.fingerprint.values import digest, value_of
from frostline.fingerprint.weights import Weights, weights_of

__all__ = [
    "Code",
    "FileId",
    "Fingerprint",
    "Reference",
    "Weights",
    "code_of",
    "content_of",
    "differences",
    "digest",
    "file_id",
    "fingerprint",
    "made_by",
    "tree_of",
    "value_of",
    "weights_of",
]
