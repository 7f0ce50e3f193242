"""Protein tasks (Kao & Lee 2021, section 2.2 and appendix G.2; the data of Min et al. 2019).

`protein/localization`: where in the cell a protein works, ten places in DeepLoc's files, whose
labels read `Cell.membrane-M` (place, then whether it is bound to a membrane). DeepLoc marks its
test set in the headers; its 146 proteins of both cytoplasm and nucleus are left out, as in the
13,858 of Kao & Lee 2021, table 10. `protein/stability`
(Rocklin et al. 2017) and `protein/fluorescence` (Sarkisyan et al. 2016): a score each.
"""

from __future__ import annotations

import re

from .sequences import LABEL, Sequences

# the twenty amino acids, those that stand for several or are rare (B J O U X Z), and a stop
LETTERS = "ACDEFGHIKLMNPQRSTVWYBJOUXZ*"
LONGEST = 1000  # localization signals lie at both ends: Min et al. keep 500 letters of either
TWO_PLACES = "Cytoplasm-Nucleus"


def _family(label: str) -> str:
    """The name in Pfam's `PF10417.9;1-cysPrx_C;`, or what stands there instead."""
    parts = label.split(";")
    return parts[1] if len(parts) > 1 and parts[1] else parts[0]


def _place(label: str) -> str:
    return re.sub(r"-[MSU]$", "", label)


TASKS = {
    "protein": Sequences(LETTERS),
    "protein/family": Sequences(LETTERS, "class", ("family", *LABEL), clean=_family, field=2),
    "protein/localization": Sequences(
        LETTERS, "class", longest=LONGEST, clean=_place, without=TWO_PLACES
    ),
    "protein/stability": Sequences(LETTERS, "score", ("stability_score", *LABEL)),
    "protein/fluorescence": Sequences(LETTERS, "score", ("log_fluorescence", *LABEL)),
}
ABOUTS = {
    "protein": "Labelled proteins: FASTA, JSON lines, csv.",
    "protein/family": "Families for pre-training on pairs: Pfam's FASTA (third field), csv.",
    "protein/localization": "Places in the cell: DeepLoc's FASTA, or a FASTA file a place.",
    "protein/stability": "How stable a design is: TAPE's JSON lines, PLUS's FASTA, csv.",
    "protein/fluorescence": "How bright a GFP variant shines: JSON lines, FASTA, csv.",
}
