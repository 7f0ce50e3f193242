"""Import checkpoints from Hugging Face and PLUS, export them, and show what a directory holds.

python -m xformer.convert from-hf HF_DIR OUT
python -m xformer.convert from-plus FILE OUT
python -m xformer.convert to-hf CHECKPOINT OUT
python -m xformer.convert to-hf RUN OUT --trajectory
python -m xformer.convert halve CHECKPOINT OUT
python -m xformer.convert inspect DIR
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import replace
from pathlib import Path

from xformer.data.arguments import CommandParser, add_checkpoint, add_out, whole_number
from xformer.data.display import say
from xformer.data.errors import BadInput, lacks, typed
from xformer.data.outputs import check_directory
from xformer.start import run

# the files by which --overwrite recognises a directory that this command wrote
CHECKPOINT = ("manifest.json", "model.safetensors")
EXPORTS = ("upload.py",)  # of a trajectory


def main() -> None:
    """`python -m xformer.convert COMMAND ...`"""
    parser = CommandParser(
        prog=typed("python -m xformer.convert"),
        description="Import checkpoints from Hugging Face and PLUS, export them, and show what a "
        "directory holds.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    functions = {  # command: (add its arguments, run it)
        "from-hf": (_add_from_hf, _import_hf),
        "from-plus": (_add_from_plus, _import_plus),
        "to-hf": (_add_to_hf, _export_hf),
        "halve": (_add_halve, _halve),
        "inspect": (_add_inspect, _inspect),
    }
    for add, _ in functions.values():
        add(commands)
    arguments = parser.parse_args()
    _, convert = functions[arguments.command]
    convert(arguments)


def _add_from_hf(commands: argparse._SubParsersAction[CommandParser]) -> None:
    command = commands.add_parser(
        "from-hf",
        help="Import a Hugging Face checkpoint of the BERT family.",
        description="Import a Hugging Face checkpoint of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, "
        "ALBERT, DistilBERT, ModernBERT or ESM-2: its config.json, its weights, its head if it has "
        "one, and its tokenizer. The weights are model.safetensors or pytorch_model.bin, whole or "
        "in shards. A .bin file that holds anything but tensors is refused. The command reports "
        "how many tensors it imported, and names the others.",
    )
    command.add_argument(
        "source",
        metavar="HF_DIR",
        help="The directory to import, or the name of a repository on the Hugging Face hub, such "
        "as bert-base-uncased. A name needs the package huggingface_hub.",
    )
    add_out(command, "The checkpoint to write.")


def _add_from_plus(commands: argparse._SubParsersAction[CommandParser]) -> None:
    command = commands.add_parser(
        "from-plus",
        help="Import a PLUS-TFM checkpoint from the public PLUS repository.",
        description="Import a PLUS-TFM checkpoint (Min et al. 2019) with its heads: MLM and "
        "same-family prediction, or the classifier of a fine-tuned model. A file that holds "
        "anything but tensors is refused. All sizes are read from the shapes of the tensors, "
        "except the number of attention heads.",
    )
    command.add_argument(
        "source", metavar="FILE", type=Path, help="The file to import, such as PLUS-TFM.pt."
    )
    command.add_argument(
        "--heads",
        type=whole_number(1),
        metavar="N",
        help="Number of attention heads (default: hidden size / 64).",
    )
    command.add_argument(
        "--labels",
        default="",
        metavar="A,B,C",
        help="Names of the classes of a fine-tuned classifier, in order (default: LABEL_0, "
        "LABEL_1, ...).",
    )
    add_out(command, "The checkpoint to write.")


def _add_to_hf(commands: argparse._SubParsersAction[CommandParser]) -> None:
    command = commands.add_parser(
        "to-hf",
        help="Export a checkpoint as a directory that transformers loads.",
        description="Export a checkpoint as a directory that transformers loads with AutoModel, "
        "the AutoModelFor... class of its head, and AutoTokenizer. A checkpoint that was imported "
        "and not trained since is exported with exactly the tensors of the original. README.md is "
        "a model card for the Hugging Face hub. It states what the checkpoint and its run have "
        "recorded: data, settings, operations on the weights, scores, seeds and versions.",
    )
    add_checkpoint(command)
    command.add_argument(
        "--trajectory",
        action="store_true",
        help="Export every checkpoint in the trajectory of the run CHECKPOINT (see train.keep_at) "
        "as a directory OUT/step-N, and the selected one as OUT/main. OUT/upload.py uploads each "
        "directory to the Hugging Face hub, as a revision of the same name.",
    )
    command.add_argument(
        "--license",
        type=_license,
        metavar="ID",
        help="Licence of the model in the model card, as an identifier of the Hugging Face hub "
        "such as mit or apache-2.0 (default: the card names none).",
    )
    add_out(command, "The directory to write.")


def _add_halve(commands: argparse._SubParsersAction[CommandParser]) -> None:
    command = commands.add_parser(
        "halve",
        help="Copy a checkpoint with weights in fp16, at half the size.",
        description="Copy a checkpoint with weights in fp16, at half the size, to share it. Every "
        "command can read the copy; computation stays in fp32. A weight changes by at most one "
        "part in 2,048, a weight below 6e-5 by at most 3e-8.",
    )
    add_checkpoint(command)
    add_out(command, "The checkpoint to write.")


def _add_inspect(commands: argparse._SubParsersAction[CommandParser]) -> None:
    command = commands.add_parser(
        "inspect",
        help="Show what a checkpoint, a run or a Hugging Face directory holds.",
        description="Show on one screen what a checkpoint, a finished run or a Hugging Face "
        "directory holds: its family, sizes, parameters by part, head, vocabulary and history.",
    )
    command.add_argument("path", metavar="DIR", type=Path, help="The directory to show.")


def _license(text: str) -> str:
    """An identifier of a licence. Raises ArgumentTypeError for anything else."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an identifier of a licence, such as mit or apache-2.0"
        )
    return text


