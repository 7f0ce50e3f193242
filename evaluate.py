"""Score a checkpoint, fill masks, or predict raw rows.

    python evaluate.py runs/cola data=stores/cola split=test out=scores.json
    python evaluate.py runs/cola data=stores/cola split=valid predictions=rows.tsv
    python evaluate.py runs/english text='The [MASK] sat on the mat.' top=10
    python evaluate.py runs/cola input=sentences.csv out=predictions.tsv
    python evaluate.py runs/english blimp=BLiMP.zip pairs=100 out=blimp.json

The first argument is the directory of a checkpoint or of a finished run. A run stands for the
checkpoint that train.select chose. Give exactly one of data=, text=, input= and blimp=.
"""

from xformer.start import run


def main() -> None:
    # imported here, because `run` must prepare this process before torch is imported
    from xformer.evaluate import main
    from xformer.preprocess.tasks.predict import write_rows

    main(write_rows)


if __name__ == "__main__":
    run(main)
