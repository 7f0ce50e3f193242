"""Protein tasks (Kao & Lee 2021, section 2.2 and appendix G.2; the data of Min et al. 2019).

`protein/localization` asks where in the cell a protein works. DeepLoc's files have ten places, in
labels such as `Cell.membrane-M` (the place, then whether the protein is bound to a membrane), and
mark the test set in the headers. The 146 proteins that are in both cytoplasm and nucleus are left
out, as in Kao & Lee 2021, table 10. 13,858 proteins remain. `protein/stability` (Rocklin et al.
2017) and `protein/fluorescence` (Sarkisyan et al. 2016) predict a score. `protein/family` holds the
families of Pfam, from which `pairs --kind family` draws.
"""

from __future__ import annotations

import re

from .sequences import LABEL, Sequences

# the twenty amino acids, the letters that are rare or stand for several (B J O U X Z), and a stop
LETTERS = "ACDEFGHIKLMNPQRSTVWYBJOUXZ*"
LONGEST = 1000  # localization signals are at the two ends; Min et al. keep 500 letters of each
TWO_PLACES = "Cytoplasm-Nucleus"


def _family(label: str) -> str:
    """The family's name, `1-cysPrx_C`, in Pfam's label `PF10417.9;1-cysPrx_C;`. A label without `;`
    is the name itself."""
    parts = label.split(";")
    return parts[1] if len(parts) > 1 and parts[1] else parts[0]


def _place(label: str) -> str:
    """The place in DeepLoc's label: `Cell.membrane` in `Cell.membrane-M`."""
    return re.sub(r"-[MSU]$", "", label)


PROTEIN_TASKS = {
    "protein": Sequences("Labelled proteins: FASTA, JSON lines, csv or parquet.", LETTERS),
    "protein/family": Sequences(
        "Families of proteins, for `pairs --kind family`: csv, or Pfam's FASTA, whose headers have "
        "the family as their third field.",
        LETTERS,
        "class",
        ("family", *LABEL),
        clean=_family,
        field=2,
    ),
    "protein/localization": Sequences(
        "The place in the cell: DeepLoc's FASTA, or one FASTA file per place.",
        LETTERS,
        "class",
        longest=LONGEST,
        clean=_place,
        without=TWO_PLACES,
    ),
    "protein/stability": Sequences(
        "How stable a design is: TAPE's JSON lines, PLUS's FASTA, or csv.",
        LETTERS,
        "score",
        ("stability_score", *LABEL),
    ),
    "protein/fluorescence": Sequences(
        "How brightly a GFP variant shines: JSON lines, FASTA or csv.",
        LETTERS,
        "score",
        ("log_fluorescence", *LABEL),
    ),
}
