"""Export a checkpoint or the trajectory of a run as directories for the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.convert import hf
from xformer.convert.card import Card
from xformer.convert.names import Family
from xformer.convert.recorded import training_of
from xformer.data.errors import BadInput
from xformer.data.files import atomic_directory, write_text

# A revision on the hub is a branch. For a local directory `from_pretrained` ignores the argument
# `revision`. So each revision is a directory, and this script makes a branch of each.
UPLOAD = '''\
"""Upload each directory beside this file to the Hugging Face hub, as a revision of the same name.

    pip install huggingface_hub
    hf auth login
    python upload.py USER/NAME
"""

import sys
from pathlib import Path

from huggingface_hub import HfApi

if len(sys.argv) != 2:
    sys.exit(__doc__)
api, repository = HfApi(), sys.argv[1]
api.create_repo(repository, exist_ok=True)
folders = [file.parent for file in Path(__file__).resolve().parent.glob("*/config.json")]
# main is last: a new branch begins with the files that main has at that time
for folder in sorted(folders, key=lambda folder: (folder.name == "main", folder.name)):
    if folder.name != "main":
        api.create_branch(repository, branch=folder.name, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder, revision=folder.name)
    print(f"{folder.name} is uploaded", flush=True)
'''


def export(path: Path, out: Path, license: str, overwrite: bool) -> tuple[Checkpoint, Family]:
    """Export the checkpoint at `path` with a model card. Raises BadInput if no family fits."""
    path = checkpoints.resolve(path)
    checkpoint = checkpoints.load(path)
    card = Card(checkpoint, out.resolve().name, license, training_of(path))
    return checkpoint, hf.to_hf(checkpoint, out, overwrite, card.text())


def export_trajectory(run: Path, out: Path, license: str, overwrite: bool) -> list[str]:
    """Export each kept checkpoint of a run to a directory step-N, and the selected one to `main`.
    Add the script upload.py. Returns the names of the directories.

    An unfinished run has no `main`. Raises BadInput if the run kept no checkpoints.
    """
    places = checkpoints.by_step(run / "trajectory")
    if not places:
        raise BadInput(
            f"{run} has no trajectory; --trajectory needs a run that was made with train.keep_at"
        )
    names = {f"step-{step}": place for step, place in places.items()}
    if (run / "result.json").is_file():
        names["main"] = checkpoints.resolve(run)
    with atomic_directory(out, overwrite) as directory:
        for name, path in names.items():
            checkpoint = checkpoints.load(path)
            training = training_of(path)
            card = Card(checkpoint, out.resolve().name, license, training, name, tuple(names))
            hf.to_hf(checkpoint, directory / name, card=card.text())
        write_text(directory / "upload.py", UPLOAD)
    return list(names)
