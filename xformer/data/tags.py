"""Labels of words: the values of the label column.

Words are separated by white space. A word's label is stored at its first token; its other tokens
have no label (Devlin et al. 2019, section 5.3).
"""

from __future__ import annotations

import re
from collections.abc import Collection

# In the column `labels`: no word begins at this token. (A word itself can be UNLABELLED or UNSEEN.)
IGNORED = -100
NO_LABEL = "_"  # in labels as text: this word has no label
_BIO = re.compile(r"O|[BI]-.+")


def is_bio(labels: Collection[str]) -> bool:
    """Whether these classes mark entities: B-X begins an entity of type X, I-X continues it, O is
    outside (Ramshaw & Marcus 1995)."""
    return all(map(_BIO.fullmatch, labels)) and any(label != "O" for label in labels)
