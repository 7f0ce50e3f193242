"""`python -m xformer` runs the command `xformer`."""

from xformer.command import main

if __name__ == "__main__":
    main()
