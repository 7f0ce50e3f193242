r"""Pre-train or fine-tune a model, as a recipe says.

    # one process
    python train.py recipes/pretrain/mini.toml data=stores/english run=runs/english
    # two processes on this machine
    torchrun --standalone --nproc-per-node 2 train.py recipes/pretrain/mini.toml \
        data=stores/english run=runs/english
    # two machines; on the second with --node-rank 1
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --nproc-per-node 8 train.py ...
    # fine-tune the result, and its from-scratch baseline (twin)
    python train.py recipes/finetune/classify.toml data=stores/cola init=runs/english run=runs/cola
    python train.py recipes/finetune/classify.toml data=stores/cola init=runs/english \
        surgery='[{op="clean"}]' run=runs/cola-scratch

A recipe is a TOML file, or the name of one that comes with the package; `xformer recipes` lists
these. To resume a stopped run exactly where it left off, repeat the command. Values are parsed as
TOML; values that are not TOML are strings. data='["stores/a", "stores/b"]' joins the rows of two
stores.
"""

from xformer.start import run


def main() -> None:
    # imported here, because `run` must prepare this process before torch is imported
    from xformer.train import main

    main()


if __name__ == "__main__":
    run(main)
