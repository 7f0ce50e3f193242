"""Protein tasks (Kao & Lee 2021, section 2.2 and appendix G.2; the data of Min et al. 2019).

`protein/localization`: where in the cell a protein works, ten places in DeepLoc's files, whose
labels read `Cell.membrane-M` (place, then whether it is bound to a membrane). `protein/stability`
(Rocklin et al. 2017) and `protein/fluorescence` (Sarkisyan et al. 2016): a score each.
"""

from __future__ import annotations

from preprocess.sequences import LABEL, Sequences

# the twenty amino acids, those that stand for several or are rare (B J O U X Z), and a stop
LETTERS = "ACDEFGHIKLMNPQRSTVWYBJOUXZ*"
LONGEST = 1000  # localization signals lie at both ends: Min et al. keep 500 letters of either


def _family(header: str) -> str:
    """The accession in a Pfam header's third field, `PF10417.9;1-cysPrx_C;`, else its second."""
    fields = header.split()
    return fields[2].split(";")[0] if len(fields) > 2 else fields[1] if len(fields) > 1 else ""


def _place(label: str) -> str:
    return label.split("-")[0]


TASKS = {
    "protein": Sequences(LETTERS),
    "protein/localization": Sequences(LETTERS, "class", longest=LONGEST, clean=_place),
    "protein/stability": Sequences(LETTERS, "score", ("stability_score", *LABEL)),
    "protein/fluorescence": Sequences(LETTERS, "score", ("log_fluorescence", *LABEL)),
}
ABOUTS = {
    "protein": "Labelled proteins: FASTA, JSON lines, csv.",
    "protein/localization": "Places in the cell: DeepLoc's FASTA, or a FASTA file a place.",
    "protein/stability": "How stable a design is: TAPE's JSON lines, PLUS's FASTA, csv.",
    "protein/fluorescence": "How bright a GFP variant shines: JSON lines, FASTA, csv.",
}
