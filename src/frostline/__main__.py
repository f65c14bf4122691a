"""`python -m frostline` is the `frostline` command."""

from frostline.cli.main import main

if __name__ == "__main__":
    main()