def _import_hf(arguments: argparse.Namespace) -> None:
    """Import a directory, or a repository on the hub."""
    from xformer import checkpoint as checkpoints
    from xformer.convert import hf

    source = _directory(arguments.source)
    check_directory(arguments.out, arguments.overwrite, CHECKPOINT, source)
    imported = hf.from_hf(source, "" if source == Path(arguments.source) else arguments.source)
    checkpoints.save(imported.checkpoint, arguments.out, arguments.overwrite)
    say(*hf.import_report(imported))


def _import_plus(arguments: argparse.Namespace) -> None:
    """Import a PLUS-TFM checkpoint."""
    from xformer import checkpoint as checkpoints
    from xformer.convert import hf, plus

    check_directory(arguments.out, arguments.overwrite, CHECKPOINT, arguments.source)
    labels = tuple(filter(None, arguments.labels.split(",")))
    imported = plus.from_plus(arguments.source, arguments.heads, labels)
    checkpoints.save(imported.checkpoint, arguments.out, arguments.overwrite)
    say(*hf.import_report(imported))


def _directory(source: str) -> Path:
    """`source` as a path, if it is one. Otherwise it names a repository on the hub. What an import
    reads of it is downloaded: weights as safetensors if there are any, else pickles. The result is
    the directory with the download."""
    path = Path(source)
    if path.exists() or source.count("/") > 1 or source.startswith((".", "/", "~")):
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        what = f"{source} is not a directory; fetching it from the Hugging Face hub"
        raise lacks(what, "huggingface_hub", "hub") from None
    small = ["*.json", "*.txt", "*.model"]
    try:
        path = Path(snapshot_download(source, allow_patterns=[*small, "model*.safetensors"]))
        if not any(path.glob("model*.safetensors")):
            snapshot_download(source, allow_patterns=["pytorch_model*.bin"])
        return path
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(
            f"{source} is not a directory, and fetching it from the Hugging Face hub failed: "
            f"{reason}"
        ) from None


def _export_hf(arguments: argparse.Namespace) -> None:
    """Export a checkpoint, or all that a run kept."""
    from xformer.convert import hf, share

    source, out, overwrite = Path(arguments.checkpoint), arguments.out, arguments.overwrite
    licence = arguments.license or ""
    check_directory(out, overwrite, EXPORTS if arguments.trajectory else hf.EXPORT, source)
    if arguments.trajectory:
        names = share.export_trajectory(source, out, licence, overwrite)
        say(f"{out}: {len(names)} revisions: {', '.join(names)}")
        script = shlex.quote(str(out / "upload.py"))
        say(f"to upload each as a revision of the same name: python {script} USER/NAME")
        return
    checkpoint, family = share.export(source, out, licence, overwrite)
    head = checkpoint.head.kind if checkpoint.head else "none"
    say(f"{out}: {family.name}, {len(checkpoint.weights)} weights, head: {head}")
    if checkpoint.source is not None:
        say(
            "the checkpoint's mapping of raw input ids is not exported: the exported tokenizer "
            f"does not make the ids that the model reads; see {out / 'README.md'}",
            error=True,
        )


def _halve(arguments: argparse.Namespace) -> None:
    """Copy a checkpoint with weights in fp16. Raises BadInput if a weight is too large for that."""
    from xformer import checkpoint as checkpoints

    check_directory(arguments.out, arguments.overwrite, CHECKPOINT, Path(arguments.checkpoint))
    checkpoint = checkpoints.load(arguments.checkpoint)
    weights = {name: weight.half() for name, weight in checkpoint.weights.items()}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise BadInput(f"{arguments.checkpoint}: the weight {name} overflows fp16")
    small = replace(checkpoint, weights=weights)
    checkpoints.save(small, arguments.out, arguments.overwrite)
    size = (arguments.out / "model.safetensors").stat().st_size
    say(f"{arguments.out}: {len(weights)} weights, {size / 1e6:.1f} MB")


def _inspect(arguments: argparse.Namespace) -> None:
    """Show what a directory holds."""
    from xformer.convert.describe import describe

    say(*describe(arguments.path))


if __name__ == "__main__":
    run(main)
