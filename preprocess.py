"""Turn raw files into stores for training.

    python preprocess.py fetch --list
    python preprocess.py tokenizer --kind wordpiece --input corpus.txt --vocab-size 30000 \\
        --output stores/vocabulary
    python preprocess.py text --input corpus.txt --valid held-out.txt \\
        --tokenizer stores/vocabulary --output stores/corpus
    python preprocess.py task tsv --input reviews/ --text sentence --label label \\
        --tokenizer stores/vocabulary --output stores/reviews
    python preprocess.py task glue/cola --input CoLA/ --tokenizer stores/vocabulary \\
        --output stores/cola
    python preprocess.py task dna/splice --input splice.data --output stores/splice
    python preprocess.py synthetic nesting --tokens 20000000 --output stores/nesting
    python preprocess.py pydocs --output stores/pydocs
    python preprocess.py stats stores/corpus
    python preprocess.py verify stores/corpus

`python preprocess.py COMMAND --help` explains every option of a command.
"""

from xformer.start import run


def main() -> None:
    # imported here, so that Ctrl-C during the import ends in one line too
    from xformer.preprocess.cli import main

    main()


if __name__ == "__main__":
    run(main)
